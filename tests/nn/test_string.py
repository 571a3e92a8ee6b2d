"""STRING against the exponential of its generators."""

import copy
import pickle

import pytest
import torch

import oracles
from posenc import STRING, MixedRoPE, positions


def drawn(head_dim, num_kv_heads, *, seed=0, **keywords):
    torch.manual_seed(seed)
    string = STRING(head_dim, num_kv_heads=num_kv_heads, **keywords)
    torch.nn.init.normal_(string.skew, std=0.3)
    return string


@pytest.mark.parametrize("batched", [False, True], ids=["shared", "batched"])
@pytest.mark.parametrize("coordinates", [1, 2, 3])
def test_scores_are_those_of_the_exponential_of_the_generators(coordinates, batched):
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
def test_narrow_dtypes_round_once_after_a_product_in_float32(dtype):
    """A sum of D products in float32 is off by D + 1 roundings; the basis has one of its own."""
    string, at = drawn(16, 2), positions.grid(2, 3)
    q = torch.randn(2, 2, 6, 16).to(dtype)
    got, exact = (string(x, x, position_ids=at)[0] for x in (q, q.double()))
    assert got.dtype == dtype
    product = 18 * 2**-24 * q.double().norm(dim=-1, keepdim=True) * 16**0.5
    size = oracles.pair_magnitude(exact, 8, interleaved=True)
    assert ((got.double() - exact).abs() <= product + oracles.ulp(size, dtype)).all()


def test_at_the_start_it_is_the_mixture_of_its_frequencies():
    string, mixed, at = (
        STRING(8, num_kv_heads=2),
        MixedRoPE(8, num_kv_heads=2),
        positions.grid(2, 3),
    )
    mixed.load_state_dict({"freqs": string.freqs.detach()})
    q = torch.randn(1, 2, 6, 8)
    assert torch.equal(string(q, q, position_ids=at)[0], mixed(q, q, position_ids=at)[0])


def test_gradients_reach_frequencies_and_planes():
    string, q = drawn(4, 2, coordinates=1), torch.randn(1, 4, 3, 4).double()
    names = ("freqs", "skew")

    def run(x, *numbers):
        given = dict(zip(names, numbers, strict=True))
        return torch.func.functional_call(string, given, (x, x[:, :2]))

    numbers = [getattr(string, name).detach().double().requires_grad_() for name in names]
    assert torch.autograd.gradcheck(run, (q.requires_grad_(), *numbers))


def test_casts_copies_and_other_devices():
    string, q, at = drawn(8, 2), torch.randn(2, 4, 6, 8), positions.grid(2, 3)
    k = q[:, :2]
    wanted = string(q, k, position_ids=at)[0]
    assert torch.equal(copy.deepcopy(string).half()(q, k, position_ids=at)[0], wanted)
    assert torch.equal(pickle.loads(pickle.dumps(string))(q, k, position_ids=at)[0], wanted)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(string(q, k, position_ids=at)[0], wanted)
    turned = q.transpose(1, 2).contiguous().transpose(1, 2)
    torch.testing.assert_close(string(turned, k, position_ids=at)[0], wanted)
    assert string(q[:, :, :0], k[:, :, :0], position_ids=at[:, :0])[0].shape == (2, 4, 0, 8)
    with torch.device("meta"):
        q, k, at = (x.to("meta") for x in (q, k, at))
        assert STRING(8, num_kv_heads=2)(q, k, position_ids=at)[0].shape == q.shape
    other = STRING(8, num_kv_heads=2).to_empty(device="cpu")
    other.reset_parameters()
    assert not other.skew.any()
    assert set(string.state_dict()) == {"freqs", "skew"}


def test_what_does_not_fit_is_refused():
    string, q = STRING(8, num_kv_heads=2), torch.randn(1, 3, 6, 8)
    with pytest.raises(ValueError, match=r"STRING: heads of k must be 2, got 3"):
        string(q, q, position_ids=positions.grid(2, 3))
    with pytest.raises(ValueError, match="heads of q must be a multiple of 2"):
        string(q, q[:, :2], position_ids=positions.grid(2, 3))
    with pytest.raises(ValueError, match="multiple of 4"):
        STRING(6, num_kv_heads=2)
