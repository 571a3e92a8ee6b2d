from dataclasses import replace

import pytest
import torch

from posenc.lab import bench, peers
from posenc.lab.cases import Workload
from posenc.lab.peers import Missing

# A head of 64, so that float32 rates are what peers have in models.
CASES = {
    "rotary": Workload("rotary", 2, 2, 1, 7, 64),
    "offset": Workload("offset", 2, 2, 1, 7, 64, offset=100),
    "train": Workload("train", 2, 2, 1, 7, 64, mode="train"),
    "qk-norm": Workload("qk-norm", 2, 2, 1, 7, 64, qk_norm=True),
}
NAMES = sorted({c.name for case in CASES.values() for c in peers.contestants(case)})


@pytest.fixture(autouse=True)
def _eager(monkeypatch):
    """Compiling takes longer than every other test here together, and changes no adapter."""
    monkeypatch.setattr(torch, "compile", lambda call, **options: call)


@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
@pytest.mark.parametrize("ids", [False, True], ids=["first", "ids"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", NAMES)
def test_an_adapter_is_right_or_says_why_it_is_not_there(name, case, ids, interleaved):
    """float32, where the one peer that rounds positions to its input's dtype is right too."""
    load = replace(CASES[case], dtype=torch.float32, interleaved=interleaved, ids=ids)
    found = [c for c in peers.contestants(load) if c.name == name]
    for contestant in found:
        result, call = bench._admit(contestant, load)
        assert result.status in ("timed", "missing"), result.reason
        assert (call is None) == (result.status == "missing")
        assert (result.reason == "") == (result.status == "timed")


@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
def test_posenc_always_takes_part(interleaved):
    load = replace(CASES["rotary"], interleaved=interleaved)
    first = peers.contestants(load)[0]
    result, _ = bench._admit(first, load)
    assert (first.name, result.status) == ("posenc", "timed")
    assert result.error_ulps <= 1


def test_without_peers_there_is_posenc_alone():
    for case in CASES.values():
        names = [c.name for c in peers.contestants(case, peers=False)]
        assert names
        assert all(name.startswith("posenc") for name in names)


def test_a_peer_that_cannot_be_imported_says_so_in_one_line():
    with pytest.raises(Missing, match="cannot import no_such_peer") as missing:
        peers.load("no_such_peer")
    assert "\n" not in str(missing.value)


def test_the_versions_are_those_installed():
    load = CASES["rotary"]
    versions = {c.name: c.version() for c in peers.contestants(load)}
    assert versions["posenc"] is None
    assert versions["complex multiply"] is None
