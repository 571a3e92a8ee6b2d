"""CoPE's kernels and its op: positions that gates count."""

import pytest
import torch

from posenc.functional.biased import hide_padding
from posenc.ops.attention import op
from posenc.ops.attention.biases import LevelFields
from posenc.ops.attention.call import Call
from support.attention import DEVICE, close
from support.plans import planned

SLOW = pytest.mark.slow
OPS = op.OPS[LevelFields]
CASES = {
    "square": {"size": (70, 70)},
    "unaligned": {"size": (33, 40)},
    "many-positions": {"size": (150, 150), "positions": 30},
    "few-positions": {"size": (150, 150), "positions": 4},
    "one-position": {"size": (40, 40), "positions": 1},
    "cache": {"size": (40, 100), "heads": (4, 2), "width": (24, 40), "positions": 20},
    "window": {"size": (100, 100), "window": (20, 0), "positions": 5},
    "documents": {"size": (90, 90), "documents": True},
    "offsets": {"size": (40, 120), "starts": [3, 70]},
    "one-query": {"size": (1, 100)},
}
QUICK = {"unaligned"}
EACH = pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in QUICK else SLOW) for case in CASES]
)


def given(
    size, *, heads=(2, 2), width=(16, 16), positions=9, starts=None, documents=False, window=None
):
    """q, k, v and levels, in float32, and the call."""
    torch.manual_seed(1)
    queries, keys = size
    q = torch.randn(2, queries, heads[0], width[0]).transpose(1, 2).to(DEVICE)
    k = torch.randn(2, heads[1], keys, width[0]).to(DEVICE)
    v = torch.randn(2, heads[1], keys, width[1]).to(DEVICE)
    levels = torch.randn(2, heads[0], queries, positions).to(DEVICE)
    ids = torch.sort(torch.randint(-1, 2, (2, keys)), -1)[0].to(DEVICE) if documents else None
    begin = None if starts is None else torch.tensor(starts, device=DEVICE)
    first, last = hide_padding(ids)
    start = keys - queries if begin is None else begin
    how = {"scale": 0.3, "causal": True, "first": first, "last": last, "window": window}
    return [q, k, v, levels], ids, Call.of(LevelFields(levels), start=start, **how)


def written_down(tensors, ids, call):
    """Output and log-sum-exp in float64, one query of one head at a time."""
    q, k, v, levels = tensors
    outs, sums = [], []
    for b, h, n in torch.cartesian_prod(*map(torch.arange, q.shape[:3])).tolist():
        own = n + (call.start if call.starts is None else int(call.starts[b]))
        kv = h // (q.shape[1] // k.shape[1])
        first = 0 if call.window is None else max(0, own - call.window[0])
        seen = [j for j in range(first, own + 1) if ids is None or ids[b, j] == ids[b, own] >= 0]
        if not seen:
            outs.append(v.new_zeros(v.shape[3]))
            sums.append(q.new_tensor(-torch.inf))
            continue
        scores = k[b, kv, seen] @ q[b, h, n] * call.scale
        # Consecutive keys, up to the query's own.
        at = scores.sigmoid().flip(0).cumsum(0).flip(0).clamp(max=levels.shape[3] - 1)
        below = at.detach().floor().long()
        above = (below + 1).clamp(max=levels.shape[3] - 1)
        left, right = levels[b, h, n, below], levels[b, h, n, above]
        scores = scores + left + (right - left) * (at - below)
        outs.append(scores.softmax(0) @ v[b, kv, seen])
        sums.append(scores.logsumexp(0))
    return torch.stack(outs).view(*q.shape[:3], -1), torch.stack(sums).view(q.shape[:3])


@EACH
@pytest.mark.parametrize("by", ["kernel", "operations"])
def test_results_and_gradients_are_those_of_the_definition(by, case):
    if by == "kernel":
        pytest.importorskip("triton")
    tensors, ids, call = given(**CASES[case])
    wide = [x.double().requires_grad_() for x in tensors]
    out, lse = written_down(wide, ids, call)
    g, g_lse = torch.randn(out.shape).to(DEVICE), torch.randn(lse.shape).to(DEVICE)
    g_lse = g_lse.masked_fill(lse == -torch.inf, 0.0)
    seen = lse.masked_fill(lse == -torch.inf, 0.0)
    grads = torch.autograd.grad((out, seen), wide, (g.double(), g_lse.double()))
    if by == "kernel":
        given_too = *tensors[:3], *op.arguments(call._replace(to_bias=True))
        results = planned(OPS.forward, *given_too)
        found = planned(OPS.backward, g, g_lse, *results, *given_too)
    else:
        q, k, v, levels = inputs = [x.clone().requires_grad_() for x in tensors]
        results = op.attend(q, k, v, call._replace(bias=LevelFields(levels)))
        found = torch.autograd.grad(results, inputs, (g, g_lse))
    assert close(results[0].detach(), out.detach())
    assert close(results[1].detach(), lse.detach())
    for got, want in zip(found, grads, strict=True):
        assert close(got, want, 3e-5)


@pytest.mark.skipif(DEVICE == "cpu", reason="the backward pass is an op only where a kernel is")
def test_the_backward_op_passes_opcheck():
    (q, k, v, _), _, call = given((9, 12))
    given_too = q, k, v, *op.arguments(call._replace(to_bias=True))
    out, lse = OPS.forward(*given_too)
    saved = torch.randn_like(out), None, out, lse
    torch.library.opcheck(OPS.backward.overload, (*saved, *given_too))


def test_the_op_counts_from_the_query_backwards_only():
    (q, k, v, _), _, call = given((9, 12))
    with pytest.raises(ValueError, match=r"posenc::attend_cope: .* must fit"):
        op.attend(q, k, v, call._replace(causal=False))
