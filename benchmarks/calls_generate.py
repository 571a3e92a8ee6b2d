"""Models of transformers for calls.py, with random weights: one as it comes, and one patched."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from torch import Tensor

from posenc.interop.huggingface import patch

# New tokens, and those of the prompt.
TOKENS, PROMPT = 32, 32
SEQUENCES = {"cuda": 8, "cpu": 1}
# So small that the last layer takes hardly any time.
VOCABULARY = {"cuda": 1024, "cpu": 99}
TINY = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
TINY_ROTARY = {**TINY, "intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 16}

# The class, and its sizes: about 1 B parameters on CUDA, four narrow layers on the CPU.
FAMILIES: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "Llama": ("LlamaForCausalLM", {
        "cuda": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
                 "num_attention_heads": 32, "num_key_value_heads": 8},
        "cpu": TINY_ROTARY,
    }),
    "Qwen3": ("Qwen3ForCausalLM", {
        "cuda": {"hidden_size": 1536, "intermediate_size": 4608, "num_hidden_layers": 28,
                 "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
        "cpu": TINY_ROTARY,
    }),
    "Gemma 3": ("Gemma3ForCausalLM", {
        "cuda": {"hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26,
                 "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256},
        "cpu": TINY_ROTARY,
    }),
    "BLOOM": ("BloomForCausalLM", {
        "cuda": {"hidden_size": 1536, "num_hidden_layers": 24, "num_attention_heads": 16},
        "cpu": TINY,
    }),
    "MPT": ("MptForCausalLM", {
        "cuda": {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16},
        "cpu": TINY,
    }),
    "T5": ("T5ForConditionalGeneration", {
        "cuda": {"d_model": 1024, "d_kv": 64, "d_ff": 4096, "num_layers": 24, "num_heads": 16},
        "cpu": {"d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 4, "num_heads": 4},
    }),
}  # fmt: skip


class Pair:
    """Two models with the same weights, the second patched, and a prompt."""

    def __init__(self, family: str, device: str, dtype: torch.dtype) -> None:
        name, sizes = FAMILIES[family]
        kind = getattr(transformers, name)
        size = VOCABULARY[device]
        # With tied embeddings a random model repeats one token, wherever its tokens are.
        common = {"vocab_size": size, "tie_word_embeddings": False}
        common |= {"pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 1}
        config = kind.config_class(**common, **sizes[device])
        auto = transformers.AutoModelForCausalLM
        if config.is_encoder_decoder:
            auto = transformers.AutoModelForSeq2SeqLM
        torch.manual_seed(0)
        with torch.device(device):
            self.unpatched = auto.from_config(config, dtype=dtype).eval()
            self.prompt = torch.randint(2, size, (SEQUENCES[device], PROMPT))
        make_positions_count(self.unpatched)
        self.patched = copy.deepcopy(self.unpatched)
        patch(self.patched)
        self.layers = config.num_hidden_layers

    def generate(self, model: Any) -> Tensor:
        """Tokens, greedily; on CUDA the last of them is waited for."""
        tokens = model.generate(
            self.prompt,
            attention_mask=torch.ones_like(self.prompt),
            max_new_tokens=TOKENS,
            min_new_tokens=TOKENS,
            do_sample=False,
        )
        if tokens.is_cuda:
            torch.cuda.synchronize()
        return tokens


def make_positions_count(model: Any) -> None:
    """Draw larger weights: those of a fresh model make attention flat, whatever the positions."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, parameter[0].numel() ** -0.5)
