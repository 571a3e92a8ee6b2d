import itertools
import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from posenc import ALiBi
from posenc.attention import (
    DistanceTable,
    RunningSum,
    Slopes,
    biased_attention,
    biased_attention_with_lse,
    op,
)
from posenc.attention.biases import Call
from support.attention import HEADS, STEEP, WIDTH, qkv

KINDS = ("none", "slopes", "table", "sums")


def numbers(kind, keys, batch=2):
    if kind == "slopes":
        return torch.rand(HEADS, dtype=torch.float64)
    if kind == "table":
        return torch.randn(HEADS, 40, dtype=torch.float64)
    # Neither falling nor rising, and far apart: pruned all the same.
    return torch.randn(batch, HEADS, keys, dtype=torch.float64).cumsum(-1) * 3


def bias_of(kind, values):
    if kind == "none":
        return None
    return DistanceTable(values, 11) if kind == "table" else BIASES[kind](values)


BIASES = {"slopes": Slopes, "sums": RunningSum}


def exact(q, k, v, kind, values, *, causal, start, seen):
    """Every score written down: the output and the log-sum-exp."""
    batch, heads, queries, _ = q.shape
    shared, keys = heads // k.shape[1], k.shape[2]
    outs, sums = [], []
    for b, h, n in itertools.product(range(batch), range(heads), range(queries)):
        i = start + n
        at = [j for j in range(keys) if (j <= i or not causal) and seen(i, j)]
        if not at:
            outs.append(v.new_zeros(v.shape[3]))
            sums.append(v.new_tensor(-math.inf))
            continue
        j = torch.tensor(at)
        scores = k[b, h // shared, j] @ q[b, h, n] * WIDTH**-0.5
        if kind == "slopes":
            scores = scores - values[h] * (i - j).abs()
        elif kind == "table":
            scores = scores + values[h, (i - j + 11).clamp(0, 39)]
        elif kind == "sums":
            scores = scores + values[b, h, i] - values[b, h, j]
        sums.append(scores.logsumexp(0))
        outs.append(scores.softmax(0) @ v[b, h // shared, j])
    return torch.stack(outs).view(*q.shape[:3], -1), torch.stack(sums).view(q.shape[:3])


@pytest.mark.parametrize("learned", [True, False], ids=["learned", "fixed"])
@pytest.mark.parametrize("case", ["causal", "symmetric", "offset", "padded"])
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_are_those_of_the_scores_written_down(kind, case, learned):
    """float64, where pruning leaves out less than 2^-55. Fixed numbers take SDPA's backward."""
    queries, keys, start = (9, 70, 31) if case == "offset" else (45, 45, 0)
    q, k, v = qkv(queries, keys, groups=2, grad=True)
    v = torch.randn(2, HEADS // 2, keys, WIDTH, dtype=torch.float64).requires_grad_()
    values = numbers(kind, keys).requires_grad_(learned)
    ids = torch.where(torch.arange(keys) < 7, -1, torch.arange(keys) // 20)
    how = {"causal": case != "symmetric", "start": start, "seen": lambda i, j: True}
    if case == "padded":
        how["seen"] = lambda i, j: ids[i] == ids[j] >= 0
    wanted = exact(q, k, v, kind, values, **how)

    got = biased_attention_with_lse(
        *(q, k, v, bias_of(kind, values)),
        causal=how["causal"],
        query_offset=start,
        document_ids=ids if case == "padded" else None,
    )

    inputs = [q, k, v] + [values] * (learned and kind != "none")
    above = [torch.randn_like(x) * (learned or n == 0) for n, x in enumerate(got)]
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    finite = [x.where(x.isfinite(), 0) for x in wanted]
    wanted_gradients = torch.autograd.grad(finite, inputs, above)
    for a, b in zip(torch.autograd.grad(got, inputs, above), wanted_gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_float32_owes_the_rounding_of_its_scores(kind):
    """A running sum of thousands, too: its differences are taken before they are rounded."""
    xs, values = qkv(300, 300), numbers(kind, 300)
    if kind == "sums":
        values = values + 5000
    wanted = biased_attention(*xs, bias_of(kind, values), backend="dense")
    fixed = values if kind == "sums" else values.float()
    got = biased_attention(*(x.float() for x in xs), bias_of(kind, fixed))
    # Scores that count are below 32 in size: they are off by 2^-19 and a weight by 2^-18 of it.
    assert (got - wanted).abs().max() <= 2**-17 * xs[2].abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_gives_the_same_bits_twice(kind):
    xs = [x.detach().requires_grad_() for x in qkv(150, 150, groups=2, dtype=torch.float32)]
    values = numbers(kind, 150).requires_grad_()
    inputs = xs + [values] * (kind != "none")

    def step():
        out = biased_attention(*xs, bias_of(kind, values))
        return out, *torch.autograd.grad(out.square().sum(), inputs)

    assert all(map(torch.equal, step(), step()))


def test_a_table_that_hides_the_own_key_leaves_the_first_query_nothing():
    q, k, v = qkv(20, 20, grad=True)
    table = torch.zeros(HEADS, 3, dtype=torch.float64)
    table[:, 0] = -math.inf
    out, lse = biased_attention_with_lse(q, k, v, DistanceTable(table))
    assert not out[:, :, 0].any()
    assert (lse[:, :, 0] == -math.inf).all()
    assert lse[:, :, 1:].isfinite().all()
    for gradient in torch.autograd.grad(out.sum(), (q, k, v)):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_ops_keep_torchs_rules(kind):
    q, k, v = qkv(40, 40, grad=True)
    values = None if kind == "none" else numbers(kind, 40)
    values = values[None] if kind == "slopes" else values
    if values is not None and kind == "table":
        values = values.T.contiguous().T  # T5Bias has its table so
    call = Call(values, None, None, None, kind, 11, 0, 0.25, True, True, window=(9, 0))
    torch.library.opcheck(op.attend_op.overload, (q, k, v, *op.flatten(call)))
    with torch.no_grad():
        out, lse, ranges = op.attend_op(q, k, v, *op.flatten(call))
        saved = (torch.randn_like(out), torch.randn_like(lse), q, k, v, out, lse, ranges)
    saved = [x.detach() for x in saved]
    how = op.flatten(call, op.TO_VALUES if kind != "none" else 0)
    torch.library.opcheck(op.attend_backward_op.overload, (*saved, *how))


def test_gradients_are_there_under_a_mode():
    """Selective checkpoints and counters of operations see an op without autograd inside."""
    q, k, v = qkv(70, 70, groups=2, grad=True)
    alibi = ALiBi(HEADS, **STEEP)
    wanted = torch.autograd.grad(alibi.attention(q, k, v).sum(), (q, k, v))
    with FlopCounterMode(display=False):
        # Its tracker of modules takes no leaves in autograd.grad.
        got = torch.autograd.grad(alibi.attention(q + 0, k + 0, v + 0).sum(), (q, k, v))
    assert all(map(torch.equal, got, wanted))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_halves_are_rounded_once(dtype):
    """Each weight and value is exact in float32, whether or not the CPU multiplies halves."""
    q, k, v = qkv(70, 70, dtype=dtype, grad=True)
    alibi = ALiBi(HEADS, **STEEP)
    wide = [x.detach().float().requires_grad_() for x in (q, k, v)]
    got, wanted = alibi.attention(q, k, v), alibi.attention(*wide)
    above = torch.randn_like(got)
    pairs = [(got, wanted)]
    pairs += zip(
        torch.autograd.grad(got, (q, k, v), above),
        torch.autograd.grad(wanted, wide, above.float()),
        strict=True,
    )
    # A CPU that multiplies bfloat16 rounds the weights to it as well.
    room = 4 if dtype == torch.bfloat16 else 1
    for half, exact in pairs:
        assert (half - exact).abs().max() <= room * torch.finfo(dtype).eps * exact.abs().max()


def test_second_derivatives():
    alibi = ALiBi(HEADS, **STEEP)
    inputs = [x.detach()[:, :, :4, :2].requires_grad_() for x in qkv(4, 4, groups=2, batch=1)]
    assert torch.autograd.gradgradcheck(alibi.attention, inputs)


def test_results_are_contiguous_as_the_compiler_was_told():
    """Projections give ``(B, L, H, D)`` seen as ``(B, H, L, D)``, and strides follow from less."""
    alibi = ALiBi(HEADS, **STEEP)
    inputs = [torch.randn(2, 40, HEADS, 8).transpose(1, 2).requires_grad_() for _ in range(3)]
    above = torch.randn(2, HEADS, 40, 8)

    def run(function):
        out = function(*inputs)
        return out, *torch.autograd.grad(out, inputs, above)

    wanted, got = run(alibi.attention), run(torch.compile(alibi.attention, fullgraph=True))
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert wanted[0].is_contiguous()
    assert all(grad.is_contiguous() for grad in wanted[1:])
