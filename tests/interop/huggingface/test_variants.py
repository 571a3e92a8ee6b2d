"""Rotating functions in forms of their own."""

import pytest
import torch
import transformers
from torch import nn

import oracles
from posenc.interop.huggingface import patch, patched
from support.hf_models import SMALL, apart


def rotate_half(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def apply_rotary_pos_emb_kernel(q, k, cos, sin):
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


class Kernel(nn.Module):
    """What the kernels package makes of a function."""

    kernel_layer_name = "rotary_pos_emb"

    def forward(self, q, k, cos, sin):
        return apply_rotary_pos_emb_kernel(q, k, cos, sin)


kernelized_rotary = Kernel()


class Kernelized(nn.Module):
    def forward(self, q, cos, sin):
        return kernelized_rotary(q, q, cos, sin)


def test_a_function_that_the_kernels_package_made_a_module_is_replaced():
    model = Kernelized()
    q = torch.randn(2, 3, 5, 8)
    phi = torch.rand(5, 4)
    tables = [torch.cat((t, t), dim=-1) for t in (phi.cos(), phi.sin())]
    expected = model(q, *tables)

    with patched(model) as report:
        got = model(q, *tables)

    assert [p.function for p in report.places] == ["kernelized_rotary"]
    assert all(apart(a, b) < 1e-6 for a, b in zip(expected, got, strict=True))


def apply_rotary_pos_emb_old(q, k, cos, sin, position_ids=None):
    return apply_rotary_pos_emb_kernel(q, k, cos, sin)


def apply_rotary_pos_emb_picking(q, k, cos, sin, position_ids=None):
    if position_ids is not None:
        cos, sin = cos[position_ids], sin[position_ids]
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


class Old(nn.Module):
    def forward(self, q, cos, sin, position_ids):
        return apply_rotary_pos_emb_old(q, q, cos, sin, position_ids)


class Picking(nn.Module):
    def forward(self, q, cos, sin, position_ids):
        return apply_rotary_pos_emb_picking(q, q, cos, sin, position_ids)


def test_positions_that_are_only_passed_on_are_told_from_those_that_pick_rows():
    q, phi, at = torch.randn(2, 3, 5, 8), torch.rand(5, 4), torch.arange(5).flip(0)
    tables = [torch.cat((t, t), dim=-1) for t in (phi.cos(), phi.sin())]
    model = Old()
    wanted = model(q, *tables, at)[0]
    with patched(model):
        assert apart(model(q, *tables, at)[0], wanted) < 1e-6
    with pytest.raises(ValueError, match="apply_rotary_pos_emb_picking"):
        patch(Picking())


def test_tables_of_two_angles_for_a_pair_are_refused():
    sections = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2, 2]}
    config = transformers.HunYuanVLTextConfig(**SMALL, head_dim=16, rope_parameters=sections)
    model = transformers.HunYuanVLTextModel(config)
    with pytest.raises(ValueError, match="a table of two angles for a pair"):
        patch(model)


@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
@pytest.mark.parametrize("batch", [1, 2], ids=["shared", "each-sequence"])
def test_the_drop_in_is_the_function_of_transformers(unsqueeze_dim, batch):
    from transformers.models.llama import modeling_llama as theirs

    from posenc.interop.huggingface import apply_rotary_pos_emb

    rotary = theirs.LlamaRotaryEmbedding(transformers.LlamaConfig(**SMALL))
    width = rotary.inv_freq.shape[0] * 2
    q, k = torch.randn(2, 4, 5, width), torch.randn(2, 2, 5, width)
    if unsqueeze_dim == 2:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    ids = torch.arange(5).expand(batch, -1) + torch.arange(batch)[:, None]
    cos, sin = rotary(q, ids)
    expected = theirs.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
    found = apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
    assert all(apart(a, b) < 1e-6 for a, b in zip(expected, found, strict=True))
    cos, sin = cos[..., : width // 2], sin[..., : width // 2]
    with pytest.raises(ValueError, match="must be the same in cos"):
        apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)


