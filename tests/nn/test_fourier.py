import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from posenc import FourierFeatures, functional

KINDS = pytest.mark.parametrize("kind", ["random", "learned", "nerf"])


@KINDS
@pytest.mark.parametrize("include_input", [False, True])
def test_the_module_is_the_function_of_its_frequencies(kind, include_input):
    module = FourierFeatures(
        2, num_frequencies=5, kind=kind, scale=3.0, include_input=include_input
    )
    x = torch.rand(4, 2)
    if kind == "nerf":
        wanted = functional.nerf_features(x, 5, scale=3.0, include_input=include_input)
    else:
        matrix = module.frequencies
        wanted = functional.fourier_features(x, matrix, include_input=include_input)
    assert torch.equal(module(x), wanted)
    assert module.embed_dim == wanted.shape[-1]


def test_only_learned_frequencies_are_trained_and_both_are_saved():
    for kind, trained in (("random", False), ("learned", True)):
        module = FourierFeatures(2, num_frequencies=5, kind=kind)
        assert list(module.state_dict()) == ["frequencies"]
        x = torch.rand(4, 2, requires_grad=True)
        module.requires_grad_(trained)
        module(x).square().sum().backward()
        assert (module.frequencies.grad is not None) == trained
        assert x.grad is not None
    assert FourierFeatures(2, num_frequencies=5, kind="nerf").state_dict() == {}


def test_random_frequencies_stay_when_a_whole_model_is_unfrozen():
    module = FourierFeatures(1, num_frequencies=4).requires_grad_(True)
    assert not module(torch.rand(3, 1)).requires_grad


def test_frequencies_are_normal_and_follow_from_the_seed():
    """The mean of 20 000 numbers is within 5 standard errors, and so is their variance."""
    one = FourierFeatures(2, num_frequencies=10_000, scale=10.0, seed=0)
    torch.manual_seed(1)
    same, other = (
        FourierFeatures(2, num_frequencies=10_000, scale=10.0, seed=0),
        one.replace(seed=1),
    )
    assert torch.equal(one.frequencies, same.frequencies)
    assert not torch.equal(one.frequencies, other.frequencies)
    drawn = one.frequencies.double() / 10.0
    assert abs(drawn.mean()) < 5 / math.sqrt(20_000)
    assert abs(drawn.var() - 1) < 5 * math.sqrt(2 / 20_000)


@pytest.mark.parametrize("kind", ["random", "learned"])
def test_without_a_seed_frequencies_follow_torch(kind):
    """An experiment with several seeds has as many matrices, and so have two modules of a model."""

    def build(seed):
        torch.manual_seed(seed)
        return [FourierFeatures(2, num_frequencies=5, kind=kind) for _ in range(2)]

    (first, second), (again, _), (other, _) = build(0), build(0), build(1)
    assert torch.equal(first.frequencies, again.frequencies)
    for module in (second, other):
        assert not torch.equal(first.frequencies, module.frequencies)
    assert torch.equal(first.replace(include_input=True).frequencies, first.frequencies)


def test_a_matrix_that_is_drawn_late_is_that_of_the_constructor():
    """Ranks whose generators have run apart since, in training for example, still agree."""
    torch.manual_seed(0)
    wanted = FourierFeatures(2, num_frequencies=5).frequencies
    torch.manual_seed(0)
    with torch.device("meta"):
        module = FourierFeatures(2, num_frequencies=5)
    with FakeTensorMode():
        FourierFeatures(2, num_frequencies=5)
    torch.manual_seed(7)
    module = module.to_empty(device="cpu")
    module.reset_parameters()
    assert torch.equal(module.frequencies, wanted)


@KINDS
def test_the_call_decides_the_dtype(kind):
    module, x = (
        FourierFeatures(2, num_frequencies=5, kind=kind),
        torch.rand(4, 2, dtype=torch.float64),
    )
    assert module(x).dtype == torch.float32
    assert module(torch.arange(4).view(2, 2)).dtype == torch.float32
    assert module(x, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_learned_features_are_those_of_the_paper():
    """Li et al., equation 2: cos and sin of x W, W ~ N(0, 1 / gamma^2), times 1 / sqrt(D)."""
    gamma, x = 0.5, torch.rand(3, 2)
    module = FourierFeatures(2, num_frequencies=4, kind="learned", scale=1 / (2 * math.pi * gamma))
    phi = x.double() @ (2 * math.pi * module.frequencies.double()).T
    wanted = torch.cat((phi.cos(), phi.sin()), dim=-1)
    torch.testing.assert_close(module(x).double(), wanted.detach(), rtol=0, atol=1e-7)


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="FourierFeatures: kind must be 'random' or 'learned'"):
        FourierFeatures(2, num_frequencies=5, kind="gauss")
    with pytest.raises(ValueError, match="num_frequencies must be at most 64"):
        FourierFeatures(2, num_frequencies=65, kind="nerf")
    with pytest.raises(ValueError, match="coordinates must be at least 1"):
        FourierFeatures(0, num_frequencies=5)
    for kind in ("random", "nerf"):
        with pytest.raises(ValueError, match=r"FourierFeatures: coordinates must .* \(..., 2\)"):
            FourierFeatures(2, num_frequencies=5, kind=kind)(torch.rand(4, 3))
