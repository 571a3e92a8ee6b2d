"""Numbers that are copied to a device once: a CUDA graph could not capture the copy."""

from dataclasses import dataclass

import pytest
import torch

import posenc
from posenc import axes, scaling
from posenc.numerics import constants
from posenc.numerics.frequencies import Spectrum, scaled_rates
from posenc.numerics.tables import angles

SPECTRA = {
    "plain": Spectrum(8),
    "sections": Spectrum(8, axes=axes.Sections((2, 1, 1))),
    "axial": Spectrum(8, scaling=scaling.Linear(3.0), axes=axes.Axial()),
    "unequal": Spectrum(8, scaling=scaling.Linear(3.0), axes=axes.Axial((2, 6))),
    "by-length": Spectrum(8, scaling=scaling.DynamicNTK(2.0, original_length=16)),
    "per-pair": Spectrum(
        8, scaling=scaling.LongRoPE((1.0,) * 4, long_factor=(2.0,) * 4, original_length=16)
    ),
}


@pytest.mark.parametrize("lengths", [False, True], ids=["any-length", "lengths"])
@pytest.mark.parametrize("name", SPECTRA)
def test_a_second_call_copies_nothing(name, lengths, monkeypatch):
    spectrum = SPECTRA[name]
    count = 1 if spectrum.axes is None else spectrum.axes.count()
    at = torch.arange(5).expand(count, 5) if spectrum.axes else torch.arange(5)
    length = torch.tensor(40) if lengths else None
    first = angles(at, spectrum, length)

    def refuse(*args, **keywords):
        raise AssertionError("a tensor was made of numbers")

    monkeypatch.setattr(torch, "tensor", refuse)
    assert torch.equal(angles(at, spectrum, length), first)


def test_constants_of_inference_mode_can_be_used_in_training():
    constants._cached.cache_clear()
    at = torch.tensor([0.5], dtype=torch.float64)
    with torch.inference_mode():
        angles(at.clone(), Spectrum(4))
    angles(at.requires_grad_(), Spectrum(4)).sum().backward()
    assert at.grad == scaled_rates(Spectrum(4)).sum()


def test_a_traced_call_leaves_no_fake_tensor_in_the_cache():
    constants._cached.cache_clear()
    with torch._subclasses.FakeTensorMode():
        angles(torch.arange(3), Spectrum(6))
    assert type(angles(torch.arange(3), Spectrum(6))) is torch.Tensor
    assert constants._cached.cache_info().currsize > 0


def test_rules_are_numbers_to_a_tracer_too():
    """Worked out for the first time under a mode, as after loading a module in a new process."""
    rule = scaling.YaRN(4.0, original_length=61)
    with torch._subclasses.FakeTensorMode():
        rope = posenc.RoPE(8, 16, scaling=rule)
    assert rope.cos_cached.shape == (16, 4)
    assert torch.equal(posenc.RoPE(8, 16, scaling=rule).scaled_inv_freq(), rope.scaled_inv_freq())


@dataclass(frozen=True)
class Named(scaling.Linear):
    """A rule that a user writes, with a field that is no number."""

    note: str = "slow"


@dataclass(frozen=True, kw_only=True)
class ByName(scaling.Rule):
    factor: float

    def __call__(self, rates, base, seq_len=None):
        return rates / self.factor


class Plain(scaling.Rule):
    def __init__(self, factor):
        object.__setattr__(self, "factor", factor)

    __call__ = ByName.__call__


@pytest.mark.skipif(torch.__version__ < "2.13", reason="to older ones they are no constants")
@pytest.mark.parametrize("rule", [Named(4.0), ByName(factor=4.0), Plain(4.0)], ids=type)
def test_a_rule_that_a_user_writes_compiles(rule):
    rope, x = posenc.RoPE(8, None, scaling=rule), torch.randn(1, 1, 5, 8)
    got = torch.compile(rope.rotate, fullgraph=True, backend="aot_eager")(x)
    assert torch.allclose(got, posenc.RoPE(8, None, scaling=scaling.Linear(4.0)).rotate(x))


def test_writing_to_inv_freq_changes_no_later_table():
    """Written to, it must not change what the next table is made of."""
    rope = posenc.RoPE(8, None)
    rope.scaled_inv_freq().zero_()
    assert rope.scaled_inv_freq()[0] == 1.0
