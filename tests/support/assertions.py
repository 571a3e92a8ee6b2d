"""Assertions several test files share."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import oracles

# How many graphs there are is the same for both; Inductor starts a C++ compiler for each.
COMPILERS = pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)

# Options of Inductor. What vectors a CPU has it finds out by compiling for each, which takes 15 s.
SCALARS = {"cpp.vec_isa_ok": False}


def assert_within_ulps(got: Tensor, exact: Tensor, ulps: float, magnitude: Tensor) -> None:
    """``got`` is within ``ulps`` of ``exact``, spacings counted at ``magnitude``."""
    assert got.shape == exact.shape
    assert not got.isnan().any()
    if got.numel():
        off = (got.double() - exact).abs() / oracles.ulp(magnitude, got.dtype)
        assert off.max() <= ulps, f"off by {off.max():.4f} ulp"


def assert_rotated(
    got: Tensor, x: Tensor, positions, *, interleaved: bool, base: float = 1e4, ulps: float = 1.0
) -> None:
    """``got`` is ``x`` rotated by ``positions``, to ``ulps`` at the magnitude of each pair."""
    cos, sin = oracles.exact_cos_sin(positions, x.shape[-1], base)
    exact = oracles.rotate(x, cos, sin, interleaved=interleaved)
    size = oracles.pair_magnitude(exact, cos.shape[-1], interleaved=interleaved)
    assert got.dtype == x.dtype
    assert_within_ulps(got, exact, ulps, size)


def compilations(function, calls, **options) -> int:
    """How many graphs ``torch.compile(fullgraph=True)`` makes for ``calls``, each checked."""
    # Not imported above, because it takes seconds.
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(function, fullgraph=True, **options)
    for arguments in calls:
        wanted, got = function(*arguments), compiled(*arguments)
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
    return counters["stats"]["unique_graphs"]


def assert_exports(module, traced, others, *, strict=False) -> None:
    """``module.attention``, exported with ``traced``, takes ``others``, of another length."""
    attend = Attention(module)
    length = {2: torch.export.Dim("length", min=2, max=64)}
    program = torch.export.export(
        attend, tuple(traced), dynamic_shapes=(length,) * 3, strict=strict
    )
    with torch.no_grad():
        torch.testing.assert_close(program.module()(*others), attend(*others))


class Attention(torch.nn.Module):
    """The attention of a module as its forward, which is what torch.export takes."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, q, k, v):
        return self.module.attention(q, k, v)
