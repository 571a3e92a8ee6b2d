"""Norms of queries and keys that a patched model computes together with the rotation."""

import importlib

import pytest
import torch
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from posenc.interop.huggingface import patch, patched, unpatch
from posenc.interop.huggingface.rotation import NormCall, Pending
from support.hf_models import GQA, LATENT, SMALL, OwnNorms, apart, tiny, tokens

EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
EXPERTS |= {"moe_intermediate_size": 32, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
HEADS = {**SMALL, **GQA}
LAYERS = ["sliding_attention", "full_attention"]

# `tools/models` drives the others. Those of Olmo 2 are over all heads, those of Gemma are 1 + w.
FAMILIES = {"Qwen3Model": HEADS, "Gemma3TextModel": HEADS, "Olmo2Model": SMALL}


def run(model):
    """Output, and the gradient of every parameter by its name."""
    model.zero_grad()
    out = model(tokens()).last_hidden_state
    (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)).sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return out.detach(), grads


def qk_norms(model):
    ends = ("q_norm", "k_norm", "q_layernorm", "k_layernorm")
    return [one for name, one in model.named_modules() if name.endswith(ends)]


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_gradients_stay_and_the_norms_do_not_run_on_their_own(family):
    """One kernel owes the model float32 rounding only, in the gradients of its weights as well."""
    model = tiny(family, **FAMILIES[family]).train()
    with OwnNorms(qk_norms(model)) as before:
        out, gradients = run(model)
    keys = list(model.state_dict())

    report = patch(model)
    with OwnNorms(qk_norms(model)) as after:
        ours, our_gradients = run(model)

    paths = [f"{row.module}.{name}" for row in report.norms for name in row.fused]
    fused = {model.get_submodule(path) for path in paths}
    assert set(before.ran) == set(before.norms)
    assert set(after.ran) == set(before.norms) - fused
    assert len(fused) == len(before.norms)
    assert list(model.state_dict()) == keys
    assert apart(out, ours) < 2e-5
    assert gradients.keys() == our_gradients.keys()
    top = max(g.abs().max() for g in gradients.values())
    gaps = {name: (g - our_gradients[name]).abs().max() for name, g in gradients.items()}
    assert max(gaps.values()) < 2e-5 * top
    unpatch(model)
    assert torch.equal(model(tokens()).last_hidden_state, out)


def test_the_report_names_the_norms_and_fuse_false_leaves_them_alone():
    model = tiny("Qwen3Model", **HEADS)
    with patched(model) as report:
        assert [(row.module, row.cls, row.fused, row.others) for row in report.norms] == [
            (f"layers.{i}.self_attn", "Qwen3Attention", ("q_norm", "k_norm"), ()) for i in (0, 1)
        ]
        assert "self_attn (Qwen3Attention): norms [q_norm, k_norm fused]" in str(report)
    with patched(model, fuse=False) as report, OwnNorms(qk_norms(model)) as own:
        model(tokens())
        assert report.norms == ()
        assert len(own.ran) == 4
    with pytest.raises(TypeError, match="fuse must be"):
        patch(model, fuse="no")


