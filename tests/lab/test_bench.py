import itertools
import json
import math
from types import SimpleNamespace

import pytest
import torch

import oracles
from posenc.lab import bench, machine, peers, truth
from posenc.lab.cases import CASES, DTYPES, Workload, choose
from posenc.lab.peers import Contestant, Missing
from posenc.lab.timing import Lane, race

QUICK = {"rounds": 3, "loop_seconds": 1e-4}
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def work(mode="forward", **options):
    return Workload("small", 2, 3, 1, 5, 8, offset=11, mode=mode, **options)


def only(monkeypatch, *entrants):
    monkeypatch.setattr(peers, "contestants", lambda work, peers: list(entrants))


def by_name(measurement):
    return {result["contestant"]: SimpleNamespace(**result) for result in measurement["results"]}


def exact(x, work, transposed=False):
    rows = work.positions().expand(work.batch, -1)
    turned = []
    for sequence, row in zip(x, rows, strict=True):
        cos, sin = oracles.exact_cos_sin(row.tolist(), x.shape[-1])
        sin = -sin if transposed else sin
        turned.append(oracles.rotate(sequence, cos, sin, interleaved=work.interleaved))
    return torch.stack(turned)


@pytest.mark.parametrize("ids", [False, True], ids=["offset", "ids"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_exact_rotation_is_right_and_five_ulps_off_is_not(dtype, interleaved, ids):
    """The check agrees with an oracle that shares nothing with it, and has teeth."""
    load = work(dtype=DTYPES[dtype], interleaved=interleaved, ids=ids)
    pair = load.pair(0)
    turned = tuple(exact(x, load) for x in pair)
    rounded = tuple(y.to(load.dtype) for y in turned)

    verdict = truth.judge(load, pair, rounded, float32_angles=False)
    assert verdict.reason == ""
    assert verdict.ulps <= 0.5 + 1e-6

    size = oracles.pair_magnitude(turned[1], 4, interleaved=interleaved)
    off = turned[1].clone()
    off[1, 0, 4, 7] += 5 * oracles.ulp(size, load.dtype)[1, 0, 4, 7]
    verdict = truth.judge(load, pair, (rounded[0], off.to(load.dtype)), float32_angles=False)
    assert "ulp allowed" in verdict.reason


def test_float32_angles_are_allowed_to_those_who_say_so():
    """2e-3 radians at position 8192, and no more."""
    load = Workload("far", 1, 1, 1, 1, 64, offset=8191, dtype=torch.float32)
    pair = load.pair(0)
    for radians, right in ((1e-3, True), (4e-3, False)):
        turn = torch.polar(torch.ones(()), torch.tensor(radians)).to(torch.complex128)
        off = []
        for x in pair:
            z = torch.complex(*exact(x, load).chunk(2, -1)) * turn
            off.append(torch.cat((z.real, z.imag), -1).float())
        assert (truth.judge(load, pair, tuple(off), float32_angles=True).reason == "") is right
        assert truth.judge(load, pair, tuple(off), float32_angles=False).reason


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", ["forward", "train"])
def test_everyone_is_timed_in_every_round_and_a_copy_is_one_copy(mode, device, monkeypatch):
    load = work(mode, interleaved=True, device=device)
    only(monkeypatch, *peers.contestants(load, peers=False))
    measurement = bench.measure(load, **QUICK)
    found = by_name(measurement)

    assert found["posenc"].status == "timed"
    assert found["posenc"].error_ulps <= 1
    assert found["copy_"].ratio == 1
    assert measurement["copies"] == (2 if mode == "train" else 1)
    for result in found.values():
        if result.status == "timed":
            assert len(result.seconds) == QUICK["rounds"]
            assert result.low <= result.median <= result.high
    assert ("clone" in found) == (device == "cpu")


def test_the_ratio_pairs_times_of_one_round():
    """A machine that halves its speed midway has not changed anybody's ratio."""
    copy = Lane("copy_", "loop", lambda n: 0.0, 1, seconds=[1.0, 1.0, 2.0, 2.0])
    ours = Lane("posenc", "loop", lambda n: 0.0, 1, seconds=[3.0, 3.0, 6.0, 6.0])
    result = bench._summarize([copy, ours], [bench.Result("posenc", "timed")])[1]
    assert (result.ratio_low, result.ratio, result.ratio_high) == (3.0,) * 3


@pytest.mark.parametrize(("mode", "wanted"), [("forward", 1), ("train", 2)])
def test_the_copy_moves_what_a_step_moves(mode, wanted):
    """In training the gradients too."""
    load = work(mode, interleaved=True)
    ((copy,), _) = bench._copies(load, [bench._inputs(load, 0)]).values()
    assert copy().nbytes == wanted * load.nbytes


def test_a_copy_that_is_slow_in_a_graph_flatters_nobody():
    copy = Lane("copy_", "loop", lambda n: 0.0, 1, seconds=[2.0])
    slow = Lane("copy_", "graph", lambda n: 0.0, 1, seconds=[3.0])
    ours = Lane("posenc", "graph", lambda n: 0.0, 1, seconds=[3.0])
    known = [bench.Result("posenc", "timed")]
    assert bench._summarize([copy, slow, ours], known)[2].ratio == 1.5


def lies(turn):
    return Contestant("liar", lambda work: turn)


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        pytest.param(lambda q, k: (q, k), "ulp", id="not-rotated"),
        pytest.param(lambda q, k: (q * math.nan, k), "ulp", id="nan"),
        pytest.param(lambda q, k: (q.float(), k.float()), "kind of output", id="dtype"),
        pytest.param(lambda q, k: (q[:1], k), "kind of output", id="shape"),
    ],
)
def test_a_wrong_contestant_is_refused_with_its_reason(turn, reason, monkeypatch):
    only(monkeypatch, lies(turn))
    result = by_name(bench.measure(work(), **QUICK))["liar"]
    assert result.status == "wrong"
    assert reason in result.reason
    assert result.seconds == []


