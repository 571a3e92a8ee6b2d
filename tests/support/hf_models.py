"""Small random models of transformers, built from config classes: nothing is downloaded."""

import re
import sys

import pytest
import torch
import transformers

knows_all_families = pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 22),
    reason="older releases of transformers lack some of the families",
)

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 99,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
SMALL = {**SIZES, "num_key_value_heads": 2}
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
        for parameter in model.parameters():
            if parameter.dim() > 1:
                # Fresh weights make attention flat, which would hide a wrong rotation.
                parameter.normal_(0, parameter[0].numel() ** -0.5)
            else:
                # Away from zeros and ones, or norms and biases would not show.
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def build(family, sizes):
    return tiny(f"{family}ForCausalLM", **{**SIZES, **sizes})


def llama(**changes):
    return tiny("LlamaForCausalLM", **{**SMALL, **changes})


def tokens(batch=2, length=9):
    return torch.randint(1, 99, (batch, length), generator=torch.Generator().manual_seed(1))


def apart(a, b):
    return ((a - b).abs().max() / a.abs().max()).item()


class Calls:
    """Names of the rotating functions of transformers or diffusers that run."""

    def __init__(self, pattern="rotary_(pos|emb)|rotate_"):
        self.pattern, self.names = pattern, set()

    def __enter__(self):
        sys.setprofile(self.see)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)

    def see(self, frame, event, _):
        code = frame.f_code
        of_model = re.search("modeling_|diffusers", code.co_filename)
        # A function that was rebuilt calls one of ours.
        ours = any(name.startswith("_posenc_") for name in code.co_names)
        if event == "call" and of_model and not ours and re.search(self.pattern, code.co_name):
            self.names.add(code.co_name)


def load(family, folder):
    return getattr(transformers, f"{family}ForCausalLM").from_pretrained(folder).eval()


class OwnNorms:
    """Those of ``norms`` whose own forward runs."""

    def __init__(self, norms):
        self.norms, self.ran = norms, []
        self.codes = {type(one).forward.__code__ for one in self.norms}

    def __enter__(self):
        sys.setprofile(self.see)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)

    def see(self, frame, event, _):
        if event == "call" and frame.f_code in self.codes:
            one = frame.f_locals["self"]
            self.ran += [one] * any(one is norm for norm in self.norms)
