"""RoPE of tokens that have several coordinates, or ones between the whole ones."""

import mpmath
import pytest
import torch

import oracles
from posenc import RoPE, axes, positions, scaling
from support.assertions import assert_within_ulps

RULES = [
    scaling.Linear(2.0),
    scaling.NTK(4.0),
    scaling.YaRN(4.0, original_length=64),
    scaling.Llama3(8.0, original_length=64),
    scaling.DynamicNTK(2.0, original_length=64),
    scaling.Proportional(0.5),
]


class TestAxes:
    """Several coordinates, against the models that have them."""

    at = torch.tensor([[0, 1, 2, 2, 2, 2, 4], [0, 1, 2, 2, 3, 3, 4], [0, 1, 2, 3, 2, 3, 4]])

    @pytest.mark.parametrize("interleaved", [False, True], ids=["qwen2-vl", "qwen3-vl"])
    @pytest.mark.filterwarnings("ignore")
    def test_sections_agree_with_qwen(self, interleaved):
        from transformers.models.qwen2_vl import Qwen2VLTextConfig, modeling_qwen2_vl
        from transformers.models.qwen3_vl import Qwen3VLTextConfig, modeling_qwen3_vl

        q, k = torch.randn(2, 4, 7, 16), torch.randn(2, 2, 7, 16)
        at = torch.stack((self.at, self.at + 3), dim=1)
        kind = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
        if interleaved:
            config = Qwen3VLTextConfig(head_dim=16, rope_parameters=kind)
            tables = modeling_qwen3_vl.Qwen3VLTextRotaryEmbedding(config)(q, at)
        else:
            sizes = {"hidden_size": 64, "num_attention_heads": 4}
            config = Qwen2VLTextConfig(**sizes, rope_parameters=kind)
            tables = modeling_qwen2_vl.Qwen2VLRotaryEmbedding(config)(q, at)
        wanted = modeling_qwen3_vl.apply_rotary_pos_emb(q, k, *tables)
        rope = RoPE(16, 64, axes=axes.Sections((4, 2, 2), interleaved), interleaved=False)
        for got, other in zip(rope(q, k, position_ids=at), wanted, strict=True):
            assert torch.allclose(got, other, atol=2e-6)

    def test_equal_coordinates_are_one_position(self):
        q, k = torch.randn(2, 4, 7, 16), torch.randn(2, 2, 7, 16)
        plain = RoPE(16, 64)
        for arrangement in (axes.Sections((4, 2, 2)), axes.Sections((4, 2, 2), interleaved=True)):
            rope = RoPE(16, 64, axes=arrangement)
            assert torch.equal(rope(q, k, 5)[0], plain(q, k, 5)[0])
            ids = torch.arange(5, 12)
            assert torch.equal(rope(q, k, position_ids=ids)[1], plain(q, k, 5)[1])
            spread = ids.expand(3, 2, 7)
            assert torch.equal(rope(q, k, position_ids=spread)[1], plain(q, k, 5)[1])

    @pytest.mark.parametrize("rates", ["per_axis", "shared"], ids=["qwen2-vl-vision", "pixtral"])
    @pytest.mark.filterwarnings("ignore")
    def test_axial_agrees_with_vision_models(self, rates):
        from transformers import PixtralVisionConfig
        from transformers.models.pixtral import modeling_pixtral
        from transformers.models.qwen2_vl import modeling_qwen2_vl
        from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig

        at = positions.grid(3, 4)
        q, k = torch.randn(1, 2, 12, 16), torch.randn(1, 2, 12, 16)
        if rates == "shared":
            config = PixtralVisionConfig(head_dim=16, hidden_size=32, num_attention_heads=2)
            made = modeling_pixtral.PixtralVisionRotaryEmbedding(config)
        else:
            config = Qwen2VLVisionConfig(embed_dim=32, num_heads=2)
            made = modeling_qwen2_vl.Qwen2VLVisionRotaryEmbedding(config)
        cos, sin = (table[None] for table in made(q, at.T))
        wanted = modeling_pixtral.apply_rotary_pos_emb(q, k, cos, sin)
        rope = RoPE(16, None, axes=axes.Axial(2, rates=rates), interleaved=False)
        for mine, other in zip(rope(q, k, position_ids=at), wanted, strict=True):
            assert torch.allclose(mine, other, atol=2e-6)

    def test_coordinates_may_be_fractions(self):
        """DINOv3: coordinates in [-1, 1], angles of 2 pi times them over the periods."""
        at = torch.rand(2, 6, dtype=torch.float64) * 2 - 1
        rope = RoPE(16, None, 100.0, axes=axes.Axial(2), scaling=scaling.Linear(1 / torch.pi / 2))
        x = torch.randn(1, 2, 6, 16)
        periods = 100.0 ** (2 * torch.arange(4, dtype=torch.float64) / 8)
        phi = torch.cat([2 * torch.pi * line[:, None] / periods for line in at], dim=-1)
        wanted = oracles.rotate(x, phi.cos(), phi.sin(), interleaved=True)
        size = oracles.pair_magnitude(wanted, 8, interleaved=True)
        assert_within_ulps(rope.rotate(x, position_ids=at), wanted, 1.0, size)

    def test_tables_are_stored_row_by_row(self):
        """A kernel would copy all of a table that is not, at every call."""
        for rope in (
            RoPE(16, 64, axes=axes.Sections((4, 2, 2))),
            RoPE(16, 64, axes=axes.Axial(2)),
            RoPE(16, 64, axes=axes.Axial((4, 12))),
        ):
            made = rope.tables(torch.arange(9))
            assert all(t.is_contiguous() for t in (rope.cos_cached, rope.sin_cached, *made))

    def test_coordinates_of_one_sequence_serve_all(self):
        x = torch.randn(2, 3, 7, 16)
        for rope, at in (
            (RoPE(16, 64), torch.arange(7) * 1.5),
            (
                RoPE(16, None, scaling=scaling.DynamicNTK(2.0, original_length=4)),
                torch.arange(7) * 1.5,
            ),
            (RoPE(16, 64, axes=axes.Sections((4, 2, 2))), self.at),
        ):
            wanted = rope.rotate(x, position_ids=at)
            assert torch.equal(rope.rotate(x, position_ids=at.unsqueeze(-2)), wanted)
            assert torch.equal(rope(x, x, position_ids=at.unsqueeze(-2))[1], wanted)

    def test_keys_with_coordinates_move(self):
        rope, k = RoPE(16, 64, axes=axes.Sections((4, 2, 2))), torch.randn(1, 1, 7, 16)
        moved = rope.rerotate(rope.rotate(k, position_ids=self.at), self.at, self.at + 9)
        assert torch.allclose(moved, rope.rotate(k, position_ids=self.at + 9), atol=1e-6)
        moved = rope.shift(rope.rotate(k, position_ids=self.at), 9)
        assert torch.allclose(moved, rope.rotate(k, position_ids=self.at + 9), atol=1e-6)

    def test_shapes_that_do_not_fit_are_refused(self):
        rope, x = RoPE(16, 64, axes=axes.Sections((4, 2, 2))), torch.randn(2, 1, 7, 16)
        with pytest.raises(ValueError, match=r"of shape \(3, 7\) or \(3, 2, 7\)"):
            rope.rotate(x, position_ids=torch.zeros(2, 7).long())
        # The ids of a pipeline of diffusers are ``(L, 3)``.
        with pytest.raises(ValueError, match=r"Pass position_ids\.T: coordinates come first"):
            rope.rotate(x, position_ids=torch.zeros(7, 3))
        with pytest.raises(ValueError, match="add up to 8 pairs"):
            RoPE(16, axes=axes.Sections((4, 4, 4)))
        with pytest.raises(ValueError, match="multiple of 6"):
            RoPE(16, axes=axes.Axial(3))
        with pytest.raises(ValueError, match=r"4 \+ 16 = 20"):
            RoPE(16, axes=axes.Axial((4, 16)))
        with pytest.raises(ValueError, match="must be even"):
            axes.Axial((5, 11))
        with pytest.raises(ValueError, match="an int, or the channels of each"):
            axes.Axial(())
        with pytest.raises(ValueError, match=r"an int if rates are shared.*\n.*Sections"):
            axes.Axial((4, 12), rates="shared")


