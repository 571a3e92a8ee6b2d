"""Rotary modules of patched models: exact tables, and the rules that made them."""

import math

import pytest
import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from hf_models import apart, llama, tokens
from posenc.interop.huggingface import patch, patched
from posenc.interop.huggingface.tables import forward_for


def test_tables_are_exact_where_those_of_the_model_are_not():
    """At a million a float32 angle is off by thousandths of a radian, or more."""
    model = llama(max_position_embeddings=2**20)
    at = torch.tensor([[0, 1, 4097, 131_071, 1_000_003]])
    rates = [10_000.0 ** (-2 * i / 16) for i in range(8)]
    exact = torch.tensor([[math.cos(p * rate) for rate in rates] for p in at[0].tolist()])
    x = torch.zeros(1)
    before = model.model.rotary_emb(x, at)[0][0, :, :8]
    patch(model)

    cos = model.model.rotary_emb(x, at)[0][0]

    assert (cos[:, :8] - exact).abs().max() < 1e-7
    assert torch.equal(cos[:, 8:], cos[:, :8])
    assert (before - exact).abs().max() > 1e-3


def test_tables_outlive_a_cast_of_the_model():
    """Casting rounds the model's own rates to halves; the patch does not read them."""
    model = llama()
    patch(model)
    x, at = torch.zeros(1), torch.arange(64)[None]
    expected = model.model.rotary_emb(x, at)

    model.to(torch.float16)
    got = model.model.rotary_emb(x.half(), at)

    assert all(map(torch.equal, got, expected))
    logits = model(tokens()).logits
    assert logits.dtype == torch.float16
    assert logits.isfinite().all()


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
    """The rates of dynamic and longrope change with the length, in the module's own code."""
    rope = {"rope_type": rule, "rope_theta": 10_000.0, **SCALED[rule]}
    longest = 16 if rule == "dynamic" else 64
    model = llama(rope_parameters=rope, max_position_embeddings=longest)
    lengths = (9, 40, 9)
    expected = [model(tokens(length=length)).logits for length in lengths]

    with patched(model) as report:
        got = [model(tokens(length=length)).logits for length in lengths]

    own = rule in ("dynamic", "longrope")
    assert report.tables[0].rates == ("its own" if own else "from the config")
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


class OfLength(AsBefore):
    """One that turns long sequences by other angles than short ones."""

    def forward(self, x, position_ids):
        angles = position_ids[:, :, None].float() * self.inv_freq.to(device=x.device)
        angles = angles if position_ids.shape[-1] < 4096 else angles.float().expand(-1, -1, -1)
        both = torch.cat((angles, angles), dim=-1)
        return both.cos() * self.attention_scaling, both.sin() * self.attention_scaling


def test_modules_may_ask_for_the_number_of_sequences_and_for_no_length():
    config = LlamaConfig(hidden_size=64, num_attention_heads=4)
    module = AsBefore(config)
    form, rates, ours = forward_for(module)
    assert (form, rates) == ("doubled", "from the config")
    at = torch.tensor([[3, 1_000_003], [2, 4097]])
    exact = torch.tensor(
        [[[math.cos(p * 1e4 ** (-i / 8)) for i in range(8)] for p in row] for row in at.tolist()]
    )
    assert (ours(module, torch.zeros(1), at)[0][..., :8] - exact).abs().max() < 1e-7
    assert forward_for(OfLength(config)) is None
    assert forward_for(nn.Identity()) is None
