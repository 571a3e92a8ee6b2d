"""RoPE-Mixed and STRING, whose frequencies are learned."""

import pytest
import torch
from torch.autograd import gradcheck

import oracles
from posenc import STRING, MixedRoPE, RoPE, positions
from support.assertions import assert_within_ulps

KINDS = pytest.mark.parametrize("kind", [MixedRoPE, STRING])
FREQS = (0.0, 1.0, -0.3, 100.7)


def expected(x, at, freqs, *, interleaved):
    """Angle by angle: every head rotates by the sum of its frequencies times the coordinates."""
    batch, heads, length, dim = x.shape
    group = heads // freqs.shape[1]
    out = torch.empty_like(x, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            phi = torch.zeros(length, dim // 2, dtype=torch.float64)
            for a in range(freqs.shape[0]):
                line = at[a] if at.dim() == 2 else at[a, b]
                phi += line.double()[:, None] * freqs[a, h // group].double()
            out[b, h] = oracles.rotate(x[b, h], phi.cos(), phi.sin(), interleaved=interleaved)
    return out


@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "half"])
@pytest.mark.parametrize("queries", [2, 6], ids=["as-many", "grouped"])
@pytest.mark.parametrize("batched", [False, True], ids=["shared", "batched"])
def test_every_head_rotates_by_its_own_mixture(batched, queries, interleaved):
    rope = MixedRoPE(8, num_kv_heads=2, interleaved=interleaved)
    at = positions.grid(2, 3)
    at = torch.stack((at, at + 4), dim=1) if batched else at
    q, k = torch.randn(2, queries, 6, 8), torch.randn(2, 2, 6, 8)
    for got, x in zip(rope(q, k, position_ids=at), (q, k), strict=True):
        wanted = expected(x, at, rope.freqs.detach(), interleaved=interleaved)
        size = oracles.pair_magnitude(wanted, 4, interleaved=interleaved)
        assert_within_ulps(got, wanted, 1.0, size)


def test_the_initial_frequencies_are_axial_ones_rotated_in_each_head():
    """The lengths of the two-dimensional frequencies are the axial rates."""
    freqs = MixedRoPE(16, num_kv_heads=3, base=100.0).freqs.detach()
    rates = 100.0 ** (-torch.arange(4) / 4)
    assert torch.allclose(freqs.norm(dim=0), rates.repeat(2).expand(3, 8), rtol=1e-6)
    first, second = freqs[:, :, :4], freqs[:, :, 4:]
    assert torch.allclose((first * second).sum(0), torch.zeros(3, 4), atol=1e-6)


@pytest.mark.parametrize("heads", [1, 2], ids=["shared", "each"])
def test_gradients_reach_the_frequencies(heads):
    rope = MixedRoPE(4, num_kv_heads=heads, coordinates=1)
    q = torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)

    def run(x, freqs):
        return torch.func.functional_call(rope, {"freqs": freqs}, (x, x))[0]

    assert gradcheck(run, (q, rope.freqs.detach().double().requires_grad_()))


@KINDS
def test_bad_input_is_refused(kind):
    rope, x = kind(8, num_kv_heads=2), torch.randn(1, 2, 6, 8)
    with pytest.raises(ValueError, match=r"of shape \(2, 6\)"):
        rope(x, x, position_ids=positions.grid(1, 2, 3))
    with pytest.raises(ValueError, match="heads of k must be 2"):
        rope(x, x[:, :1], position_ids=positions.grid(2, 3))
    with pytest.raises(ValueError, match="heads of q must be a multiple of 2"):
        rope(torch.randn(1, 3, 6, 8), x, position_ids=positions.grid(2, 3))
    with pytest.raises(ValueError, match="head_dim must be a multiple of 4"):
        kind(6, num_kv_heads=2)


@KINDS
def test_position_ids_have_the_shapes_of_rope(kind):
    """So that one can be swapped for the other. Frequencies are float32: 50 times 2**-25 rad."""
    rope, x = kind(8, num_kv_heads=1, coordinates=1), torch.randn(3, 2, 5, 8)
    for ids in (torch.randint(0, 50, (3, 5)), torch.randint(0, 50, (1, 5))):
        got, wanted = rope(x, x, position_ids=ids), RoPE(8)(x, x, position_ids=ids)
        torch.testing.assert_close(got, wanted, rtol=0, atol=2e-5)


def drawn(head_dim, num_kv_heads, *, seed=0, **keywords):
    torch.manual_seed(seed)
    string = STRING(head_dim, num_kv_heads=num_kv_heads, **keywords)
    torch.nn.init.normal_(string.skew, std=0.3)
    return string


