"""Small random models of transformers, for the tests that patch them."""

import pytest
import torch
import transformers

knows_all_families = pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 22),
    reason="older releases of transformers lack some of the families",
)

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 99,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


def tiny(name, **changes):
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**changes)).eval()
    with torch.no_grad():
        # Fresh weights are so small that attention is flat, and would hide a wrong rotation.
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, parameter[0].numel() ** -0.5)
    return model


def llama(**changes):
    return tiny("LlamaForCausalLM", **{**SMALL, **changes})


def tokens(batch=2, length=9):
    return torch.randint(1, 99, (batch, length), generator=torch.Generator().manual_seed(1))


def apart(a, b):
    return ((a - b).abs().max() / a.abs().max()).item()
