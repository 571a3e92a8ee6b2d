"""The attention kernels against float64: in Triton's interpreter, or on the GPU if there is one."""

import itertools
from collections import OrderedDict

import pytest
import torch

from posenc.functional.biased import hide_padding
from posenc.ops import native
from posenc.ops.attention import op
from posenc.ops.attention.op import fits_kernels
from support.attention import DEVICE, call_of, numbers_of, written_down
from support.plans import planned_attention, planned_gradients

pytest.importorskip("triton")
KINDS = ["none", "slopes", "table", "sums"]
SLOW = pytest.mark.slow
CASES = {
    "square": {"size": (70, 70)},
    "one-query-one-key": {"size": (1, 1)},
    "cache": {"size": (67, 150), "heads": (4, 2), "width": (24, 80)},
    "offsets": {"size": (66, 170), "starts": [3, 100]},
    "documents": {"size": (90, 90), "heads": (2, 1), "documents": True},
    "symmetric": {"size": (70, 70), "causal": False, "zero": 17},
    "symmetric-documents": {"size": (90, 90), "causal": False, "documents": True, "zero": 39},
    "symmetric-cache": {"size": (66, 150), "causal": False, "zero": 1},
    "decode": {"size": (3, 300), "heads": (4, 2), "starts": [30, 297]},
    "decode-in-one-part": {"size": (1, 300), "heads": (8, 4)},
    "long-table": {"size": (70, 100), "columns": 300},
    "one-column": {"size": (70, 70), "columns": 1},
    "window": {"size": (150, 150), "window": (20, 0)},
    "window-cache": {"size": (66, 170), "heads": (4, 2), "starts": [3, 100], "window": (63, 63)},
    "window-documents": {"size": (90, 90), "documents": True, "window": (9, 0), "columns": 10},
    "symmetric-window": {"size": (150, 150), "causal": False, "zero": 17, "window": (70, 5)},
    "one-sided-window": {"size": (90, 90), "causal": False, "zero": 17, "window": (2**30, 30)},
    "window-decode": {"size": (3, 300), "heads": (4, 2), "window": (40, 0)},
}
# The interpreter takes seconds for each: the others run in make test-all.
QUICK = {
    ("square", "slopes"),
    ("symmetric", "table"),
    ("one-query-one-key", "none"),
    ("one-query-one-key", "sums"),
    ("window-documents", "table"),
    ("window-decode", "slopes"),
}


def run(
    kind, size, *, heads=(2, 2), width=(16, 16), causal=True, zero=0, starts=None, documents=False,
    columns=40, window=None, prune=True, steep=1.0, dtype=torch.float32,
):  # fmt: skip
    """Results and gradients of the kernels, and the same in float64."""
    torch.manual_seed(3)
    queries, keys = size
    zero = min(zero, columns - 1)
    batch = 2 if documents or starts is not None else 1
    # Projections give (B, L, H, D) seen as (B, H, L, D).
    q = torch.randn(batch, queries, heads[0], width[0]).transpose(1, 2).to(DEVICE, dtype)
    k = torch.randn(batch, heads[1], keys, width[0]).to(DEVICE, dtype)
    v = torch.randn(batch, heads[1], keys, width[1]).to(DEVICE, dtype)
    values = numbers_of(kind, heads[0], keys, batch=batch, columns=columns, steep=steep)
    values = None if values is None else values.to(DEVICE)
    begin = torch.tensor([keys - queries] * batch if starts is None else starts, device=DEVICE)
    ids = None
    if documents:
        ids = torch.arange(keys, device=DEVICE)[None] // torch.tensor([[37], [50]], device=DEVICE)
        ids[0, -5:] = -1
    first, last = hide_padding(ids)
    scale = width[0] ** -0.5
    start = keys - queries if starts is None else begin
    call = call_of(
        values, kind, start=start, scale=scale, zero=zero, causal=causal, prune=prune,
        first=first, last=last, window=window,
    )  # fmt: skip

    out, lse, *ranges = planned_attention(q, k, v, call)
    g, g_lse = torch.randn_like(out), torch.randn_like(lse).masked_fill(lse == -torch.inf, 0)
    to_values = values is not None
    back = [
        planned_gradients(g, g_lse, (q, k, v, out, lse, *ranges), call, to_values) for _ in "ab"
    ]

    exact = [x.double().requires_grad_() for x in (q, k, v, values) if x is not None]
    own = begin[:, None] + torch.arange(queries, device=DEVICE)
    true_out, true_lse = written_down(
        *exact[:3], exact[3] if to_values else None, kind,
        own=own, scale=scale, zero=zero, causal=causal, documents=ids, window=window,
    )  # fmt: skip
    seen = true_lse != -torch.inf
    loss = (true_out * g.double()).sum() + (true_lse * g_lse.double())[seen].sum()
    grads = torch.autograd.grad(loss, exact)
    return (out, lse), back, (true_out.detach(), true_lse.detach()), grads, ranges


