"""Dropout of the weights, and a mask in addition to the bias, as SDPA has them."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from posenc.attention import (
    DistanceTable,
    RowBias,
    RunningSum,
    Slopes,
    biased_attention,
    biased_attention_with_lse,
    relative_bias,
)
from posenc.ops.attention import rows as by_rows

B, H, Q, K, D = 2, 4, 5, 9, 8
BIASES = {
    "none": lambda: None,
    "slopes": lambda: Slopes(torch.rand(H).double().requires_grad_()),
    "table": lambda: DistanceTable(torch.randn(H, 7).double().requires_grad_(), 2),
    "sums": lambda: RunningSum(torch.randn(B, H, K).double().requires_grad_()),
    "rows": lambda: RowBias(lambda own, index: 0.1 * (own[:, None, :, None] * index).double()),
}
EACH = pytest.mark.parametrize("make", BIASES.values(), ids=BIASES)
# The first head hides nothing of its own, and the last query of every head sees no key.
SEEN = torch.rand(B, H, Q, K, generator=torch.Generator().manual_seed(0)) < 0.6
SEEN[:, 0], SEEN[:, :, -1] = True, False
MASKS = {
    "bool": SEEN,
    "keys": SEEN[:, :1, :1],
    "two-axes": SEEN[0, 1],
    "float": torch.where(SEEN, torch.linspace(-1, 1, K), -torch.inf),
}


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    """Two queries at a time."""
    monkeypatch.setattr(by_rows, "SCORES", 2 * B * H * K)
    monkeypatch.setattr(by_rows, "KEPT", 0)


def qkv(dtype=torch.float64, grad=True):
    torch.manual_seed(3)
    shapes = (B, H, Q, D), (B, 2, K, D), (B, 2, K, 6)
    return [torch.randn(shape).to(dtype).requires_grad_(grad) for shape in shapes]


@EACH
def test_a_mask_of_the_least_number_leaves_weights_that_add_up(make):
    """As transformers makes it: the first queries see only padding."""
    q, k, v = qkv(torch.float32)
    least = torch.finfo(torch.float32).min
    mask = torch.where(torch.arange(K) < K - 3, least, 0.0)[None, None, None]
    bias = make()
    if isinstance(bias, (Slopes, DistanceTable, RunningSum)):
        bias = bias._replace(values=bias.values.float())
    out = biased_attention(q, k, torch.ones_like(v), bias, causal=True, attn_mask=mask)
    torch.testing.assert_close(out, torch.ones_like(out))


def written_down(q, k, v, bias, mask, causal, drop=None):
    """Every score by its definition."""
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    scores = q @ k.mT * D**-0.5
    if bias is not None:
        scores = scores + relative_bias(bias, Q, K, causal=False, dtype=torch.float64)
    if causal:
        scores = scores + torch.full((Q, K), -torch.inf).triu(1 + K - Q)
    if mask is not None:
        scores = scores + (mask.log() if mask.dtype == torch.bool else mask)
    alone = (scores == -torch.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(alone, 0.0).softmax(-1).masked_fill(alone, 0.0)
    return (weights if drop is None else weights * drop) @ v


@EACH
@pytest.mark.parametrize(
    "causal", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["causal", "symmetric"]
)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_a_mask_hides_keys_in_addition_to_the_bias(make, causal, mask):
    torch.manual_seed(0)
    bias, inputs = make(), qkv()
    leaves = inputs + [x for x in (bias or ()) if isinstance(x, torch.Tensor)]
    got, lse = biased_attention_with_lse(*inputs, bias, causal=causal, attn_mask=mask)
    wanted = written_down(*inputs, bias, mask, causal)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    weight = torch.randn(got.shape, dtype=torch.float64)
    grads = [torch.autograd.grad((x * weight).sum(), leaves) for x in (got, wanted)]
    for ours, true in zip(*grads, strict=True):
        torch.testing.assert_close(ours, true, rtol=1e-10, atol=1e-12)
    blind = (lse == -torch.inf)[..., None]
    assert not got.masked_fill(~blind, 0.0).any()
    assert blind[:, :, -1].all() == (mask is not MASKS["keys"])


def test_a_mask_may_be_learned():
    mask = torch.randn(H, Q, K, dtype=torch.float64, requires_grad=True)
    grads = [
        torch.autograd.grad(made.square().sum(), mask)[0]
        for made in (
            biased_attention(*qkv(), causal=True, attn_mask=mask),
            written_down(*qkv(), None, mask, causal=True),
        )
    ]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["none", "table"])
def test_dropout_keeps_a_share_of_the_weights_and_the_mean(kind, monkeypatch):
    """With values that pick a key, the output is the weights, kept and divided or zero."""
    monkeypatch.setattr(by_rows, "SCORES", 2**21)
    torch.manual_seed(0)
    runs, bias, (q, k, _) = 400, BIASES[kind](), qkv(grad=False)
    q, k = (x[:1].expand(runs, -1, -1, -1) for x in (q, k))
    v = torch.eye(K, dtype=torch.float64).expand(runs, 2, K, K)
    with torch.no_grad():
        whole = biased_attention(q, k, v, bias, causal=True)
        got = biased_attention(q, k, v, bias, causal=True, dropout_p=0.25)
    kept = torch.isclose(got, whole / 0.75, rtol=1e-12, atol=0)
    assert (kept | (got == 0)).all()
    share = kept.double().mean(0)[whole[0] != 0]
    deviation = (0.25 * 0.75 / runs) ** 0.5
    assert (share - 0.75).abs().max() < 6 * deviation
    assert abs(share.mean() - 0.75) < 6 * deviation / share.numel() ** 0.5


def through_checkpoint(reentrant):
    return lambda function, *inputs: checkpoint(function, *inputs, use_reentrant=reentrant)


@pytest.mark.parametrize(
    "run",
    [lambda f, *x: f(*x), through_checkpoint(False), through_checkpoint(True)],
    ids=["plain", "checkpoint", "reentrant"],
)
def test_gradients_are_those_of_the_weights_that_were_kept(run):
    """The backward pass, which computes pieces again, must draw the same numbers again."""
    q, k, v = qkv()
    eye = torch.eye(K, dtype=torch.float64).expand(B, 2, K, K).contiguous().requires_grad_()
    bias = BIASES["table"]()

    def attention(q, k, v):
        return biased_attention(q, k, v, bias, causal=True, dropout_p=0.5)

    torch.manual_seed(5)
    weights = run(attention, q, k, eye)
    torch.manual_seed(5)
    out = run(attention, q, k, v)
    whole = biased_attention(q, k, eye, bias, causal=True)
    drop = torch.where(weights == 0, 0.0, 2.0).detach()
    wanted = written_down(q, k, v, bias, None, True, drop)
    torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)
    assert 0 < (weights != 0).sum() < (whole != 0).sum()
    g = torch.randn(out.shape, dtype=torch.float64)
    q.grad = k.grad = v.grad = None
    (out * g).sum().backward()
    for x, true in zip((q, k, v), torch.autograd.grad((wanted * g).sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(x.grad, true, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_compiled_calls_take_a_mask():
    q, k, v = qkv(torch.float32, grad=False)
    bias, mask = Slopes(torch.rand(H)), MASKS["bool"]
    run = torch.compile(biased_attention, backend="eager", fullgraph=True)
    wanted = biased_attention(q, k, v, bias, causal=True, attn_mask=mask)
    torch.testing.assert_close(run(q, k, v, bias, causal=True, attn_mask=mask), wanted)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"dropout_p": 1.5}, ValueError, "dropout_p must be from 0 to 1, got 1.5"),
        ({"dropout_p": "0.1"}, TypeError, "dropout_p must be a number"),
        ({"dropout_p": True}, TypeError, "dropout_p must be a number"),
        ({"attn_mask": torch.ones(B, K).long()}, TypeError, "attn_mask must be a tensor of bools"),
        ({"attn_mask": [True]}, TypeError, "attn_mask must be a tensor of bools"),
        ({"attn_mask": torch.ones(B, K)}, ValueError, r"must broadcast to \(B, H, Q, K\)"),
        ({"attn_mask": torch.ones(1, B, H, Q, K)}, ValueError, "must broadcast to"),
        ({"dropout_p": 0.1, "backend": "triton"}, ValueError, "backend='triton' needs"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused(options, error, text):
    with pytest.raises(error, match=f"biased_attention: .*{text}"):
        biased_attention(*qkv(), causal=True, **options)