def test_writing_into_the_inputs_is_refused_unless_declared(monkeypatch):
    def prepare(load):
        def call(q, k):
            q.copy_(exact(q, load))
            k.copy_(exact(k, load))
            return q, k

        return call

    entrants = Contestant("sly", prepare), Contestant("open", prepare, in_place=True)
    only(monkeypatch, *entrants)
    found = by_name(bench.measure(work(), **QUICK))
    assert (found["sly"].status, found["sly"].reason) == ("wrong", "wrote into its inputs")
    assert found["open"].status == "timed"


def test_a_wrong_gradient_is_refused(monkeypatch):
    """Right outputs whose gradient turns forward instead of back."""

    class Forward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return exact(x, work()).to(x.dtype)

        @staticmethod
        def backward(ctx, gradient):
            return exact(gradient, work()).to(gradient.dtype)

    only(monkeypatch, lies(lambda q, k: (Forward.apply(q), Forward.apply(k))))
    assert by_name(bench.measure(work(), **QUICK))["liar"].status == "timed"
    assert by_name(bench.measure(work("train"), **QUICK))["liar"].status == "wrong"


def test_who_raises_and_who_is_missing_stop_nobody(monkeypatch):
    def absent(load):
        raise Missing("not here")

    def broken(q, k):
        raise RuntimeError("\n  first line\nsecond line")

    only(
        monkeypatch,
        Contestant("absent", absent),
        Contestant("broken", lambda load: broken),
        Contestant("posenc", peers.posenc_forward),
    )
    found = by_name(bench.measure(work(), **QUICK))
    assert (found["absent"].status, found["absent"].reason) == ("missing", "not here")
    assert found["broken"].status == "failed"
    assert found["broken"].reason == "RuntimeError: first line"
    assert found["posenc"].status == "timed"


def test_rounds_are_interleaved_and_nobody_has_a_neighbour_of_its_own():
    order = []
    lanes = [Lane(n, "loop", lambda k, n=n: order.append(n) or 0.0, 1) for n in "abcd"]
    race(lanes, 30, lambda r: None)
    rounds = [order[i : i + 4] for i in range(0, 120, 4)]
    assert all(sorted(each) == list("abcd") for each in rounds)
    behind = {pair for each in rounds for pair in itertools.pairwise(each)}
    assert len(behind) == 12


def test_the_report_is_json_and_names_the_machine(monkeypatch):
    only(monkeypatch, *peers.contestants(work(), peers=False))
    found = bench.report([bench.measure(work(), **QUICK)], threads=2)
    again = json.loads(json.dumps(found, allow_nan=False))
    assert again == found
    assert {"cpu", "cores", "gpu", "torch", "triton", "date"} <= set(found["machine"])
    assert found["measurements"][0]["bytes"] == 2 * (3 + 1) * 5 * 8 * 2


def test_threads_come_back():
    before = torch.get_num_threads()
    with machine.threads(1):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


def test_without_names_a_device_gets_its_own_cases():
    names = [load.name for load in choose(layout="half")]
    assert names == ["prefill", "train", "decode", "tiny", "qk-norm"]
    assert {case.home for name, case in CASES.items() if name.startswith("h200")} == {"cuda"}


def test_positions_have_a_start_of_their_own_and_stay_in_the_table():
    load = work(ids=True)
    assert load.positions()[:, 0].tolist() == [11, 12]
    assert load.positions().max() == load.max_seq_len - 1
    assert work().positions().max() == work().max_seq_len - 1
