"""What a kernel of products is given, for calls of any length."""

import pytest
import torch

import posenc
from posenc.functional import biased
from support.assertions import assert_exports, compilations

MODULES = {
    "RelativeKeys": lambda: posenc.RelativeKeys(8, max_distance=9),
    "DeBERTaBias": lambda: posenc.DeBERTaBias(2, head_dim=8, max_relative_positions=3, causal=True),
    "DeBERTaBias, both sides": lambda: posenc.DeBERTaBias(
        2, head_dim=8, max_relative_positions=3, causal=False
    ),
    "TransformerXLBias": lambda: posenc.TransformerXLBias(2, embed_dim=16),
}


@pytest.fixture
def module(request, monkeypatch):
    """A module whose calls go to the op of the kernels, which has operations of torch here."""
    monkeypatch.setattr(biased, "has_kernel", lambda q, v, bias: True)
    return MODULES[request.param]()


EACH = pytest.mark.parametrize("module", MODULES, indirect=True)


def qkv(length):
    return torch.randn(3, 2, 2, length, 8).unbind()


@pytest.mark.slow
@EACH
def test_an_exported_program_takes_lengths_on_both_sides_of_the_reach(module):
    assert_exports(module, qkv(30), qkv(3))


@pytest.mark.parametrize(
    "module",
    [n if n == "RelativeKeys" else pytest.param(n, marks=pytest.mark.slow) for n in MODULES],
    indirect=True,
)
def test_one_graph_serves_lengths_on_both_sides_of_the_reach(module):
    calls = [qkv(length) for length in (30, 3, 12)]
    assert compilations(module, calls, dynamic=True, backend="eager") == 1


@pytest.mark.slow
@EACH
def test_lengths_may_be_static(module):
    assert compilations(module, [qkv(30)], dynamic=False, backend="eager") == 1
