"""Small random models of transformers with ALiBi or T5's buckets, and what to run on them."""

import pytest
import torch

from support.hf_models import tiny, tokens

# Six heads: not a power of two, where the models' slopes differ.
ALIBI = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "vocab_size": 99}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 99}
T5 |= {"decoder_start_token_id": 0, "dropout_rate": 0.0}
# Distances past the last bucket are among 40 tokens.
T5 |= {"relative_attention_num_buckets": 12, "relative_attention_max_distance": 20}
FALCON = {**ALIBI, "alibi": True}
GROUPS = {"new_decoder_architecture": True, "num_kv_heads": 2}
FAMILIES = {
    "bloom": ("BloomForCausalLM", ALIBI),
    "mpt": ("MptForCausalLM", {**ALIBI, "max_seq_len": 64}),
    "falcon-multi-query": ("FalconForCausalLM", FALCON),
    "falcon-groups": ("FalconForCausalLM", {**FALCON, **GROUPS}),
    "falcon-all-heads": ("FalconForCausalLM", {**FALCON, "multi_query": False}),
    "t5": ("T5ForConditionalGeneration", T5),
    "mt5": ("MT5ForConditionalGeneration", T5),
    # With SDPA and no padding, transformers 5.17 lets UMT5's decoder see later tokens.
    "umt5": ("UMT5ForConditionalGeneration", {**T5, "attn_implementation": "eager"}),
}
DECODERS = ["bloom", "mpt", "falcon-groups"]


def rarely(names, *often):
    """The families with those but ``often`` in make test-all alone."""
    slow = pytest.mark.slow
    return [name if name in often else pytest.param(name, marks=slow) for name in names]


def build(family):
    name, changes = FAMILIES[family]
    return tiny(name, **changes)


def padding(batch=3, length=40):
    """None, some on the left, some on the right."""
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[1, :5], mask[2, -9:] = 0, 0
    return mask


def inputs(model, length=40):
    ids, mask = tokens(3, length), padding(3, length)
    given = {"input_ids": ids, "attention_mask": mask}
    if model.config.is_encoder_decoder:
        # More queries than keys in the attention to the encoder.
        given |= {"input_ids": ids[:, :30], "attention_mask": mask[:, :30].roll(2, 0)}
        given |= {"decoder_input_ids": ids, "decoder_attention_mask": mask}
    return given, mask.bool()


def run(model, length=40):
    """Logits of the tokens that are not padding, and the gradient of every parameter."""
    model.zero_grad()
    given, real = inputs(model, length)
    logits = model(**given).logits[real]
    (logits * torch.linspace(-1, 1, logits.numel()).view(logits.shape)).sum().backward()
    return logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}
