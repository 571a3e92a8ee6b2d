import io
import json
import sys

import pytest
import torch
from typer.testing import CliRunner

import posenc.cli
from posenc.lab.cases import CASES

QUICK = ["--rounds", "1", "--no-peers", "--layout", "half", "--device", "cpu"]


@pytest.fixture
def run():
    runner = CliRunner()
    app = posenc.cli.application()
    return lambda *arguments: runner.invoke(app, list(arguments))


def test_a_run_prints_a_plain_table_and_writes_json_and_a_picture(run, tmp_path):
    numbers, picture = tmp_path / "tiny.json", tmp_path / "tiny.png"
    done = run("bench", "tiny", *QUICK, "--json", str(numbers), "--plot", str(picture))
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("tiny bf16 half forward: B=1 H=1 Hk=1 L=1 D=64 at 3, 256 bytes")
    assert "\x1b" not in done.stdout
    assert "─" not in done.stdout
    for word in ("copy_", "clone", "posenc", "× copy", "ulp"):
        assert word in done.stdout
    found = json.loads(numbers.read_text())
    assert found["settings"] == {"threads": torch.get_num_threads(), "rounds": 1}
    assert [m["case"]["name"] for m in found["measurements"]] == ["tiny"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_measurements_are_saved_when_printing_them_fails(run, tmp_path, monkeypatch):
    from posenc.cli import bench

    monkeypatch.setattr(bench, "_show", lambda *shown: 1 / 0)
    numbers = tmp_path / "tiny.json"
    assert run("bench", "tiny", *QUICK, "--json", str(numbers)).exit_code != 0
    assert len(json.loads(numbers.read_text())["measurements"]) == 1


def test_the_example_in_the_help_runs(run):
    help_text = " ".join(run("bench", "--help").stdout.split())
    example = help_text.split("Example: posenc ")[1].split(" --rounds 5")[0]
    done = run(*example.split(), "--rounds", "1", "--no-peers", "--device", "cpu")
    assert done.exit_code == 0, done.output
    assert "decode fp32 half forward" in done.stdout
    assert "tiny fp32 half forward" in done.stdout


def test_the_list_has_every_case(run):
    lines = run("bench", "--list").stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(CASES)


def test_alone_it_shows_its_help(run):
    done = run()
    assert done.exit_code == 0
    assert "bench" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(["nope"], "CASE must be one of prefill", id="case"),
        pytest.param(["--dtype", "int8"], "--dtype must be one of fp32, bf16, fp16", id="dtype"),
        pytest.param(["--layout", "x"], "--layout must be one of half", id="layout"),
        pytest.param(["--device", "tpu"], "--device must be one of cpu, cuda", id="device"),
        pytest.param(["--mode", "x"], "--mode must be one of forward, train", id="mode"),
        pytest.param(["qk-norm", "--mode", "train"], "must be forward for", id="norm-train"),
        pytest.param(["--positions", "x"], "--positions must be one of", id="positions"),
        pytest.param(["--rounds", "0"], "--rounds", id="rounds"),
        pytest.param(["--threads", "some"], "--threads", id="threads"),
        pytest.param(["--json", "no/such/folder/x.json"], "folder that exists", id="json"),
        pytest.param(["--plot", "x.bmp"], ".png, .svg or .pdf", id="plot"),
        pytest.param(["--frob"], "--frob", id="option"),
    ],
)
def test_an_error_is_one_line_and_exit_code_2(run, arguments, words):
    done = run("bench", *arguments)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.startswith("posenc: ")
    assert done.stderr.count("\n") == 1
    assert words in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_missing_gpu_is_an_error(run):
    done = run("bench", "tiny", "--device", "cuda")
    assert done.exit_code == 2
    assert "no CUDA device" in done.stderr


def test_a_stream_of_ascii_gets_question_marks(monkeypatch):
    """A terminal without a sign must not cost a run its result."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "argv", ["posenc", "bench", "tiny", *QUICK])
    with pytest.raises(SystemExit) as stop:
        posenc.cli.main()
    stream.flush()
    assert stop.value.code == 0
    assert b"? copy" in stream.buffer.getvalue()