OTHERS = {
    "layer-norm": ("CohereModel", {**SMALL, "use_qk_norm": True}, "q_norm", "no RMSNorm"),
    "after-the-rotation": ("HunYuanDenseV1Model", HEADS, "query_layernorm", "no rotation took"),
    "without-weights": ("Llama4TextModel", {**HEADS, **EXPERTS}, "qk_norm", "no RMSNorm"),
    "rotated-in-some-calls": (
        "OlmoHybridModel",
        {**SMALL, "layer_types": ["linear_attention", "full_attention"]},
        "q_norm",
        "no rotation took",
    ),
    "of-latents": (
        "DeepseekV3Model",
        {**SMALL, **LATENT, "num_key_value_heads": 4},
        "kv_a_layernorm",
        "no rotation took",
    ),
    "clamped-in-place": (
        "OlmoeModel",
        {**SMALL, **EXPERTS, "clip_qkv": 0.5},
        "q_norm",
        "no rotation took",
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_a_norm_of_another_kind_or_at_another_place_is_left_alone(case):
    name, changes, norm, why = OTHERS[case]
    model = tiny(name, **changes)
    expected = model(tokens())[0]

    report = patch(model)

    assert not any(row.fused for row in report.norms)
    assert why in dict(report.norms[0].others)[norm]
    assert apart(expected, model(tokens())[0]) < 2e-5


def test_a_layer_that_does_not_rotate_still_normalises():
    """Exaone 4 rotates only in its sliding layers, in the code of one class."""
    changes = {**HEADS, "sliding_window": 4, "layer_types": LAYERS}
    model = tiny("Exaone4Model", **changes)
    expected = model(tokens())[0]

    report = patch(model)

    assert [row.fused for row in report.norms] == [("q_norm", "k_norm"), ()]
    assert apart(expected, model(tokens())[0]) < 2e-5


def test_a_hook_on_a_norm_gets_the_tensor_that_the_model_computes():
    """Whether it was registered before the patch, or after."""
    model, seen = tiny("Qwen3Model", **HEADS), []
    first, second = (layer.self_attn.q_norm for layer in model.layers)
    for one in (first, second):
        one.register_forward_hook(lambda module, args, out: seen.append(out.detach()))
    model(tokens())
    hooks = dict(second._forward_hooks)
    second._forward_hooks.clear()

    report = patch(model)
    second._forward_hooks.update(hooks)
    model(tokens())

    assert dict(report.norms[0].others).keys() == {"q_norm"}
    assert report.norms[1].fused == ("q_norm", "k_norm")
    assert torch.equal(seen[0], seen[2])
    assert apart(seen[1], seen[3]) < 2e-5


@pytest.mark.parametrize(("family", "roundings"), [("Qwen3Model", 4), ("Gemma3TextModel", 3)])
def test_in_bfloat16_fused_and_not_differ_by_their_roundings(monkeypatch, family, roundings):
    """The budget, for a pair of length r and unit roundoff u = 2^-8.

    Ours rounds once: u r. The model rounds its result after the norm (Qwen3 also before it
    multiplies by the weight), which moves a rotated number by u r for each, and after the rotation.
    """
    model = tiny(
        family, **{**HEADS, "num_hidden_layers": 1, "attn_implementation": "eager"}
    ).bfloat16()
    attention, made, projected = model.layers[0].self_attn, [], []
    module = importlib.import_module(type(model).__module__)
    theirs = module.eager_attention_forward

    def spy(layer, q, k, *args, **kwargs):
        made.append((q.double(), k.double()))
        return theirs(layer, q, k, *args, **kwargs)

    monkeypatch.setattr(module, "eager_attention_forward", spy)
    for linear in (attention.q_proj, attention.k_proj):
        linear.register_forward_hook(lambda one, args, out: projected.append(out.double()))
    with torch.no_grad():
        for fuse in (True, False):
            with patched(model, fuse=fuse):
                model(tokens())

    u = 2.0**-8
    both = (attention.q_norm, attention.k_norm)
    for norm, x, ours, alone in zip(both, projected[:2], *made, strict=True):
        weight = norm.weight.detach().double() + (family == "Gemma3TextModel")
        x = x.unflatten(-1, (-1, 16)).transpose(1, 2)
        y = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
        # A rotation keeps the length of a pair.
        r = torch.hypot(*y.chunk(2, dim=-1))
        near = 1 + 2.0**-5  # products of roundings, and float32
        assert ((torch.hypot(*ours.chunk(2, dim=-1)) - r).abs() <= 2**0.5 * u * near * r).all()
        gap = (ours - alone).abs()
        assert gap.max() > 0
        assert (gap <= roundings * u * near * r.repeat(1, 1, 1, 2)).all()


def test_under_autocast_the_norms_of_float32_weights_run_on_their_own():
    """Their result is float32, while a kernel for bfloat16 would give bfloat16."""
    model = tiny("Qwen3Model", **HEADS)
    results = []
    for fuse in (True, False):
        with patched(model, fuse=fuse), torch.autocast("cpu", torch.bfloat16):
            results.append(model(tokens()).last_hidden_state)
    assert torch.equal(*results)


class Packed(nn.Module):
    """As a quantised or adapted layer: a linear one whose weight cannot run on another device."""

    def __init__(self, linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)
        self.kept = [linear]

    def forward(self, x):
        return self.kept[0](x)


def test_quantised_projections_do_not_hide_a_norm():
    model = tiny("Qwen3Model", **HEADS)
    for layer in model.layers:
        layer.self_attn.q_proj = Packed(layer.self_attn.q_proj)
    expected = model(tokens())[0]

    report = patch(model)

    assert [row.fused for row in report.norms] == [("q_norm", "k_norm")] * 2
    assert apart(expected, model(tokens())[0]) < 2e-5


def pending(*shape):
    """The result of a norm, computed and not."""
    torch.manual_seed(0)
    norm = Qwen3RMSNorm(shape[-1])
    nn.init.normal_(norm.weight)
    x = torch.randn(shape)
    return norm(x).detach(), Pending(NormCall(norm, x, norm.weight, 1e-6, 0.0), x)


OPERATIONS = {
    "transpose-of-rows": lambda x: x.transpose(-1, -2),
    "view-across-rows": lambda x: x.view(2, 5, 24),
    "multiply": lambda x: 2 * x * 3 - x / 2 + x**2,
    "index": lambda x: x[:, 1:, None],
    "concatenate": lambda x: torch.cat([x, x], dim=1),
    "keywords": lambda x: torch.add(input=x, other=x),
    "attribute": lambda x: x.mT.contiguous(),
    "in-place": lambda x: (x.clamp_(-0.5, 0.5), x.transpose(0, 1) + 0)[1],
    "split-heads-moved-then-joined": lambda x: x.view(2, 5, 3, 2, 4).transpose(1, 2).flatten(),
    "other-dtype": lambda x: x.to(torch.float64),
    "split-heads-and-then-channels": lambda x: x.unflatten(-1, (2, -1)).unflatten(-1, (2, -1)),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_between_norm_and_rotation_takes_the_result_of_the_norm(name):
    result, waiting = pending(2, 5, 3, 8)
    got, expected = OPERATIONS[name](waiting), OPERATIONS[name](result)
    assert torch.equal(got, expected)


VIEWS = {
    "heads-in-front": lambda x: x.transpose(1, 2),
    "split-heads": lambda x: x.unflatten(-1, (2, -1)),
    "split-batch": lambda x: x.unflatten(0, (1, 2)),
    "same-dtype": lambda x: x.to(torch.float32),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_still_waits_and_gives_what_the_view_of_the_result_has(name):
    result, waiting = pending(2, 5, 3, 8)
    got, expected = VIEWS[name](waiting), VIEWS[name](result)
    assert isinstance(got, Pending)
    assert got.shape == expected.shape
    assert torch.equal(got.tensor(), expected)


def test_a_kernel_that_is_no_torch_function_gets_the_result_or_an_error():
    """A pending result is no tensor with its input inside, which other code could read."""
    result, waiting = pending(2, 5, 3, 8)
    assert not isinstance(waiting, torch.Tensor)
    assert torch.equal(torch.ops.aten.neg.default(waiting), -result)
    assert waiting.data_ptr() != waiting.x.data_ptr()
