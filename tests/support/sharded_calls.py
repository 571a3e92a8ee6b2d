"""Calls with DTensors, compared with the same calls in one process."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing import assert_close

from posenc import attention
from posenc.attention.biased import attend_last


def equal_to_one_process(function, tensors, placements, mesh):
    """``function`` of DTensors is that of plain tensors, and so are the gradients: to the bit."""
    plain = [x.clone().requires_grad_() for x in tensors]
    spread = [activation(x, mesh, p) for x, p in zip(tensors, placements, strict=True)]
    wanted = _tuple(function(*plain))
    with CommDebugMode() as communication:
        got = _tuple(function(*spread))
    assert not communication.get_total_counts(), communication.get_comm_counts()
    generator = torch.Generator().manual_seed(1)
    for a, b, x in zip(wanted, got, spread, strict=False):
        assert b.placements == x.placements, f"{x.placements} became {b.placements}"
        assert torch.equal(b.full_tensor(), a)
    seeds = [torch.randn(y.shape, generator=generator) for y in wanted]
    wanted_back = torch.autograd.grad(wanted, plain, seeds)
    spread_seeds = [
        distribute_tensor(s, mesh, y.placements) for s, y in zip(seeds, got, strict=True)
    ]
    with CommDebugMode() as communication:
        got_back = torch.autograd.grad(got, spread, spread_seeds)
    assert not communication.get_total_counts(), communication.get_comm_counts()
    for a, b in zip(wanted_back, got_back, strict=True):
        assert torch.equal(b.full_tensor(), a)


def activation(x, mesh, placements):
    """``x`` spread over processes, and not a leaf: torch 2.11 gathers an uneven leaf's gradient."""
    return distribute_tensor(x, mesh, placements).requires_grad_().clone()


def _tuple(y):
    return y if isinstance(y, tuple) else (y,)


def biased_attention(mesh, ways):
    """The numbers of a bias are of the whole sequence, and so are their gradients."""
    g = torch.Generator().manual_seed(6)
    tensors = [torch.randn(4, heads, 24, 8, generator=g).double() for heads in (8, 4, 4)]
    ids = torch.tensor([0] * 10 + [1] * 11 + [-1] * 3)
    biases = (
        attention.Slopes(torch.rand(8, generator=g).double()),
        attention.Slopes(torch.rand(4, 8, generator=g).double()),
        attention.DistanceTable(torch.randn(8, 9, generator=g).double(), 4),
        attention.RunningSum(-torch.rand(8, 24, generator=g).double().cumsum(-1)),
        attention.RunningSum(-torch.rand(4, 8, 24, generator=g).double().cumsum(-1)),
    )
    run = attention.biased_attention_with_lse
    for n, bias in enumerate(biases):
        for way in ways:
            for as_dtensor in (False, True):
                how = {"causal": n % 2 == 0, "document_ids": ids if as_dtensor else None}
                how["window"] = 7 if n % 2 and as_dtensor else None
                plain = [x.clone().requires_grad_() for x in (*tensors, bias.values)]
                wanted = run(*plain[:3], bias._replace(values=plain[3]), **how)
                spread = [activation(x, mesh, way) for x in tensors]
                values = bias.values.clone().requires_grad_()
                if as_dtensor:
                    values = activation(bias.values, mesh, [Replicate()] * mesh.ndim)
                got = run(*spread, bias._replace(values=values), **how)
                for a, b in zip(wanted, got, strict=True):
                    assert b.placements == tuple(way)
                    assert_close(b.full_tensor(), a, rtol=1e-12, atol=1e-12)
                # A query that sees no key has no log-sum-exp to derive.
                seeds = [torch.ones_like(x) * x.detach().isfinite() for x in wanted]
                wanted_back = torch.autograd.grad(wanted, plain, seeds)
                seeds = [distribute_tensor(x, mesh, way) for x in seeds]
                got_back = torch.autograd.grad(got, [*spread, values], seeds)
                for a, b in zip(wanted_back, got_back, strict=True):
                    b = b.full_tensor() if isinstance(b, DTensor) else b
                    assert_close(b, a, rtol=1e-12, atol=1e-12)
    spread = [distribute_tensor(x, mesh, ways[-1]) for x in tensors]
    # What the layers of a patched model call.
    how = {"scale": 0.3, "causal": True, "prune": True}
    wanted = attend_last(*tensors, biases[3], **how)
    got = attend_last(*spread, biases[3], **how).full_tensor()
    assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    with pytest.raises(TypeError, match="k must be a DTensor, as q is, got Tensor"):
        run(spread[0], *tensors[1:])
    with pytest.raises(TypeError, match="None where q is a DTensor, got RowBias"):
        run(*spread, attention.RowBias(lambda own, index: own))