@pytest.mark.parametrize("batched", [False, True], ids=["shared", "batched"])
@pytest.mark.parametrize("coordinates", [1, 2, 3])
def test_scores_of_string_are_those_of_the_exponential_of_its_generators(coordinates, batched):
    string = drawn(12, 2, coordinates=coordinates)
    at = torch.randn((coordinates, 2, 5) if batched else (coordinates, 5), dtype=torch.float64)
    q, k = torch.randn(2, 4, 5, 12).double(), torch.randn(2, 2, 5, 12).double()
    a, b = string(q, k, position_ids=at)
    at = at if batched else at[:, None].expand(-1, 2, -1)
    for h in range(4):
        made = oracles.string_generators(string.freqs[:, h // 2].detach(), string.skew[h // 2])
        assert (made @ made[0] - made[0] @ made).abs().max() < 1e-13
        apart = at[:, :, None, :] - at[..., None]
        turn = torch.linalg.matrix_exp(torch.einsum("abij,axy->bijxy", apart, made))
        wanted = torch.einsum("bix,bijxy,bjy->bij", q[:, h], turn, k[:, h // 2])
        torch.testing.assert_close(a[:, h] @ b[:, h // 2].mT, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_string_rounds_once_after_a_product_in_float32(dtype):
    """A sum of D products in float32 is off by D + 1 roundings; the basis has one of its own."""
    string, at = drawn(16, 2), positions.grid(2, 3)
    q = torch.randn(2, 2, 6, 16).to(dtype)
    got, exact = (string(x, x, position_ids=at)[0] for x in (q, q.double()))
    assert got.dtype == dtype
    product = 18 * 2**-24 * q.double().norm(dim=-1, keepdim=True) * 16**0.5
    size = oracles.pair_magnitude(exact, 8, interleaved=True)
    assert ((got.double() - exact).abs() <= product + oracles.ulp(size, dtype)).all()


def test_string_starts_as_the_mixture_of_its_frequencies():
    string, mixed, at = (
        STRING(8, num_kv_heads=2),
        MixedRoPE(8, num_kv_heads=2),
        positions.grid(2, 3),
    )
    mixed.load_state_dict({"freqs": string.freqs.detach()})
    q = torch.randn(1, 2, 6, 8)
    assert torch.equal(string(q, q, position_ids=at)[0], mixed(q, q, position_ids=at)[0])


def test_gradients_reach_frequencies_and_planes_of_string():
    string, q = drawn(4, 2, coordinates=1), torch.randn(1, 4, 3, 4).double()
    names = ("freqs", "skew")

    def run(x, *numbers):
        given = dict(zip(names, numbers, strict=True))
        return torch.func.functional_call(string, given, (x, x[:, :2]))

    numbers = [getattr(string, name).detach().double().requires_grad_() for name in names]
    assert torch.autograd.gradcheck(run, (q.requires_grad_(), *numbers))


def test_autocast_and_strides_do_not_change_string():
    string, q, at = drawn(8, 2), torch.randn(2, 4, 6, 8), positions.grid(2, 3)
    k = q[:, :2]
    wanted = string(q, k, position_ids=at)[0]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(string(q, k, position_ids=at)[0], wanted)
    turned = q.transpose(1, 2).contiguous().transpose(1, 2)
    torch.testing.assert_close(string(turned, k, position_ids=at)[0], wanted)
    assert string(q[:, :, :0], k[:, :, :0], position_ids=at[:, :0])[0].shape == (2, 4, 0, 8)


@KINDS
@pytest.mark.parametrize("heads", [1, 2], ids=["shared", "each"])
def test_learned_frequencies_of_one_coordinate_start_as_rope(heads, kind):
    mixed = kind(16, num_kv_heads=heads, coordinates=1)
    q, k = torch.randn(2, 4, 9, 16), torch.randn(2, 2, 9, 16)
    rates = mixed.freqs[0, 0].tolist()
    assert torch.allclose(mixed.freqs.double(), RoPE(16).scaled_inv_freq().expand(1, heads, 8))
    for got, wanted in zip(mixed(q, k, offset=3), RoPE(16, inv_freq=rates)(q, k, 3), strict=True):
        assert torch.allclose(got, wanted, atol=1e-6)


def test_the_base_at_the_start_follows_the_number_of_coordinates():
    """An image is tens of patches wide: at base 10,000 most pairs would hardly turn."""
    for kind in (MixedRoPE, STRING):
        image = kind(16, num_kv_heads=3)
        text = image.replace(coordinates=1)
        # The lengths of the mixtures are the rates of an axis.
        assert torch.allclose(image.freqs[:, 0].norm(dim=0)[:4], 10.0 ** -(torch.arange(4) / 4))
        assert torch.allclose(text.freqs[0, 0], 10_000.0 ** -(torch.arange(8) / 8))


@pytest.mark.parametrize("batched", [False, True], ids=["shared", "batched"])
def test_one_set_of_learned_frequencies_serves_all_heads(batched):
    """As many sets as there are heads, all the same, are the reference."""
    one, each = (
        MixedRoPE(16, num_kv_heads=1, inv_freq=[3.0, 2.0, 1.0, 0.5]),
        MixedRoPE(16, num_kv_heads=4),
    )
    at = positions.grid(3, 3)
    at = torch.stack((at, at + 4), dim=1) if batched else at
    each.load_state_dict({"freqs": one.freqs.detach().expand(2, 4, 8)})
    q, k = torch.randn(2, 8, 9, 16), torch.randn(2, 4, 9, 16)
    results = []
    for rope in (one, each):
        a, b = rope(q, k, position_ids=at)
        (a.square().sum() + (a * a.flip(2)).sum() + (b * b.flip(2)).sum()).backward()
        results.append((a, b, rope.freqs.grad.sum(1)))
    for got, wanted in zip(*results, strict=True):
        assert torch.allclose(got, wanted, rtol=1e-4, atol=1e-4)


def test_the_start_of_learned_frequencies_is_checked():
    assert torch.equal(
        MixedRoPE(8, num_kv_heads=2, coordinates=1, inv_freq=FREQS).freqs[0, 1], torch.tensor(FREQS)
    )
    with pytest.raises(ValueError, match="inv_freq must have 2 numbers"):
        MixedRoPE(8, num_kv_heads=2, inv_freq=FREQS)
