"""The benchmark of the rotation, a script: what is wrong is refused, and the rest is written."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch

import oracles

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import rotation
import rotation_peers
from rotation_cases import DTYPES, Workload
from rotation_peers import Contestant
from rotation_truth import judge


def work(mode="forward", **options):
    return Workload("small", 2, 3, 1, 5, 8, offset=11, mode=mode, **options)


def measured(monkeypatch, load, *entrants):
    """The result of each entrant, by its name."""
    monkeypatch.setattr(rotation_peers, "contestants", lambda work, peers: list(entrants))
    found = rotation.measure(load, rounds=2, loop_seconds=1e-4)
    return {result["contestant"]: result for result in found["results"]}


def exact(x, work):
    rows = work.positions().expand(work.batch, -1)
    turned = []
    for sequence, row in zip(x, rows, strict=True):
        cos, sin = oracles.exact_cos_sin(row.tolist(), x.shape[-1])
        turned.append(oracles.rotate(sequence, cos, sin, interleaved=work.interleaved))
    return torch.stack(turned)


@pytest.mark.parametrize("ids", [False, True], ids=["offset", "ids"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_exact_rotation_is_right_and_five_ulps_off_is_not(dtype, interleaved, ids):
    """The check agrees with an oracle that shares nothing with it."""
    load = work(dtype=DTYPES[dtype], interleaved=interleaved, ids=ids)
    pair = load.pair(0)
    turned = tuple(exact(x, load) for x in pair)
    rounded = tuple(y.to(load.dtype) for y in turned)

    verdict = judge(load, pair, rounded, float32_angles=False)
    assert verdict.reason == ""
    assert verdict.ulps <= 0.5 + 1e-6

    size = oracles.pair_magnitude(turned[1], 4, interleaved=interleaved)
    off = turned[1].clone()
    off[1, 0, 4, 7] += 5 * oracles.ulp(size, load.dtype)[1, 0, 4, 7]
    verdict = judge(load, pair, (rounded[0], off.to(load.dtype)), float32_angles=False)
    assert "ulp allowed" in verdict.reason


WRONG = {
    "not-rotated": (lambda q, k: (q, k), "ulp"),
    "nan": (lambda q, k: (q * math.nan, k), "ulp"),
    "dtype": (lambda q, k: (q.float(), k.float()), "kind of output"),
    "shape": (lambda q, k: (q[:1], k), "kind of output"),
}


def test_a_wrong_contestant_is_refused_with_its_reason(monkeypatch):
    """The time of a wrong result says nothing."""
    entrants = [Contestant(name, lambda work, f=f: f) for name, (f, _) in WRONG.items()]
    found = measured(monkeypatch, work(), *entrants)
    for name, (_, reason) in WRONG.items():
        assert found[name]["status"] == "wrong"
        assert reason in found[name]["reason"]
        assert found[name]["seconds"] == []


def test_writing_into_the_inputs_is_refused_unless_declared(monkeypatch):
    """A call that saves the memory of its outputs has less to do."""

    def prepare(load):
        return lambda q, k: (q.copy_(exact(q, load)), k.copy_(exact(k, load)))

    entrants = Contestant("silent", prepare), Contestant("declared", prepare, in_place=True)
    found = measured(monkeypatch, work(), *entrants)
    assert found["silent"]["reason"] == "wrote into its inputs"
    assert found["declared"]["status"] == "timed"


def test_a_wrong_gradient_is_refused(monkeypatch):
    """Right outputs whose gradient turns forward instead of back."""

    class Forward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return exact(x, work()).to(x.dtype)

        @staticmethod
        def backward(ctx, gradient):
            return exact(gradient, work()).to(gradient.dtype)

    entrant = Contestant("wrong", lambda load: lambda q, k: (Forward.apply(q), Forward.apply(k)))
    assert measured(monkeypatch, work(), entrant)["wrong"]["status"] == "timed"
    assert measured(monkeypatch, work("train"), entrant)["wrong"]["status"] == "wrong"


def test_a_run_prints_a_table_and_writes_json_and_a_picture(tmp_path, capsys):
    """The copy is its own unit, and each time is in the file."""
    numbers, picture = tmp_path / "tiny.json", tmp_path / "tiny.png"
    options = "tiny --layout half --device cpu --no-peers --rounds 2 --threads 1".split()
    rotation.main([*options, "--json", str(numbers), "--plot", str(picture)])

    printed = capsys.readouterr().out
    assert printed.startswith("tiny bf16 half forward: B=1 H=1 Hk=1 L=1 D=64 at 3, 256 bytes")
    report = json.loads(numbers.read_text())
    assert report["settings"] == {"threads": 1, "rounds": 2}
    (found,) = report["measurements"]
    results = {result["contestant"]: result for result in found["results"]}
    assert results.keys() == {"copy_", "clone", "posenc", "posenc in place"}
    for name, result in results.items():
        assert result["status"] == "timed", result["reason"]
        assert len(result["seconds"]) == 2
        assert name in printed
    assert results["copy_"]["ratio"] == 1
    assert results["posenc"]["error_ulps"] <= 1
    assert picture.read_bytes().startswith(b"\x89PNG")
