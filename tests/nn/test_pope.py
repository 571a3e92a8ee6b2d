"""PoPE: the formula at any position, its parameter, its cached keys, and attention."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import oracles
import posenc
from posenc import PoPE, axes, positions, scaling
from support.assertions import assert_within_ulps, compilations


def trained(head_dim, num_kv_heads, max_seq_len=2048, base=10_000.0, **keywords):
    """A module whose delta is not that of the start."""
    sizes = {"num_kv_heads": num_kv_heads, "max_seq_len": max_seq_len, "base": base}
    return PoPE(head_dim, **sizes, init="uniform", **keywords)


@pytest.mark.parametrize("start", [0, 5, 2**31 - 3], ids=["first", "later", "last"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)
def test_queries_and_keys_match_the_formula_at_any_position(dtype, start):
    pope = trained(6, 2, None)
    q, k = (2 * torch.randn(1, 4, 3, 6)).to(dtype), (2 * torch.randn(1, 2, 3, 6)).to(dtype)
    at = range(start, start + 3)
    for got, x, delta in zip(pope(q, k, start), (q, k), (None, pope.delta.detach()), strict=True):
        exact, size = oracles.polar(x, at, delta)
        assert got.dtype == dtype
        assert_within_ulps(got, exact, 0.503, size)


def test_every_form_of_positions_gives_the_same_bits():
    for length in (64, None):
        pope = trained(8, 3, length)
        q = k = torch.randn(2, 3, 5, 8)
        wanted = torch.stack(pope(q, k, 7))
        ids = torch.arange(7, 12)
        for where in (
            {"offset": torch.tensor([7, 7])},
            {"position_ids": ids},
            {"position_ids": ids.expand(2, 5)},
        ):
            assert torch.equal(torch.stack(pope(q, k, **where)), wanted)
        floats = torch.stack(pope(q, k, position_ids=ids.double()))
        torch.testing.assert_close(floats, wanted, rtol=1e-6, atol=1e-6)
        swapped = pope.replace(seq_dim=1)
        swapped.load_state_dict(pope.state_dict())
        turned = swapped(q.transpose(1, 2), k.transpose(1, 2), 7)
        assert torch.equal(torch.stack(turned).transpose(2, 3), wanted)


def test_scores_are_those_of_the_paper():
    """A query at t and a key at s meet at (s - t) times the rate, plus delta."""
    pope = trained(8, 2)
    q, k = torch.randn(2, 1, 2, 6, 8, dtype=torch.float64)
    a, b = pope(q, k, 40)
    rates = 10_000.0 ** (-torch.arange(8, dtype=torch.float64) / 8)
    mu, nu = (torch.logaddexp(x, torch.zeros(1, dtype=torch.float64)) for x in (q, k))
    distance = torch.arange(6)[None, :, None] - torch.arange(6)[:, None, None]
    angle = distance * rates + pope.delta.detach().double()[:, None, None]
    wanted = torch.einsum("bhic,bhjc,hijc->bhij", mu, nu, angle.cos())
    torch.testing.assert_close(a @ b.mT, wanted)
    torch.testing.assert_close(pope.scaled_inv_freq(), rates, rtol=1e-15, atol=0.0)


def test_delta_is_limited_where_it_is_used():
    """The parameter stays the optimizer's; outside, it has no gradient."""
    pope = PoPE(3, num_kv_heads=1)
    assert not pope.delta.any()
    with torch.no_grad():
        pope.delta.copy_(torch.tensor([[1.0, -7.0, -1.0]]))
    k = torch.randn(1, 1, 2, 3)
    got = pope(k, k)[1]
    limited, size = oracles.polar(k, range(2), torch.tensor([[0.0, 0.0, -1.0]]))
    assert_within_ulps(got, limited, 0.503, size)
    got[..., 3:].sum().backward()
    assert pope.delta.grad[0, :2].tolist() == [0.0, 0.0]
    assert pope.delta.grad[0, 2] != 0
    assert pope.delta[0].tolist() == [1.0, -7.0, -1.0]
    drawn = trained(64, 4).delta
    assert -math.tau <= drawn.min() < -5
    assert -1 < drawn.max() <= 0


