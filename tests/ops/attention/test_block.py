"""Attention to a block of keys that the queries are not among."""

from importlib.util import find_spec

import pytest
import torch
from torch.testing import assert_close

from posenc.ops.attention import chunked
from support.attention import DEVICE, call_of
from support.plans import planned_attention, planned_gradients

BLOCKS = [
    pytest.param(5, 7, 7, id="next"),
    pytest.param(7, 5, 30, id="far-and-fewer-keys"),
    pytest.param(3, 1, 1, id="one-key"),
    pytest.param(20, 260, 260, id="split", marks=pytest.mark.slow),
    pytest.param(40, 70, 70, id="tiles"),
    pytest.param(4, 6, -4, id="later"),
    pytest.param(40, 20, -200, id="far-later"),
]


def kernels():
    by_pieces = chunked.forward, chunked.backward
    yield pytest.param(by_pieces, torch.float64, 1e-12, id="chunked")
    if find_spec("triton") is None:
        return
    by_plan = planned_attention, planned_gradients
    # The interpreter takes a second for each.
    yield pytest.param(by_plan, torch.float32, 2e-5, id="triton", marks=pytest.mark.slow)


def numbers(kind, queries, keys, start, dtype):
    """The numbers of a bias, and the bias itself as a function of them."""
    g = torch.Generator().manual_seed(2)
    distance = start + torch.arange(queries)[:, None] - torch.arange(keys)
    if kind == "none":
        return None, lambda values: 0.0
    if kind == "slopes":
        slopes = 0.1 * torch.rand(1, 4, generator=g).to(dtype)
        return slopes, lambda values: -values[..., None, None] * distance.abs()
    if kind == "table":
        columns = (distance + 3).clamp(0, 19)
        table = torch.randn(4, 20, generator=g).to(dtype)
        return table, lambda values: values[:, columns]
    sums = torch.randn(2, 4, keys + queries, generator=g, dtype=torch.float64)
    return sums, lambda c: c[..., keys:, None] - c[..., None, :keys]


@pytest.mark.parametrize("kind", ["none", "slopes", "table", "sums"])
@pytest.mark.parametrize(("queries", "keys", "start"), BLOCKS)
@pytest.mark.parametrize(("kernel", "dtype", "tolerance"), list(kernels()))
def test_queries_may_be_anywhere(kernel, dtype, tolerance, queries, keys, start, kind):
    """Another rank's keys are before or after all of the queries, at any distance."""
    g = torch.Generator().manual_seed(1)
    device = "cpu" if kernel[0] is chunked.forward else DEVICE
    q = torch.randn(2, 4, queries, 8, generator=g).to(dtype)
    k = torch.randn(2, 2, keys, 8, generator=g).to(dtype)
    v = torch.randn(2, 2, keys, 16, generator=g).to(dtype)
    values, bias = numbers(kind, queries, keys, start, dtype)
    whole = [
        x.double().clone().requires_grad_()
        for x in (q, k, v, *([] if values is None else [values]))
    ]
    wide_k, wide_v = (x.repeat_interleave(2, 1) for x in whole[1:3])
    scores = whole[0] @ wide_k.mT * 0.4 + bias(*whole[3:] or [None])
    wanted = scores.softmax(-1) @ wide_v, scores.logsumexp(-1)
    seeds = [torch.randn(x.shape, generator=g).to(dtype) for x in wanted]
    wanted_back = torch.autograd.grad(wanted, whole, [x.double() for x in seeds])

    q, k, v, *seeds = (x.to(device) for x in (q, k, v, *seeds))
    values = None if values is None else values.to(device)
    start = keys if kind == "sums" else start
    how = {"zero": 3, "causal": start >= keys, "prune": False}
    call = call_of(values, kind, start=start, scale=0.4, **how)
    forward, backward = kernel
    out, lse, *ranges = forward(q, k, v, call)
    to_values = values is not None
    got_back = backward(*seeds, (q, k, v, out, lse, *ranges), call, to_values)

    for a, b in zip((out, lse, *got_back), (*wanted, *wanted_back), strict=False):
        # A gradient of a slope is a sum of many distances, and of the size of the largest.
        largest = max(1.0, b[b.isfinite()].abs().max().item())
        assert_close(a.double().cpu(), b.detach(), rtol=0.0, atol=tolerance * largest)