def assert_is_exact(made, back, wanted, grads, dtype):
    """Norms of the errors: a result has the rounding of the dtype in each product and weight."""
    room = 4e-6 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    (out, lse), (true_out, true_lse) = made, wanted
    assert (out.double() - true_out).norm() <= room * true_out.norm()
    assert torch.equal(lse == -torch.inf, true_lse == -torch.inf)
    seen = true_lse != -torch.inf
    error = (lse.double() - true_lse)[seen].abs()
    assert (error <= room * true_lse[seen].abs().clamp(min=10)).all()
    # Gradients that cancel, as of the one key of a query, keep the rounding of what they cancel.
    scale = max(float(x.norm()) for x in grads)
    for got, again, true in zip(*back, grads, strict=False):
        assert torch.equal(got, again)
        assert (got.double() - true).norm() <= 2 * room * max(float(true.norm()), 0.1 * scale)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(*pair, id="-".join(pair), marks=[] if pair in QUICK else [SLOW])
        for pair in itertools.product(CASES, KINDS)
    ],
)
def test_results_and_gradients_are_those_of_float64(name, kind):
    made, back, wanted, grads, _ = run(kind, **CASES[name])
    assert_is_exact(made, back, wanted, grads, torch.float32)


@pytest.mark.parametrize(
    ("kind", "causal"),
    [
        pytest.param("slopes", True, id="slopes"),
        pytest.param("slopes", False, id="symmetric", marks=SLOW),
        pytest.param("sums", True, id="sums", marks=SLOW),
    ],
)
def test_pruning_leaves_keys_out_and_changes_nothing(kind, causal, monkeypatch):
    from posenc.ops import execute
    from posenc.ops.attention.triton import walks

    monkeypatch.setattr(walks, "PRUNE_FROM", 0)
    monkeypatch.setattr(execute, "_plans", OrderedDict())
    case = {"size": (70, 400), "steep": 8.0, "causal": causal}
    made, back, wanted, grads, ranges = run(kind, **case)
    assert_is_exact(made, back, wanted, grads, torch.float32)
    assert (ranges[0][..., ::2] > 0).any()


@SLOW
@pytest.mark.parametrize("kind", ["slopes", "sums"])
def test_a_window_and_pruning_together(kind, monkeypatch):
    from posenc.ops import execute
    from posenc.ops.attention.triton import walks

    monkeypatch.setattr(walks, "PRUNE_FROM", 0)
    monkeypatch.setattr(execute, "_plans", OrderedDict())
    case = {"size": (150, 300), "steep": 0.5, "window": (100, 100), "documents": True}
    made, back, wanted, grads, _ = run(kind, **case)
    assert_is_exact(made, back, wanted, grads, torch.float32)


def test_gradients_of_a_running_sum_are_zero_together():
    """For c + 1 is as good as c; gates add them, and would add their roundings."""
    # The interpreter's products of bfloat16 are wrong.
    size, dtype = ((70, 90), torch.float16) if DEVICE == "cpu" else ((700, 1500), torch.bfloat16)
    _, back, _, _, _ = run("sums", size, dtype=dtype)
    to_sums = back[0][3]
    assert (to_sums.sum(-1).abs() <= 2**-16 * to_sums.abs().sum(-1)).all()


@pytest.mark.parametrize("columns", [90, 60], ids=["every-distance", "some-beyond"])
def test_a_column_of_a_table_gets_the_rounding_of_its_own_weights(columns):
    """Few weights are far: as what is left of all others, their gradient would be rounding."""
    torch.manual_seed(3)
    dtype = torch.float16 if DEVICE == "cpu" else torch.bfloat16
    q, k, v, g = torch.randn(4, 1, 2, 90, 16, device=DEVICE).to(dtype).unbind()
    values = torch.arange(columns, device=DEVICE) * torch.tensor([[-0.1], [-0.2]], device=DEVICE)
    call = call_of(values, "table", start=0, scale=0.25, prune=False)
    out, lse, *ranges = planned_attention(q, k, v, call)
    got = planned_gradients(g, None, (q, k, v, out, lse, *ranges), call, True)[3]

    q, k, v, g, values = (x.double() for x in (q, k, v, g, values))
    distance = torch.arange(90, device=DEVICE)[:, None] - torch.arange(90, device=DEVICE)
    column = distance.clamp(0, columns - 1)
    scores = (q @ k.mT * 0.25 + values[:, column]).masked_fill(distance < 0, -torch.inf)
    weights, dp = scores.softmax(-1), g @ v.mT
    exact = weights * (dp - (weights * dp).sum(-1, keepdim=True))
    size = weights * (dp.abs() + (g * (weights @ v)).abs().sum(-1, keepdim=True))
    wanted, room = (
        values.new_zeros(2, columns).index_add_(1, column.flatten(), x[0].flatten(1))
        for x in (exact, size)
    )
    assert ((got - wanted).abs() <= torch.finfo(dtype).eps * room).all()


