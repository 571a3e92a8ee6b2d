"""Small random models of transformers, for the tests that patch them."""

import re
import sys

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
VISION = {
    "depth": 2,
    "num_heads": 4,
    "hidden_size": 64,
    "intermediate_size": 64,
    "out_hidden_size": 64,
    "patch_size": 4,
    "temporal_patch_size": 1,
    "deepstack_visual_indexes": [],
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


class Calls:
    """Names of the rotating functions of transformers that run."""

    def __enter__(self):
        self.names = set()
        sys.setprofile(self.see)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)

    def see(self, frame, event, _):
        code = frame.f_code
        turns = re.search("rotary_(pos|emb)|rotate_", code.co_name)
        if event == "call" and turns and "modeling_" in code.co_filename:
            self.names.add(code.co_name)
