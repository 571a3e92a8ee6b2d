import json
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def calls(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import calls

    return calls


def test_every_call_is_compared_and_timed_in_its_unit(calls, tmp_path, capsys):
    """A row per public call, and a peer that is not there is listed with the reason."""
    file = tmp_path / "calls.json"

    calls.main(["--rounds", "2", "--calls", "2", "--output", str(file)])

    report = json.loads(file.read_text())
    timed = {row["name"]: row for row in report["results"] if "missing" not in row}
    missing = [row for row in report["results"] if "missing" in row]
    assert {
        "rotate_qk, offset",
        "RoPE.rotate_and_cache, norm",
        "ALiBi, forward + backward",
    } <= timed.keys()
    assert all(row["ratio"] > 0 and len(row["seconds"]) == 2 for row in timed.values())
    assert {timed[row["unit"]]["ratio"] for row in timed.values()} == {1.0}
    assert report["machine"]["torch"] == torch.__version__
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 1 + len(timed) + len(missing)


def test_a_call_that_is_wrong_is_an_error(calls):
    """The time of a wrong result says nothing."""
    x = torch.randn(5)
    off = x.double() * (1 + 5 * torch.finfo(x.dtype).eps)
    row = calls.all_rows("cpu")[0]["q * 2"]._replace(call=lambda: x, exact=[x.double()])

    calls.check("right", row)
    with pytest.raises(SystemExit, match="wrong is off by 5"):
        calls.check("wrong", row._replace(exact=[off]))


def test_patched_models_generate_the_same_tokens_and_are_timed(calls, tmp_path, capsys):
    """Each ratio is to the other model, in the same round."""
    file = tmp_path / "models.json"

    calls.main(["--generate", "--only", "llama", "--rounds", "1", "--output", str(file)])

    (found,) = json.loads(file.read_text())["results"]
    assert found["same_tokens"]
    assert found["unpatched"]["ratio"] == pytest.approx(1 / found["patched"]["ratio"])
    assert "Llama" in capsys.readouterr().out