@pytest.mark.parametrize(("kind", "columns"), [("slopes", 0), ("table", 30)])
def test_a_gradient_has_the_dtype_of_its_numbers(kind, columns):
    """Launches are kept, and each dtype has its own."""
    q, k, v, g = torch.randn(4, 1, 2, 40, 16, device=DEVICE).unbind()
    numbers = numbers_of(kind, 2, 40, batch=1, columns=columns, steep=1.0).half().to(DEVICE)
    found = []
    for dtype in (torch.float32, torch.float64, torch.float16, torch.float32):
        call = call_of(numbers.to(dtype), kind, start=0, scale=0.25)
        out, lse, *ranges = planned_attention(q, k, v, call)
        found.append(planned_gradients(g, None, (q, k, v, out, lse, *ranges), call, True)[3])
        assert found[-1].dtype == dtype
        assert torch.equal(found[-1], found[0].to(dtype))


@SLOW
@pytest.mark.parametrize("size", [(90, 90), (3, 300)], ids=str)
@pytest.mark.parametrize("kind", ["window", "far"])
def test_any_ranges_of_keys(kind, size):
    """A key of a window is seen by queries past the end of its own range."""
    torch.manual_seed(3)
    (queries, keys), width, scale = size, 16, 0.25
    q, k, v = (torch.randn(1, 2, n, width, device=DEVICE) for n in (queries, keys, keys))
    j = torch.arange(keys, device=DEVICE)[None]
    first, last = (
        ((j - 20).clamp(min=0), j) if kind == "window" else (0 * j, (j - 21).clamp(min=-1))
    )
    places = {"first": first, "last": last, "prune": False}
    call = call_of(None, "none", start=keys - queries, scale=scale, **places)

    out, lse, *ranges = planned_attention(q, k, v, call)
    g, g_lse = torch.randn_like(out), torch.randn_like(lse).masked_fill(lse == -torch.inf, 0)
    back = [planned_gradients(g, g_lse, (q, k, v, out, lse, *ranges), call, False) for _ in "ab"]

    exact = [x.double().requires_grad_() for x in (q, k, v)]
    low, high = (x[0, keys - queries :, None] for x in (first, last))
    hidden = (j < low) | (j > high)
    scores = (exact[0] @ exact[1].mT * scale).masked_fill(hidden, -torch.inf)
    nothing = hidden.all(-1, keepdim=True)
    true_out = scores.masked_fill(nothing, 0.0).softmax(-1).masked_fill(hidden, 0) @ exact[2]
    true_lse, seen = scores.logsumexp(-1), ~nothing[..., 0].expand(1, 2, -1)
    loss = (true_out * g.double()).sum() + (true_lse * g_lse.double())[seen].sum()
    grads = torch.autograd.grad(loss, exact)
    wanted = true_out.detach(), true_lse.detach()
    assert_is_exact((out, lse), back, wanted, grads, torch.float32)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        pytest.param((1, 2, 4, 257), torch.bfloat16, id="wide"),
        pytest.param((1, 2, 4, 64), torch.float64, id="float64"),
        pytest.param((1, 2, 0, 64), torch.bfloat16, id="empty"),
    ],
)
def test_what_no_kernel_takes_is_known_before_a_launch(shape, dtype):
    q = torch.empty(shape, dtype=dtype, device="meta")
    assert not fits_kernels(q, q)
    assert fits_kernels(torch.empty(1, 2, 4, 64, device="meta"), torch.empty(1, 2, 4, 256))


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter takes minutes")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [(16, 16), (64, 64), (80, 80), (128, 64), (256, 256)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_width_and_dtype(kind, width, dtype):
    case = {"size": (700, 1500), "heads": (4, 2), "width": width, "columns": 300, "steep": 0.2}
    made, back, wanted, grads, _ = run(kind, **case, dtype=dtype)
    assert_is_exact(made, back, wanted, grads, dtype)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.skipif(not native.carries_out_plans, reason="needs the extension")
@pytest.mark.parametrize("size", [(3, 391), (391, 391), (1301, 1301)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_both_executors_give_the_same_bits(kind, size):
    """The second call of a kind is carried out by C; no other test has these lengths."""
    queries, keys = size
    q, k, v = (torch.randn(1, 2, n, 64, device=DEVICE).bfloat16() for n in (queries, keys, keys))
    values = numbers_of(kind, 2, keys, batch=1, columns=40, steep=1.0)
    values = None if values is None else values.to(DEVICE)
    call = call_of(values, kind, start=keys - queries, scale=0.125)
    wanted = planned_attention(q, k, v, call)
    for _ in "ab":
        results = op.attend(q, k, v, call)
        assert all(torch.equal(x, y) for x, y in zip(results[:2], wanted[:2], strict=True))