@pytest.mark.parametrize("base", [10_000.0, 256.0], ids=["flux", "hunyuan-video"])
@pytest.mark.parametrize("widths", [(16, 56, 56), (44, 42, 42), (2, 126)], ids=str)
def test_unequal_widths_have_rates_of_their_own(widths, base):
    """Against mpmath, up to the last position, in whichever direction."""
    rope = RoPE(128, None, base, axes=axes.Axial(widths))
    at = torch.tensor([[0, 1, 7, 2**31], [0, 5, -3, 12345], [0, 2, -(2**31), 9]])[: len(widths)]
    cos, sin = rope.tables(at)
    first = 0
    for line, width in zip(at, widths, strict=True):
        for i in (0, width // 4, width // 2 - 1):
            wanted = [oracles.angle(int(p), i, width, base) for p in line]
            column = slice(first + i, first + i + 1)
            got = torch.cat((cos[:, column], sin[:, column]), dim=1)
            exact = [[float(mpmath.cos(phi)), float(mpmath.sin(phi))] for phi in wanted]
            assert (got - torch.tensor(exact, dtype=torch.float64)).abs().max() < 1.5e-15
        first += width // 2


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_a_rule_scales_each_coordinate_by_its_own_width(rule):
    """YaRN and NTK depend on d, and so does where they begin to slow down."""
    whole = RoPE(32, None, axes=axes.Axial((8, 24)), scaling=rule)
    parts = RoPE(8, None, scaling=rule), RoPE(24, None, scaling=rule)
    for length in (None, 40):
        wanted = torch.cat([part.scaled_inv_freq(length) for part in parts])
        assert torch.equal(whole.scaled_inv_freq(length), wanted)
    at = positions.grid(5, 9)
    x = torch.randn(2, 3, 45, 32)
    lengths = torch.tensor([40, 400])
    cos, _ = whole.tables(at[:, None].expand(2, 2, 45), seq_len=lengths)
    lines = zip(parts, at, strict=True)
    wanted = [part.tables(line.expand(2, 45), seq_len=lengths)[0] for part, line in lines]
    assert torch.equal(cos, torch.cat(wanted, dim=-1))
    assert whole.rotate(x, position_ids=at).shape == x.shape


def test_factors_of_each_pair_are_for_one_range():
    rule = scaling.LongRoPE((1.0,) * 16, long_factor=(2.0,) * 16, original_length=64)
    with pytest.raises(ValueError, match="short_factor and long_factor must have 4 numbers"):
        RoPE(32, None, axes=axes.Axial((8, 24)), scaling=rule)


def test_coordinates_may_be_negative():
    """Qwen-Image counts rows and columns from the middle."""
    rope, x = RoPE(16, 64, axes=axes.Axial((4, 12))), torch.randn(1, 2, 6, 16)
    at = positions.grid(2, 3) - torch.tensor([[1], [2]])
    whole = rope.rotate(x, position_ids=at)
    assert torch.allclose(rope.rotate(x, position_ids=at.double()), whole, atol=1e-6)
    back = rope.rotate(whole, position_ids=-at)
    assert torch.allclose(back, x, atol=1e-6)


def test_the_limit_holds_for_coordinates_too():
    x, far = torch.randn(1, 1, 4, 8), torch.arange(4) + 100
    rope, planar = RoPE(8, 16), RoPE(8, 16, axes=axes.Axial(2))
    for call in (
        lambda: planar.rotate(x, position_ids=torch.stack((far, far))),
        lambda: rope.rerotate(x, far, far),
        lambda: rope.tables(far),
        lambda: rope.rotate(x, position_ids=far.double()),
        lambda: rope.rotate(x, position_ids=torch.tensor([0.0, 1.0, 2.0, float("nan")])),
    ):
        with pytest.raises(ValueError, match="below max_seq_len=16"):
            call()
    assert rope.rotate(x, position_ids=torch.arange(4.0) - 2).shape == x.shape


def test_an_image_needs_position_ids():
    rope, x = RoPE(8, axes=axes.Axial(2)), torch.randn(1, 1, 4, 8)
    for call in (lambda: rope.rotate(x), lambda: rope(x, x), lambda: rope.rotate(x, 3)):
        with pytest.raises(
            ValueError, match=r"position_ids must be given, because Axial.*\n.*grid"
        ):
            call()
    # Whoever wants the diagonal says so.
    diagonal = rope.rotate(x, position_ids=torch.arange(4))
    assert torch.equal(diagonal, rope.rotate(x, position_ids=torch.arange(4).expand(2, -1)))


@pytest.mark.parametrize("make", [positions.grid, positions.normalized_grid])
def test_sizes_of_a_grid_are_numbers(make):
    with pytest.raises(TypeError, match=rf"Call {make.__name__}\(\*sizes\)"):
        make((4, 6))


def test_axes_compile_whole():
    """A word among the fields of an axis is a constant to the compiler, as its numbers are."""
    kinds = axes.Axial(2), axes.Axial(2, "shared"), axes.Axial((4, 12))
    ropes = [RoPE(16, 64, axes=kind) for kind in kinds]
    q, ids = torch.randn(1, 2, 6, 16), positions.grid(2, 3)

    def rotated(q, ids):
        return torch.stack([rope.rotate(q, position_ids=ids) for rope in ropes])

    compiled = torch.compile(rotated, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, ids), rotated(q, ids))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_has_too_few_digits_for_positions(dtype):
    """bfloat16 has no 257."""
    q = torch.randn(1, 2, 16, 8)
    with pytest.raises(TypeError, match="an integer, float32 or float64 tensor"):
        RoPE(8, None)(q, q, position_ids=torch.arange(16).to(dtype))