@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
@pytest.mark.parametrize("learns", [False, True], ids=["plain", "with-gradients"])
@pytest.mark.parametrize("width", [16, 8], ids=["all-channels", "the-first"])
def test_the_drop_in_takes_tables_without_an_axis_for_sequences(unsqueeze_dim, learns, width):
    """A call with gradients runs other code than one without."""
    from posenc.interop.huggingface import apply_rotary_pos_emb

    angles = torch.randn(5, width // 2)
    cos, sin = (torch.cat((part, part), -1) for part in (angles.cos(), angles.sin()))
    q, k = torch.randn(2, 4, 5, 16), torch.randn(2, 2, 5, 16)
    numbers = angles.cos(), angles.sin()
    expected = [oracles.rotate(x, *numbers, interleaved=False) for x in (q, k)]
    if unsqueeze_dim == 2:
        q, k, *expected = (x.transpose(1, 2) for x in (q, k, *expected))
    found = apply_rotary_pos_emb(q.requires_grad_(learns), k, cos, sin, unsqueeze_dim=unsqueeze_dim)
    assert all(apart(a, b) < 1e-6 for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        pytest.param({"cos": (1, 4, 16), "sin": (1, 4, 16)}, "rows for 5 tokens", id="length"),
        pytest.param({"cos": (3, 5, 16), "sin": (3, 5, 16)}, "rows for 5 tokens", id="batch"),
        pytest.param({"cos": (1, 5, 16)}, r"got \(1, 5, 16\) and \(5, 16\) for q of", id="unlike"),
        pytest.param({"cos": (5, 18), "sin": (5, 18)}, "at most 16 channels of q", id="width"),
        pytest.param({"k": (2, 2, 6, 16)}, "rows for 6 tokens", id="other-keys"),
        pytest.param({"q": (4, 5, 16)}, r"q must have shape \(B, H, L, D\)", id="no-sequences"),
    ],
)
@pytest.mark.parametrize("learns", [False, True], ids=["plain", "with-gradients"])
def test_the_drop_in_names_itself_and_the_shapes_that_were_passed(change, text, learns):
    from posenc.interop.huggingface import apply_rotary_pos_emb

    shapes = {"q": (2, 4, 5, 16), "k": (2, 2, 5, 16), "cos": (5, 16), "sin": (5, 16), **change}
    given = {name: torch.zeros(shape) for name, shape in shapes.items()}
    given["q"].requires_grad_(learns)
    with pytest.raises(ValueError, match=f"^apply_rotary_pos_emb: .*{text}"):
        apply_rotary_pos_emb(**given)


def apply_rotary_by_keyword(x, freqs):
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * freqs
    return torch.view_as_real(turned).flatten(-2)


class Processor:
    """An object that a module calls to attend, as diffusers has it."""

    def __call__(self, x, freqs):
        def apply_rotary_inside(x, freqs):
            real, imag = x.unflatten(-1, (-1, 2)).unbind(-1)
            cos, sin = freqs.real, freqs.imag
            turned = real * cos - imag * sin, real * sin + imag * cos
            return torch.stack(turned, dim=-1).flatten(-2)

        return apply_rotary_inside(x, freqs) + apply_rotary_by_keyword(x=x, freqs=freqs)


class Enclosing:
    def __call__(self, x, freqs):
        def apply_rotary_here(x):
            return x * freqs

        return apply_rotary_here(x)


class Attention(nn.Module):
    def __init__(self, processor):
        super().__init__()
        self.processor = processor

    def forward(self, x, freqs):
        return self.processor(x, freqs)


def test_functions_of_a_processor_are_replaced_where_it_defines_or_names_them():
    model, shared = Attention(Processor()), Processor()
    x, phi = torch.randn(2, 3, 5, 8), torch.rand(5, 4)
    freqs = torch.polar(torch.ones(5, 4), phi)
    expected = model(x, freqs)

    with patched(model) as report:
        got = model(x, freqs)
        assert isinstance(model.processor, Processor)
        assert type(model.processor) is not Processor

    places = {(p.cls, p.function, p.variant) for p in report.places}
    names = ("apply_rotary_inside", "apply_rotary_by_keyword")
    assert places == {("Processor", name, "complex") for name in names}
    assert apart(expected, got) < 1e-6
    assert type(model.processor) is Processor
    assert torch.equal(shared(x, freqs), expected)


def test_a_function_that_reads_variables_around_it_is_refused_by_name():
    model = Attention(Enclosing())

    with pytest.raises(ValueError, match="apply_rotary_here, which has variables of another"):
        patch(model)

    assert type(model.processor) is Enclosing
