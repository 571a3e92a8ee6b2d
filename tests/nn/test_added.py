"""Sums with factors and dropout: ``dropout(g x + alpha PE)``."""

import copy

import pytest
import torch
from torch.autograd import gradcheck

import oracles
from posenc import LearnedPosEmbedding, SinusoidalGrid, SinusoidalPE, SinusoidalPosEmbedding
from support.assertions import compilations

BOTH = pytest.mark.parametrize(
    "make",
    [
        lambda **options: SinusoidalPosEmbedding(**options),
        lambda **options: SinusoidalPE(32, 16, **options),
    ],
    ids=["SinusoidalPosEmbedding", "SinusoidalPE"],
)
FACTORS = pytest.mark.parametrize(
    ("options", "gain", "alpha"),
    [
        pytest.param({"scale_input": True}, 4.0, 1.0, id="input"),
        pytest.param({"scale": 0.3}, 1.0, 0.3, id="scale"),
        pytest.param({"scale": 0.25, "learn_scale": True}, 1.0, 0.25, id="learned"),
        pytest.param({"scale_input": True, "scale": 3.0}, 4.0, 3.0, id="both"),
    ],
)


def sinusoids(length=20):
    return oracles.sinusoid(range(length), 16)


@BOTH
@FACTORS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_sum_is_rounded_once(make, options, gain, alpha, dtype):
    """Beside that, the table owes half an ulp of its own, and halves are summed in float32."""
    x = torch.randn(2, 20, 16).to(dtype)
    got = make(**options)(x)
    table = sinusoids()
    exact = gain * x.double() + alpha * table
    of_table = alpha * 0.5 * oracles.ulp(table.abs(), torch.float32)
    noise = 1e-15 if dtype == torch.float32 else 2e-7 * (gain * x.double().abs() + alpha)
    assert got.dtype == dtype
    allowed = 0.5 * oracles.ulp(exact.abs(), dtype) + of_table + noise
    assert ((got - exact).abs() <= allowed).all()


@BOTH
@FACTORS
def test_float64_is_exact(make, options, gain, alpha):
    x = torch.randn(20, 16, dtype=torch.float64)
    got = make(**options)(x)
    assert (got - (gain * x + alpha * sinusoids())).abs().max() < 8e-15


@BOTH
def test_nothing_is_saved_but_what_is_learned(make):
    assert make(scale_input=True, scale=2.0, dropout=0.5).state_dict() == {}
    module = make(scale=2.0, learn_scale=True)
    assert list(module.state_dict()) == ["alpha"]
    assert module.alpha.item() == 2.0
    assert list(module.buffers()) == []


@BOTH
def test_the_factor_gets_its_gradient(make):
    module = make(learn_scale=True)
    x = torch.randn(2, 16, dtype=torch.float64, requires_grad=True)
    alpha = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    run = torch.func.functional_call
    assert gradcheck(lambda x, alpha: run(module, {"alpha": alpha}, (x,)), (x, alpha))
    module(x.detach().float()).sum().backward()
    assert abs(module.alpha.grad.item() - sinusoids(2).sum().item()) < 1e-5


@BOTH
def test_the_factor_is_cast_with_the_model_and_a_sum_is_rounded_once(make):
    module, x = make(scale=0.3, learn_scale=True), torch.randn(3, 16)
    wanted = module(x)
    assert torch.equal(copy.deepcopy(module)(x), wanted)
    cast = copy.deepcopy(module).bfloat16()
    assert cast.alpha.dtype == torch.bfloat16
    assert torch.equal(cast(x), make(scale=cast.alpha.item(), learn_scale=True)(x))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(module(x), wanted)


@BOTH
def test_a_checkpoint_may_have_the_factor_without_an_axis(make):
    """FSDP2 shards no parameter of shape (), so ours has one axis; older ones had none."""
    module = make(scale=0.3, learn_scale=True)
    assert module.alpha.shape == (1,)
    model = torch.nn.ModuleDict({"position": copy.deepcopy(module)})
    model.load_state_dict({"position.alpha": torch.tensor(0.5)})
    assert model["position"].alpha.tolist() == [0.5]


DROPPING = pytest.mark.parametrize(
    "make",
    [
        lambda p: SinusoidalPosEmbedding(dropout=p),
        lambda p: SinusoidalPE(400, 16, dropout=p),
        lambda p: SinusoidalGrid((20, 20), embed_dim=16, dropout=p),
        lambda p: LearnedPosEmbedding(400, 16, dropout=p),
    ],
    ids=["SinusoidalPosEmbedding", "SinusoidalPE", "SinusoidalGrid", "LearnedPosEmbedding"],
)


@DROPPING
def test_dropout_takes_whole_sums_and_only_in_training(make):
    """Five standard deviations of the count of 6400 channels."""
    module, x = make(0.25), torch.full((400, 16), 7.0)
    exact = module.eval()(x)
    got = module.train()(x)
    gone = got == 0
    assert abs(gone.double().mean() - 0.25) < 5 * (0.25 * 0.75 / 6400) ** 0.5
    torch.testing.assert_close(got[~gone], exact[~gone] / 0.75)
    assert not (exact == 0).any()


@DROPPING
def test_dropout_is_a_probability(make):
    for bad in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="dropout must be"):
            make(bad)
    with pytest.raises(TypeError, match="dropout must be a number"):
        make(True)


@BOTH
def test_bad_factors_are_named(make):
    with pytest.raises(TypeError, match="scale_input must be True or False"):
        make(scale_input=8.0)
    with pytest.raises(ValueError, match="scale must be finite and above zero"):
        make(scale=0.0)
    with pytest.raises(TypeError, match="learn_scale must be True or False"):
        make(learn_scale=None)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_a_traced_module_has_the_root_of_the_width_in_full():
    """torch.jit.trace makes a tensor of a size, and its power is a float32."""
    module, x = SinusoidalPE(32, 6, scale_input=True), torch.randn(3, 6)
    assert torch.equal(torch.jit.trace(module, (x,))(x + 1), module(x + 1))


@pytest.mark.slow
@BOTH
def test_one_graph_for_all_lengths(make):
    module = make(scale_input=True, learn_scale=True)
    calls = [(torch.randn(2, n, 16),) for n in (5, 3, 17)]
    assert compilations(module, calls, dynamic=True) == 1
