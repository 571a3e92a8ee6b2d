"""Constructor arguments are read-only attributes; `replace` gives a module with others."""

import copy
import inspect

import pytest
import torch

import posenc
from posenc import axes, scaling
from support.modules import MODULES


@pytest.mark.parametrize("name", MODULES)
def test_no_argument_of_any_module_changes(name):
    module = MODULES[name].build()
    for argument in set(module._arguments) - set(module._children):
        with pytest.raises(AttributeError, match=argument):
            setattr(module, argument, "another")
    module.args = 1
    module.args = 2  # a user's own


@pytest.mark.parametrize("name", MODULES)
def test_replace_gives_a_module_with_the_same_arguments(name):
    module = MODULES[name].build()
    other = module.replace()
    assert type(other) is type(module)
    assert other is not module
    assert other._argument_values() == module._argument_values()


def test_a_replaced_rope_rotates_by_its_own_arguments():
    rope, x = posenc.RoPE(8, 64, interleaved=False), torch.randn(1, 1, 4, 8)
    slower = rope.replace(scaling=scaling.Linear(4.0), axes=axes.Sections((3, 1)))
    wanted = posenc.RoPE(
        8, 64, interleaved=False, scaling=scaling.Linear(4.0), axes=axes.Sections((3, 1))
    )
    assert torch.equal(slower.rotate(x, 3), wanted.rotate(x, 3))
    assert torch.equal(
        rope.replace(max_seq_len=None).rotate(x, 99), rope.replace(max_seq_len=128).rotate(x, 99)
    )


def test_replace_with_an_impossible_argument_is_refused_by_the_constructor():
    with pytest.raises(ValueError, match="rotary_dim must be at most head_dim=8"):
        posenc.RoPE(8).replace(rotary_dim=16)
    with pytest.raises(TypeError, match="Pass base"):
        posenc.RoPE(8).replace(theta=1e6)


class Scaled(posenc.RoPE):
    def __init__(self, head_dim, scale=None):
        super().__init__(head_dim, 16)
        self.head_dim = head_dim
        self.scale = scale
        if scale is None:
            self.scale = head_dim**-0.5


class Passing(posenc.RoPE):
    def __init__(self, *args, **keywords):
        super().__init__(*args, **keywords)


class OfConfig(posenc.RoPE):
    def __init__(self, config, *, mask=None):
        super().__init__(config["width"])
        self.register_buffer("mask", mask)


def test_a_subclass_may_have_a_constructor_of_its_own():
    """It is shown, may set its own attributes and the same values, and keeps to ours."""
    scaled = Scaled(8)
    scaled.scale = 3.0
    assert Passing(8, base=5e5).replace(max_seq_len=None).base == 5e5
    with pytest.raises(TypeError, match="unexpected keyword"):
        OfConfig({"width": 8}).replace(mask=None)
    for module in (scaled, Passing(8), OfConfig({"width": 8}, mask=torch.ones(3))):
        assert "head_dim=8" in repr(module)
        assert copy.deepcopy(module).head_dim == 8
        with pytest.raises(AttributeError, match=r"base is read-only.*\n.*replace\(base="):
            module.base = 5.0


def test_a_module_shows_its_arguments():
    text = repr(posenc.RoPE(8, None, 5e5, interleaved=False, scaling=scaling.Linear(2.0)))
    wanted = "head_dim=8, max_seq_len=None, base=500000, interleaved=False, "
    assert text == f"RoPE({wanted}scaling=Linear(factor=2.0))"


@pytest.mark.parametrize(
    ("make", "ours"),
    [
        (lambda: posenc.RoPE(dim=64), "head_dim"),
        (lambda: posenc.RoPE(64, theta=1e6), "base"),
        (lambda: posenc.RoPE(64, max_position_embeddings=9), "max_seq_len"),
        (lambda: posenc.PoPE(64, num_heads=2), "num_kv_heads"),
        (lambda: posenc.KERPLE(8, is_causal=False), "causal"),
        (lambda: posenc.ForgetGate(8, d_model=64), "embed_dim"),
        (lambda: posenc.RoPE(64, rope_parameters={}), "scaling"),
        (lambda: posenc.RoPE(64, is_neox_style=True), "interleaved=False"),
    ],
)
def test_a_word_of_another_library_is_refused_with_ours(make, ours):
    with pytest.raises(TypeError, match=f"not (an argument|arguments).\n  Pass {ours}"):
        make()


@pytest.mark.parametrize("name", MODULES)
def test_a_wrong_argument_of_a_call_names_no_private_class(name):
    """Python's own error has the class that defines forward, a base perhaps."""
    with pytest.raises(TypeError) as error:
        MODULES[name].build()(their_word=True)
    owner = str(error.value).partition("forward() got an unexpected keyword argument")[0]
    assert owner.rstrip(".") in {"", *posenc.__all__}


# Their signatures are asked for, word for word.
SEEDS = {"RoPE", "LearnedPosEmbedding", "RotaryPosEmbedding", "SinusoidalPE"}
SEEDS |= {"SinusoidalPosEmbedding"}


@pytest.mark.parametrize(
    "name", [n for n in posenc.nn.__all__ if isinstance(getattr(posenc.nn, n), type)]
)
def test_one_size_is_positional(name):
    """So no two ints can be swapped."""
    given = list(inspect.signature(getattr(posenc.nn, name)).parameters.values())
    positional = [p.name for p in given if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert len(positional) == 1 or name in SEEDS
    assert {"num_heads", "num_kv_heads"} - {p.name for p in given}
    for p in given:
        assert p.name != "causal" or p.default in (True, p.empty)
