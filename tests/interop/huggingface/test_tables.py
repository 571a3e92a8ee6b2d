"""Rotary modules of patched models: exact tables, and the rules that made them."""

import math
import warnings

import pytest
import torch
from transformers import PixtralVisionConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.pixtral.modeling_pixtral import PixtralVisionRotaryEmbedding

from posenc.interop.huggingface import patch, patched
from support.hf_models import SMALL, VISION, apart, llama, tiny, tokens
from support.processes import assert_passed, run


def exact_cosines(at, pairs=8, base=1e4):
    rates = [base ** (-i / pairs) for i in range(pairs)]
    rows = [[math.cos(p * rate) for rate in rates] for p in at.flatten().tolist()]
    return torch.tensor(rows).view(*at.shape, pairs)


def assert_exact(model):
    """At a million, rates in float32 are off by thousandths of a radian, in halves by radians."""
    at = torch.tensor([[0, 1, 4097, 131_071, 1_000_003]])
    cos = model.model.rotary_emb(torch.zeros(1), at)[0]
    assert (cos[..., :8] - exact_cosines(at)).abs().max() < 1e-7
    assert torch.equal(cos[..., 8:], cos[..., :8])


def test_tables_are_exact_where_those_of_the_model_are_not():
    model = llama()
    with pytest.raises(AssertionError):
        assert_exact(model)
    patch(model)
    assert_exact(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("first", ["cast", "patch"])
def test_a_cast_of_the_model_changes_no_table(first, dtype):
    """It rounds the rates in the module's buffer, and the config has them whole."""
    model = llama()
    if first == "cast":
        model.to(dtype)
    report = patch(model)
    model.to(dtype)

    assert report.tables[0].rates == "from the config"
    assert_exact(model)
    logits = model(tokens()).logits
    assert logits.dtype == dtype
    assert logits.isfinite().all()


def test_tables_of_a_model_that_was_patched_on_the_meta_device_are_exact():
    """Neither `to_empty` nor loading gives a buffer that is not saved its numbers."""
    plain = llama()
    with torch.device("meta"):
        model = llama()
    report = patch(model)
    model.to_empty(device="cpu")
    for buffer in model.buffers():
        buffer.fill_(torch.nan)
    model.load_state_dict(plain.state_dict())

    assert report.tables[0].rates == "from the config"
    assert_exact(model)
    assert apart(plain(tokens()).logits, model(tokens()).logits) < 2e-5


SCALED = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "longrope": {
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 16,
        "factor": 4.0,
    },
}


@pytest.mark.parametrize("rule", SCALED)
def test_scaling_rules_keep_their_meaning_short_then_long_then_short(rule):
    """The rates of dynamic and longrope change with the length, as the module's own code says."""
    rope = {"rope_type": rule, "rope_theta": 10_000.0, **SCALED[rule]}
    longest = 16 if rule == "dynamic" else 64
    model = llama(rope_parameters=rope, max_position_embeddings=longest)
    lengths = (9, 40, 9)
    expected = [model(tokens(length=length)).logits for length in lengths]

    with patched(model) as report:
        got = [model(tokens(length=length)).logits for length in lengths]

    assert report.tables[0].rates == "from the config"
    for a, b in zip(expected, got, strict=True):
        assert apart(a, b) < 2e-5
    again = [model(tokens(length=length)).logits for length in lengths]
    assert all(map(torch.equal, again, expected))


class AsBefore(LlamaRotaryEmbedding):
    """One that asks for the number of sequences, as all did before transformers 5.18."""

    def forward(self, x, position_ids):
        rates = self.inv_freq[None, None].expand(position_ids.shape[0], -1, -1)
        angles = position_ids[:, :, None].float() @ rates.to(device=x.device)
        both = torch.cat((angles, angles), dim=-1)
        return both.cos() * self.attention_scaling, both.sin() * self.attention_scaling


class OfLength(LlamaRotaryEmbedding):
    """One that turns long sequences by other angles than short ones."""

    def forward(self, x, position_ids):
        angles = position_ids[:, :, None].float() * self.inv_freq.to(device=x.device)
        both = torch.cat((angles, angles), dim=-1) / (1 if position_ids.shape[-1] < 2048 else 4)
        return both.cos() * self.attention_scaling, both.sin() * self.attention_scaling


class Loaded(LlamaRotaryEmbedding):
    """One that turns as the others do until a checkpoint fills it, as Mistral Large 4's."""

    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("speed", torch.ones(()))

    def forward(self, x, position_ids):
        return super().forward(x, position_ids * self.speed)


class Slower(LlamaRotaryEmbedding):
    """One whose rates depend on more than the config."""

    def __init__(self, config, speed=0.5):
        super().__init__(config)
        self.inv_freq = self.inv_freq * speed


