"""Tiny models of transformers' families, built from config classes: nothing is downloaded."""

from __future__ import annotations

import importlib

import torch
import transformers

import posenc

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
}
GQA = {"num_key_value_heads": 2, "head_dim": 16}
LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
# Name: the family, its sizes, and the layout that its own code reads.
FAMILIES = {
    "llama": ("Llama", GQA, "half"),
    "qwen2-biases": ("Qwen2", {"num_key_value_heads": 2}, "half"),
    "qwen3-head-norms": ("Qwen3", GQA, "half"),
    "olmo2-whole-norms": ("Olmo2", {"num_key_value_heads": 2}, "half"),
    "gpt-neox-grouped-partial": ("GPTNeoX", {}, "half"),
    "falcon-multi-query": ("Falcon", {}, "half"),
    "falcon-groups": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}, "half"),
    "phi3-fused": ("Phi3", {"num_key_value_heads": 2}, "half"),
    "glm-partial": ("Glm", GQA, "interleaved"),
    "cohere-norms": ("Cohere", {"num_key_value_heads": 2, "use_qk_norm": True}, "interleaved"),
}


def build(family, sizes):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES, **sizes)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Away from the zeros and ones of a fresh model, or norms and biases would not show.
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def logits(model):
    tokens = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(input_ids=tokens).logits


def load(family, folder):
    return getattr(transformers, f"{family}ForCausalLM").from_pretrained(folder).eval()


def rotate_in(monkeypatch, model, layout):
    """Make the model's attention rotate in this layout, whatever its own is."""

    def apply(q, k, cos, sin, *rest, **more):
        pairs = cos.shape[-1] // 2
        # The models double their tables: halves side by side, or each angle twice.
        pick = (
            slice(pairs) if torch.equal(cos[..., :pairs], cos[..., pairs:]) else slice(0, None, 2)
        )
        tables = (t[..., pick].expand(q.shape[0], -1, -1) for t in (cos, sin))
        return posenc.functional.rotate_qk(q, k, *tables, interleaved=layout == "interleaved")

    module = importlib.import_module(type(model).__module__)
    monkeypatch.setattr(module, "apply_rotary_pos_emb", apply)
