"""Tensors as users have them: laid out otherwise, in halves, with infinities, in a fixed cache."""

import pytest
import torch

from posenc.attention import (
    DistanceTable,
    RowBias,
    RunningSum,
    Slopes,
    alibi_score_mod,
    biased_attention,
    biased_attention_with_lse,
    relative_bias,
    relative_score_mod,
)
from posenc.nn import KERPLE
from support.attention import written_down

BACKENDS = ("chunked", "dense")


def qkv(queries, keys, width=8):
    q = torch.randn(2, 2, queries, width, dtype=torch.float64)
    k, v = torch.randn(2, 2, 2, keys, width, dtype=torch.float64).unbind()
    return [q, k, v]


@pytest.mark.parametrize("which", range(3), ids="qkv")
def test_keys_may_lie_in_memory_with_their_channels_first(which):
    """SDPA's kernel for CPUs takes rows as dense, whatever their strides are."""
    given = qkv(70, 70)
    given[which] = given[which].mT.contiguous().mT
    exact = [x.clone().requires_grad_() for x in given]
    given = [x.requires_grad_() for x in given]
    wanted, _ = written_down(*exact, None, "none", own=torch.arange(70).expand(2, -1), scale=0.5)

    out, _ = biased_attention_with_lse(*given, scale=0.5)

    torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)
    grads = torch.autograd.grad(out.square().sum(), given)
    for grad, true in zip(grads, torch.autograd.grad(wanted.square().sum(), exact), strict=True):
        torch.testing.assert_close(grad, true, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_before_the_end_of_a_cache_is_zero(backend):
    """A padded query sees no key, also where later places of the cache are free."""
    q, k, v = qkv(3, 200)
    ids = torch.zeros(200, dtype=torch.int64).index_fill(0, torch.arange(50, 53), -1)

    given = {"query_offset": 50, "document_ids": ids, "backend": backend}
    out, lse = biased_attention_with_lse(q, k, v, Slopes(torch.ones(2)), **given)

    assert not out.any()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "symmetric"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_table_of_minus_infinity_hides_keys(backend, causal):
    """Here all but the own key and that before: the first query of the second head sees none."""
    q, k, v = (x.requires_grad_() for x in qkv(9, 9))
    table = torch.tensor([[0.5, 1.0, -torch.inf], [-torch.inf, 1.0, -torch.inf]]).double()
    bias = DistanceTable(torch.cat((torch.full((2, 1), -torch.inf), table), 1), 1)
    own = torch.arange(9).expand(2, -1)
    wanted, sums = written_down(q, k, v, bias.values, "table", own=own, scale=0.5, zero=1)
    wanted = wanted.index_fill(2, torch.tensor(0), 0.0)
    wanted[:, 0, 0] = v[:, 0, 0]

    out, lse = biased_attention_with_lse(q, k, v, bias, scale=0.5, causal=causal, backend=backend)

    torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, sums, rtol=1e-12, atol=1e-12)
    for grad in torch.autograd.grad(out.sum(), (q, k, v)):
        assert grad.isfinite().all()


@pytest.mark.parametrize("kind", ["slopes", "sums"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bias_in_halves_is_not_rounded_again(backend, kind):
    """A slope of 1/64 is a bfloat16, and its product with 301 is none: 0.4 % off at the far key."""
    values = torch.full((1, 2), 2**-6)
    if kind == "sums":
        values = (-(2**-6) * torch.arange(303.0)).expand(2, 2, -1)
    values = values.to(torch.bfloat16)
    q, k, v = torch.zeros(2, 2, 1, 8), torch.zeros(2, 2, 303, 8), torch.zeros(2, 2, 303, 8)
    v[:, :, 1] = 1
    own, exact = torch.tensor([[302], [302]]), [x.double() for x in (q, k, v, values)]
    wanted, _ = written_down(*exact, kind, own=own, scale=1.0)

    bias = {"slopes": Slopes, "sums": RunningSum}[kind](values)
    out, _ = biased_attention_with_lse(q, k, v, bias, scale=1.0, backend=backend)

    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=0)


@pytest.mark.parametrize("function", [relative_bias, relative_score_mod])
@pytest.mark.parametrize(
    ("bias", "text"),
    [
        pytest.param(Slopes(torch.ones(3, 2)), "must be for 1 or 4 sequences", id="slopes"),
        pytest.param(RunningSum(torch.ones(3, 2, 5)), "must be for 1 or 4 sequences", id="sums"),
        pytest.param(None, "bias must be Slopes", id="none"),
        pytest.param("alibi", "bias must be Slopes", id="text"),
    ],
)
def test_a_bias_for_other_sequences_is_refused(function, bias, text):
    """A score_mod would read past the end of the smaller tensor."""
    at = torch.zeros(4, dtype=torch.int64)
    with pytest.raises((TypeError, ValueError), match=text):
        function(bias, 5, 5, query_offset=at)


@pytest.mark.parametrize("shape", [(2, 6, 6), (1, 3, 6, 6), (3, 2, 6, 6)], ids=str)
def test_rows_of_another_shape_are_named(shape):
    """(2, 6, 6) could be two heads or two sequences."""
    q, k, v = qkv(6, 6)
    with pytest.raises(ValueError, match=r"rows must return a tensor of shape \(2, 2, 6, 6\)"):
        biased_attention(q, k, v, RowBias(lambda own, index: torch.zeros(shape)))
    with pytest.raises(ValueError, match="backend must be"):
        biased_attention(q, k, v, RowBias(lambda own, index: torch.zeros(())), backend="fast")


@pytest.mark.parametrize("backend", [None, "dense"])
def test_slopes_of_float32_lose_nothing_beside_float64(backend):
    q, k, v = qkv(5, 4000)
    slopes = torch.tensor([0.1, 0.007])
    how = {"prune": False, "backend": backend}
    got = biased_attention(q, k, v, Slopes(slopes), **how)
    exact = biased_attention(q, k, v, Slopes(slopes.double()), **how)
    assert torch.equal(got, exact)
    matrix = relative_bias(Slopes(slopes), 5, 4000, dtype=torch.float64)
    assert torch.equal(matrix, relative_bias(Slopes(slopes.double()), 5, 4000, dtype=torch.float64))


def test_torch_func_reaches_a_bias_by_rows():
    """torch.func refuses the hooks of a checkpoint."""
    q, k, v = qkv(5, 5)

    def loss(row):
        return biased_attention(
            q, k, v, RowBias(lambda own, index: row[:, index][None, :, None])
        ).sum()

    row = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    (wanted,) = torch.autograd.grad(loss(row), row)
    torch.testing.assert_close(torch.func.grad(loss)(row.detach()), wanted)


def test_shapes_are_found_without_numbers():
    """A model on the meta device runs to count its operations."""
    q, k, v = torch.empty(3, 1, 2, 6, 8, device="meta").unbind()
    assert biased_attention(q, k, v, Slopes(torch.ones(2, device="meta"))).shape == q.shape


def test_a_table_has_a_length():
    with pytest.raises(ValueError, match="KERPLE: k_len must be at least 0"):
        KERPLE(2).table(-1)


def test_a_rank_has_a_first_head():
    with pytest.raises(ValueError, match="head_offset must be below the 2 heads"):
        alibi_score_mod(torch.ones(2), 3, 3, head_offset=2)