CONFIG, OWN = "from the config", "its own"


@pytest.mark.parametrize(
    ("kind", "form", "rates"),
    [
        (AsBefore, "doubled", CONFIG),
        (Slower, "doubled", OWN),
        (OfLength, "unchanged", OWN),
        (Loaded, "unchanged", OWN),
    ],
)
def test_a_rotary_module_is_known_by_what_it_does(kind, form, rates):
    model = llama()
    model.model.rotary_emb = kind(model.config)
    expected = model(tokens()).logits

    report = patch(model)

    assert [(t.form, t.rates) for t in report.tables] == [(form, rates)]
    assert apart(expected, model(tokens()).logits) < 2e-5


@pytest.mark.slow
def test_a_model_that_was_patched_on_the_meta_device_has_its_rates_on_every_rank(tmp_path):
    assert_passed(run(2, "support.hf_fsdp:patched_on_meta", tmp_path))


SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}


@pytest.mark.parametrize("family", ["Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Glm4v"])
def test_models_with_sections_are_patched_on_the_meta_device(family):
    """There are no numbers there to compare, but the class makes others of the same config."""
    changes = {**SMALL, "head_dim": 16, "rope_parameters": SECTIONS}
    plain = tiny(f"{family}TextModel", **changes)
    with torch.device("meta"):
        model = tiny(f"{family}TextModel", **changes)
    report = patch(model)
    model.to_empty(device="cpu").load_state_dict(plain.state_dict())

    assert [(t.form, t.rates) for t in report.tables] == [("recomposed", "from the config")]
    expected = plain(tokens()).last_hidden_state
    assert apart(expected, model(tokens()).last_hidden_state) < 2e-5


@pytest.mark.parametrize("rule", ["dynamic", "longrope"])
def test_rates_that_follow_the_length_outlive_a_cast(rule):
    """They come from the config at each length, not from the buffers that were rounded."""
    rope = {"rope_type": rule, "rope_theta": 10_000.0, **SCALED[rule]}
    whole, cast = (
        llama(rope_parameters=rope, max_position_embeddings=16 if rule == "dynamic" else 64)
        for _ in range(2)
    )
    cast.bfloat16()
    patch(whole)
    patch(cast)
    x = torch.zeros(1)
    for length in (9, 40, 9):
        at = torch.arange(length)[None]
        got = cast.model.rotary_emb(x, at), whole.model.rotary_emb(x, at)
        assert all(map(torch.equal, *got))
    assert cast.model.rotary_emb.original_inv_freq.dtype == torch.bfloat16


def test_the_rates_of_a_vision_tower_come_from_its_config():
    model = tiny("Qwen3VLVisionModel", **VISION).bfloat16()
    report = patch(model)
    assert [t.rates for t in report.tables] == ["from the config"]
    at = torch.tensor([[3, 900]])
    cos = model.rotary_pos_emb(torch.zeros(1), at)[0]
    assert (cos.flatten()[:8] - exact_cosines(at, pairs=4).flatten()).abs().max() < 1e-7


def test_rates_in_an_order_of_their_own_come_from_the_config_too():
    """Pixtral's module has the even rates first, for the rows, and then the odd ones."""
    config = PixtralVisionConfig(hidden_size=64, num_attention_heads=4, head_dim=16)
    module = PixtralVisionRotaryEmbedding(config).bfloat16()
    report = patch(module)
    assert report.tables[0].rates == "from the config"
    cos, _ = module(torch.zeros(1), torch.tensor([[3, 900]]))
    rows, columns = exact_cosines(torch.tensor([3, 900]))
    exact = torch.cat((rows[::2], columns[1::2]))
    assert (cos.flatten()[:8] - exact).abs().max() < 1e-7


DINOV3 = {**SMALL, "image_size": 32, "patch_size": 8, "num_register_tokens": 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_dinov3_is_patched_without_a_warning(dtype):
    """Its rates are its own by design: coordinates are fractions of the image, in float32."""
    model = tiny("DINOv3ViTModel", **DINOV3).to(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = patch(model)
    assert [(t.form, t.rates) for t in report.tables] == [("unchanged", "its own")]


@pytest.mark.parametrize("fill", ["edited", "emptied"])
def test_a_buffer_with_other_rates_than_the_config_is_warned_of(fill):
    """The config wins: `to_empty` leaves any numbers there, and an edit is lost with a warning."""
    model = llama()
    if fill == "edited":
        model.model.rotary_emb.inv_freq /= 4
    else:
        model.model.rotary_emb.inv_freq.fill_(float("nan"))
    with pytest.warns(UserWarning, match=r"others in model\.rotary_emb .*\n  Write them into"):
        patch(model)
    assert_exact(model)