@pytest.mark.parametrize("end", [0.0, -math.tau])
def test_the_ends_of_the_range_of_delta_get_the_gradient_of_the_formula(end):
    """delta starts at one; the gradient of torch.clamp there is 1 or 0, by the version of torch."""
    q, k, v = torch.randn(3, 1, 2, 7, 8, dtype=torch.float64).unbind()
    pope = PoPE(8, num_kv_heads=2).double()
    if end:
        torch.nn.init.constant_(pope.delta, end)
    delta = pope.delta.detach().clone().requires_grad_()
    at = torch.arange(7, dtype=torch.float64)
    rates = 10_000.0 ** -(torch.arange(8, dtype=torch.float64) / 8)
    angle = (at[None, :] - at[:, None])[..., None] * rates + delta[:, None, None]
    lengths = torch.einsum("bhic,bhjc->bhijc", F.softplus(q), F.softplus(k))
    scores = (lengths * angle.cos()).sum(-1) * 8**-0.5
    hidden = torch.ones(7, 7, dtype=torch.bool).triu(1)
    exact = scores.masked_fill(hidden, -math.inf).softmax(-1) @ v
    weight = torch.randn(exact.shape, dtype=torch.float64)
    (exact * weight).sum().backward()
    (pope.attention(q, k, v) * weight).sum().backward()
    assert (pope.delta.grad != 0).all()
    torch.testing.assert_close(pope.delta.grad, delta.grad, rtol=1e-9, atol=1e-9)


def test_without_delta_keys_are_queries():
    pope = PoPE(8, num_kv_heads=None)
    q, k = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8)
    assert list(pope.parameters()) == []
    assert torch.equal(pope(q, k)[1], pope(k, q)[0])


@pytest.mark.parametrize(
    "rule",
    [
        scaling.Linear(2.0),
        scaling.YaRN(4.0, original_length=16),
        scaling.Llama3(4.0, original_length=16),
        scaling.DynamicNTK(2.0, original_length=16),
    ],
    ids=lambda rule: type(rule).__name__,
)
def test_rules_scale_the_rates_of_all_channels(rule):
    """A rotation of 2 D channels has the rates of PoPE, and any rule of its own."""
    pope, rope = trained(8, 2, None, scaling=rule), posenc.RoPE(16, None, scaling=rule)
    x = torch.randn(1, 2, 20, 8, dtype=torch.float64)
    lengths = torch.cat((torch.logaddexp(x, torch.zeros(1).double()), torch.zeros_like(x)), -1)
    half = rope.replace(interleaved=False)
    torch.testing.assert_close(pope(x, x, 3)[0], half.rotate(lengths, 3))
    assert torch.equal(pope.scaled_inv_freq(20), rope.scaled_inv_freq(20))
    assert pope.attention_factor(20) == rope.attention_factor(20)


def test_axes_give_channels_to_coordinates():
    x = torch.randn(1, 2, 6, 8, dtype=torch.float64)
    grid = positions.grid(2, 3)
    got = PoPE(8, num_kv_heads=None, axes=axes.Axial(2))(x, x, position_ids=grid)[0].unflatten(
        -1, (2, 8)
    )
    for axis, channels in enumerate((slice(0, 4), slice(4, 8))):
        part = x[..., channels]
        alone = PoPE(4, num_kv_heads=None)(part, part, position_ids=grid[axis])[0].unflatten(
            -1, (2, 4)
        )
        torch.testing.assert_close(got[..., channels], alone)
    text = PoPE(8, num_kv_heads=None, axes=axes.Sections((4, 2, 2)))
    torch.testing.assert_close(text(x, x, 3)[0], PoPE(8, num_kv_heads=None)(x, x, 3)[0])
    with pytest.raises(ValueError, match="add up to 8 pairs"):
        PoPE(8, num_kv_heads=None, axes=axes.Sections((2, 1, 1)))


