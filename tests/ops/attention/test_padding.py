"""Keys that are hidden from all queries: between others, and all that a query sees."""

import pytest
import torch

from posenc.ops.attention import op
from posenc.ops.attention.op import OPS, arguments
from support.attention import DEVICE, call_of, close, cut_into_small_pieces, numbers_of
from support.plans import planned_attention, planned_gradients

SLOW = pytest.mark.slow
KEYS = 100


def by_kernel(inputs, call, g, g_lse):
    results = planned_attention(*inputs, call)
    return (*results[:2], *planned_gradients(g, g_lse, (*inputs, *results), call, call.to_bias))


def by_op(inputs, call, g, g_lse):
    leaves = [x.clone().requires_grad_() for x in (*inputs, *call.bias) if torch.is_tensor(x)]
    if leaves[3:]:
        call = call._replace(bias=call.bias._replace(values=leaves[3]))
    results = op.attend(*leaves[:3], call)
    return *results, *torch.autograd.grad(results, leaves, (g, g_lse))


def all_at_once(inputs, call, g, g_lse):
    """As torch.func and exporters have it."""
    leaves = [x.clone().requires_grad_() for x in (*inputs, *call.bias) if torch.is_tensor(x)]
    if leaves[3:]:
        call = call._replace(bias=call.bias._replace(values=leaves[3]))
    forward = OPS[type(call.bias)].forward
    results = forward.operations(forward.call(*leaves[:3], *arguments(call)))[:2]
    return *results, *torch.autograd.grad(results, leaves, (g, g_lse))


@pytest.fixture
def attend(request, monkeypatch):
    if request.param is by_kernel:
        pytest.importorskip("triton")
    cut_into_small_pieces(monkeypatch)
    return request.param


@pytest.mark.parametrize("queries", [3, 70])
@pytest.mark.parametrize("kind", ["none", "slopes", "table", "sums"])
@pytest.mark.parametrize(
    "attend",
    [
        pytest.param(by_op, id="op"),
        pytest.param(all_at_once, id="operations"),
        pytest.param(by_kernel, id="kernel", marks=SLOW),
    ],
    indirect=True,
)
@pytest.mark.parametrize("shared", [False, True], ids=["each", "shared"])
def test_hidden_keys_have_no_weight(attend, kind, queries, shared):
    """Values and all gradients in float64; a query that sees no key gets zero."""
    torch.manual_seed(3)
    device = DEVICE if attend is by_kernel else "cpu"
    q, g = torch.randn(2, 2, 2, queries, 16, device=device)
    k, v = torch.randn(2, 2, 2, KEYS, 16, device=device)
    padding = torch.rand(1 if shared else 2, KEYS, device=device) < 0.6
    padding[0, :50] = False
    values = numbers_of(kind, 2, KEYS, batch=1, columns=40, steep=4.0)
    values = None if values is None else values.to(device)
    start = KEYS - queries - 10
    call = call_of(values, kind, start=start, scale=0.25, padding=padding.byte())
    call = call._replace(to_bias=values is not None)

    i = start + torch.arange(queries, device=device)[:, None]
    j = torch.arange(KEYS, device=device)
    seen = (j <= i) & padding[:, None, None]
    exact = [x.double().requires_grad_() for x in (q, k, v, values) if x is not None]
    bias = 0.0
    if kind == "slopes":
        bias = -exact[3].view(1, 2, 1, 1) * (i - j).abs()
    if kind == "table":
        bias = exact[3][:, (i - j).clamp(0, 39)]
    if kind == "sums":
        bias = exact[3][:, :, i] - exact[3][:, :, None]
    scores = (exact[0] @ exact[1].mT * 0.25 + bias).masked_fill(~seen, -torch.inf)
    nothing = ~seen.any(-1, keepdim=True).expand(2, 2, queries, 1)
    assert queries == 3 or nothing.any()
    weights = scores.masked_fill(nothing, 0.0).softmax(-1).masked_fill(~seen, 0.0)
    wanted, lse = weights @ exact[2], scores.logsumexp(-1)
    g_lse = torch.randn_like(lse).masked_fill(nothing[..., 0], 0.0)
    loss = (wanted * g).sum() + (lse.masked_fill(nothing[..., 0], 0.0) * g_lse).sum()
    grads = torch.autograd.grad(loss, exact)

    results = attend((q, k, v), call, g, g_lse.float())
    assert close(results[0].detach(), wanted.detach())
    assert torch.equal(results[1] == -torch.inf, lse == -torch.inf)
    assert close(results[1].detach(), lse.detach())
    for got, true in zip(results[2:], grads, strict=True):
        assert close(got, true, 3e-5)


@pytest.mark.parametrize("kind", ["slopes", "sums"])
def test_a_query_whose_own_key_is_hidden_keeps_far_keys(kind, monkeypatch):
    """All bounds begin with the score of the own key, which is the highest of all here."""
    cut_into_small_pieces(monkeypatch)
    torch.manual_seed(3)
    q = torch.randn(1, 1, KEYS, 16, dtype=torch.float64)
    v, padding = torch.randn_like(q), torch.ones(1, KEYS, dtype=torch.uint8)
    padding[:, 20:] = 0
    values = torch.ones(1, 1) if kind == "slopes" else -torch.arange(float(KEYS)).view(1, 1, -1)
    call = call_of(values.double(), kind, start=0, scale=1.0, padding=padding)
    out, _ = op.attend(q, q, v, call)

    i, j = torch.arange(KEYS)[:, None], torch.arange(KEYS)
    seen = (j <= i) & (j < 20)
    scores = (q @ q.mT - (i - j).abs()).masked_fill(~seen, -torch.inf)
    torch.testing.assert_close(out, scores.softmax(-1) @ v)


@pytest.mark.parametrize("places", ["starts", "documents"])
def test_each_sequence_has_its_own_hidden_keys_where_others_are_shared(places):
    torch.manual_seed(3)
    q, k, v = torch.randn(3, 2, 2, 30, 16).unbind()
    padding = torch.ones(2, 30, dtype=torch.uint8)
    padding[0, :3] = 0
    call = call_of(torch.ones(1, 2), "slopes", start=0, scale=0.25, padding=padding)
    shared = {"starts": torch.zeros(1, dtype=torch.int64)}
    if places == "documents":
        zero = torch.zeros(1, 30, dtype=torch.int64)
        shared = {"first": zero, "last": zero + 29}
    out, lse = op.attend(q, k, v, call._replace(**shared))
    wanted, wanted_lse = op.attend(q, k, v, call)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(lse, wanted_lse)