def test_cached_keys_are_moved():
    for dtype, atol in ((torch.float32, 1e-6), (torch.float64, 1e-13)):
        pope, k = trained(8, 2), 3 * torch.randn(2, 2, 5, 8, dtype=dtype)
        keys, wanted = pope(k, k, 40)[1], pope(k, k, 33)[1]
        torch.testing.assert_close(pope.shift(keys, -7), wanted, rtol=1e-6, atol=atol)
        by = pope.shift(keys, torch.tensor([-7, 2]))
        torch.testing.assert_close(by[1], pope(k, k, 42)[1][1], rtol=1e-6, atol=atol)
        old, new = torch.tensor([3, 9, 10, 11, 40]), torch.arange(5)
        moved = pope.rerotate(pope(k, k, position_ids=old)[1], old, new)
        torch.testing.assert_close(moved, pope(k, k)[1], rtol=1e-6, atol=atol)
    with pytest.raises(ValueError, match="head_dim of k"):
        pope.shift(k, 1)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("width", [8, 20], ids=["narrow", "wide"])
def test_attention_is_that_of_the_scores(causal, width):
    pope = trained(8, 2)
    q, k, v = torch.randn(2, 6, 7, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, width)
    a, b = pope(q.double(), k.double())
    mask = torch.ones(7, 7).tril() > 0 if causal else torch.ones(7, 7) > 0
    bias = torch.zeros(7, 7).masked_fill(~mask, -torch.inf)
    wanted = oracles.attention(a, b, v, bias, 8**-0.5).float()
    torch.testing.assert_close(pope.attention(q, k, v, causal=causal), wanted)
    masked = pope.attention(q, k, v, attn_mask=mask, causal=False)
    torch.testing.assert_close(masked, wanted)
    swapped = pope.replace(seq_dim=1)
    swapped.load_state_dict(pope.state_dict())
    turned = swapped.attention(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal)
    torch.testing.assert_close(turned.transpose(1, 2), wanted)


@pytest.mark.parametrize("causal", [True, False])
def test_a_mask_hides_further_keys(causal):
    """As in every other attention here, so that a mask of padding does not show later keys."""
    pope, (q, k, v) = trained(8, 2), torch.randn(3, 2, 2, 5, 8)
    seen = (torch.ones(5, 5).tril() if causal else torch.ones(5, 5)) > 0
    real, added = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 0, 1]]) > 0, torch.randn(2, 1, 5, 5)
    a, b = pope(q.double(), k.double())
    bias = torch.zeros(2, 1, 5, 5).masked_fill(~(seen & real[:, None, None]), -torch.inf)
    got = pope.attention(q, k, v, causal=causal, attn_mask=real[:, None, None])
    if causal:
        # The first token of the first row sees nothing.
        assert not got[0, :, 0].any()
        bias[0, :, 0] = 0.0
    wanted = oracles.attention(a, b, v, bias, 8**-0.5).float()
    torch.testing.assert_close(got[:, :, 1:], wanted[:, :, 1:])
    bias = added.masked_fill(~seen, -torch.inf)
    got = pope.attention(q, k, v, causal=causal, attn_mask=added.double())
    torch.testing.assert_close(got, oracles.attention(a, b, v, bias, 8**-0.5).float())


def test_attention_with_a_cache_is_attention():
    pope = trained(8, 2, None)
    q, k, v = torch.randn(3, 1, 2, 6, 8)
    whole, kept = pope.attention(q, k, v), []
    for t in range(6):
        one = slice(t, t + 1)
        query, key = pope(q[:, :, one], k[:, :, one], offset=t)
        kept.append(key)
        out = torch.nn.functional.scaled_dot_product_attention(
            query, torch.cat(kept, 2), v[:, :, : t + 1], scale=pope.scale
        )
        torch.testing.assert_close(out, whole[:, :, one])


def test_attention_makes_no_matrix_of_scores():
    """SDPA's kernels want one width of queries and values."""
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            out = function(*arguments, **(keywords or {}))
            seen.extend(
                t.numel() for t in torch.utils._pytree.tree_leaves(out) if hasattr(t, "numel")
            )
            return out

    pope = PoPE(8, num_kv_heads=2)
    q, k, v = torch.randn(3, 1, 2, 512, 8)
    with Watch(), torch.no_grad():
        pope.attention(q, k, v)
    assert max(seen) < 512 * 512


def test_gradients_reach_everything_through_a_growing_table():
    pope = trained(8, 2, None)
    q, k = torch.randn(2, 1, 2, 5, 8, requires_grad=True)
    q, k = q.detach().requires_grad_(), k.detach().requires_grad_()
    out = checkpoint(lambda q, k: torch.stack(pope(q, k)), q, k, use_reentrant=False)
    # The table grows between the call and its repetition.
    pope(torch.randn(1, 2, 300, 8), torch.randn(1, 2, 300, 8))
    out.square().sum().backward()
    assert all(x.grad.abs().sum() > 0 for x in (q, k, pope.delta))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_traces_and_exports_are_torch_operations():
    pope, x, other = trained(8, 2, 16), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.pope = pope

        def forward(self, x):
            return torch.cat(self.pope(x, x))

    wanted = torch.cat(pope(other, other))
    program = torch.export.export(Model(), (x,), strict=False)
    assert "posenc" not in str(program.graph)
    torch.testing.assert_close(program.module()(other), wanted, rtol=1e-6, atol=1e-6)
    traced = torch.jit.trace(Model(), (x,))
    torch.testing.assert_close(traced(other), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("length", [64, None], ids=["fixed", "growing"])
def test_one_graph_serves_all_lengths(length):
    pope = trained(8, 2, length)
    calls = [(torch.randn(1, 2, n, 8), torch.randn(1, 2, n, 8)) for n in (5, 9, 17, 30)]
    assert compilations(lambda q, k: pope(q, k), calls, dynamic=True) == 1


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (
            lambda: PoPE(8, num_kv_heads=2, init="one"),
            ValueError,
            "init must be 'zero' or 'uniform'",
        ),
        (lambda: PoPE(8, num_kv_heads=2, scaling=2.0), TypeError, "scaling must be of type Rule"),
        (lambda: _called(torch.zeros(1, 3, 3, 8)), ValueError, "k must have 2 heads"),
        (lambda: _called(torch.zeros(1, 2, 3, 8).to("meta")), ValueError, "the device of delta"),
        (lambda: _attended(v=torch.zeros(1, 2, 4, 8)), ValueError, "v must have shape"),
        (lambda: _attended(scale=0.0), ValueError, "scale must be finite and above zero"),
        (lambda: _attended(dropout_p=-0.1), ValueError, "dropout_p must be from 0 to 1"),
        (lambda: _attended(attn_mask=torch.ones(3, 4) > 0), ValueError, "attn_mask must broadcast"),
        (
            lambda: _attended(queries=2, query_offset=torch.tensor([0, 1, 1])),
            ValueError,
            "query_offset must be for 1 or 1 sequences, got 3",
        ),
        (lambda: _moved("shift", 1), ValueError, "Pass keys as PoPE returned them"),
        (lambda: _moved("rerotate", *torch.arange(6).view(2, 3)), ValueError, "must be 16, got 8"),
        (lambda: _polar(torch.zeros(9, 4)), ValueError, "cos must have shape"),
        (lambda: _polar(torch.zeros(9, 8), torch.zeros(3, 8)), ValueError, "delta must have shape"),
        (lambda: _polar(torch.zeros(2, 8)), ValueError, "the rows of cos=2"),
    ],
)
def test_bad_arguments_are_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()


def _called(x):
    return PoPE(8, num_kv_heads=2)(x, x)


def _attended(v=None, queries=3, **options):
    x = torch.zeros(1, 2, 3, 8)
    q, v = x[:, :, :queries], x if v is None else v
    return PoPE(8, num_kv_heads=2).attention(q, x, v, **options)


def _moved(method, *by):
    return getattr(PoPE(8, num_kv_heads=2), method)(torch.zeros(1, 2, 3, 8), *by)


def _polar(table, delta=None):
    return posenc.functional.polar(torch.zeros(1, 2, 3, 8), table, table, delta)


def test_the_function_takes_tables_of_your_own():
    pope, x = trained(8, 2), torch.randn(2, 2, 5, 8)
    cos, sin = pope.tables(torch.arange(20))
    got = posenc.functional.polar(x, cos, sin, pope.delta, offset=4)
    assert torch.equal(got, pope(x, x, 4)[1])
    ids = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    got = posenc.functional.polar(x.transpose(1, 2), cos, sin, position_ids=ids, seq_dim=1)
    assert torch.equal(got.transpose(1, 2), pope(x, x, position_ids=ids)[0])
