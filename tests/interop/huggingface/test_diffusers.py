"""Transformers of diffusers on our rotation; `tools/diffusion` writes a table of all of them."""

import copy
import gc
import pickle
import sys

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from posenc.interop.huggingface import patch, patched, unpatch

diffusers = pytest.importorskip("diffusers")

from support.diffusion import OWN_WARNINGS, noise, tiny  # noqa: E402
from support.hf_models import Calls, OwnNorms  # noqa: E402

pytestmark = OWN_WARNINGS

# Ways in which a processor finds its function, and forms of tables.
QUICK = {
    "FluxTransformer2DModel": "imported by the module, flags",
    "WanTransformer3DModel": "defined inside the processor",
    "CogVideoXTransformer3DModel": "imported inside the processor",
    "LTX2VideoTransformer3DModel, split": "before the heads are split",
}

ROTATING = "apply_r|apply_.*rotary_emb"


def run(model, given):
    """The output, and the gradient of every parameter."""
    model.zero_grad()
    out = model(**given, return_dict=False)[0]
    out = torch.stack(out) if isinstance(out, list) and len(out) == 1 else out
    out = torch.cat([x.flatten() for x in out])
    (out * torch.linspace(-1, 1, out.numel())).sum().backward()
    held = (p.grad for p in model.parameters() if p.grad is not None)
    return out.detach(), [gradient.clone() for gradient in held if gradient.numel()]


def apart(a, b):
    top = max(x.abs().max() for x in a)
    return (max((x - y).abs().max() for x, y in zip(a, b, strict=True)) / top).item()


@pytest.mark.parametrize("name", QUICK)
def test_outputs_and_gradients_stay_and_the_models_rotation_is_not_called(name):
    """What a patched model may owe the original is fp32 rounding, and nothing else."""
    model, given = tiny(name)
    with Calls(ROTATING) as before:
        out, gradients = run(model, given)

    report = patch(model)
    with Calls(ROTATING) as after:
        ours, our_gradients = run(model, given)
    unpatch(model)

    assert before.names
    assert not after.names
    assert {place.function for place in report.places} >= before.names - {"forward"}
    assert apart([out], [ours]) < 2e-6
    assert apart(gradients, our_gradients) < 2e-6
    assert torch.equal(run(model, given)[0], out)


def flux():
    return tiny("FluxTransformer2DModel")


def test_the_report_names_the_module_and_its_processor():
    report = patch(flux()[0])

    assert [(p.module, p.cls, p.function) for p in report.places] == [
        ("transformer_blocks.0.attn", "FluxAttnProcessor", "apply_rotary_emb"),
        ("single_transformer_blocks.0.attn", "FluxAttnProcessor", "apply_rotary_emb"),
    ]


@pytest.mark.parametrize("name", QUICK)
def test_nothing_stays_in_the_code_of_diffusers(name):
    """Neither where a processor is, nor where it imports its function from."""
    model, given = tiny(name)
    gc.collect()
    modules = {name: module for name, module in sys.modules.items() if name.startswith("diffusers")}
    before = {name: set(vars(module)) for name, module in modules.items()}
    out = run(model, given)[0]

    with patched(model):
        run(model, given)
        assert any(set(vars(modules[name])) != before[name] for name in modules)

    gc.collect()
    assert {name: set(vars(module)) for name, module in modules.items()} == before
    assert torch.equal(run(model, given)[0], out)


def test_another_model_with_the_same_processors_stays_as_it_was():
    one, given = flux()
    other, _ = flux()
    other.set_attn_processor(one.transformer_blocks[0].attn.processor)
    patch(one)

    with Calls(ROTATING) as calls, torch.no_grad():
        other(**given)

    assert calls.names == {"apply_rotary_emb"}


def test_unpatch_keeps_what_was_set_on_a_processor_in_between():
    model, _ = flux()
    attention = model.transformer_blocks[0].attn
    kind = type(attention.processor)
    patch(model)
    assert isinstance(attention.processor, kind)
    model.set_attention_backend("native")

    unpatch(model)

    assert type(attention.processor) is kind
    assert attention.processor._attention_backend == "native"
    with pytest.raises(ValueError, match="model must be patched"):
        unpatch(model)


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
    ids=["deep", "pickle"],
)
def test_a_copy_is_patched_with_its_norms_and_can_be_unpatched(copied):
    model, given = tiny("WanTransformer3DModel")
    with torch.no_grad():
        expected = model(**given).sample
        patch(model)
        twin = copied(model)
        with OwnNorms(norms_in(twin, fused=True)) as own:
            ours = twin(**given).sample
        assert not own.ran
        assert torch.equal(ours, model(**given).sample)
        unpatch(twin)
        assert torch.equal(twin(**given).sample, expected)
        assert torch.equal(model(**given).sample, ours)


def test_a_processor_that_is_set_later_runs_as_it_is():
    model, given = flux()
    with torch.no_grad():
        expected = model(**given).sample
        patch(model)
        kind = type(model.transformer_blocks[0].attn.processor).__mro__[1]
        model.set_attn_processor(kind())

        assert torch.equal(model(**given).sample, expected)
        unpatch(model)
        assert torch.equal(model(**given).sample, expected)


def test_a_processor_with_weights_keeps_them():
    """An IP-Adapter's processor is a module, with parameters in the state dict."""
    model, given = flux()
    kind = diffusers.models.transformers.transformer_flux.FluxIPAdapterAttnProcessor
    model.transformer_blocks[0].attn.set_processor(kind(32, 32))
    names = list(model.state_dict())
    image = {"joint_attention_kwargs": {"ip_hidden_states": [noise(2, 3, 32)]}}
    with torch.no_grad():
        expected = model(**given, **image).sample
        with patched(model):
            assert list(model.state_dict()) == names
            assert apart([expected], [model(**given, **image).sample]) < 2e-6
        assert torch.equal(model(**given, **image).sample, expected)


def test_bfloat16_differs_by_its_rounding():
    """Both round the rotated queries and keys once: a few of their last bits may differ."""
    model, given = flux()
    model.bfloat16()
    given = {k: v.bfloat16() if v.dim() > 2 or k[:2] == "po" else v for k, v in given.items()}
    with torch.no_grad():
        expected = model(**given).sample
        with patched(model):
            ours = model(**given).sample
    assert ours.dtype == torch.bfloat16
    assert apart([expected], [ours]) < 2**-7


@pytest.mark.slow
@pytest.mark.parametrize("name", ["FluxTransformer2DModel", "LTXVideoTransformer3DModel"])
def test_a_patched_model_compiles_whole_and_once(name):
    """The second has attention that gets no tables."""
    (model, given), compiles = tiny(name), CompileCounterWithBackend("aot_eager")
    with torch.no_grad():
        expected = model(**given).sample
        patch(model)
        compiled = torch.compile(model, fullgraph=True, backend=compiles)
        assert apart([expected], [compiled(**given).sample]) < 2e-6
        patch(tiny(name)[0])
        compiled(**given)
    assert compiles.frame_count == 1


# Modules, the norms in them that are fused, and a word of why others are not.
BOTH, ALL = ("norm_q", "norm_k"), ("norm_q", "norm_k", "norm_added_q", "norm_added_k")
NORMS = {
    # The text is joined to the image before the rotation in the first blocks.
    "FluxTransformer2DModel": {
        "transformer_blocks.0.attn": ((), "no rotation took"),
        "single_transformer_blocks.0.attn": (BOTH, ""),
    },
    # Over all heads, before they are split.
    "WanTransformer3DModel": {
        "blocks.0.attn1": (BOTH, ""),
        "blocks.0.attn2": ((), "to other tokens"),
    },
    "QwenImageTransformer2DModel": {"transformer_blocks.0.attn": (ALL, "")},
}
SLOW_NORMS = {
    # Rotated before the heads are split.
    "LTXVideoTransformer3DModel": {"transformer_blocks.0.attn1": (BOTH, "")},
    # Cast to the dtype that they have.
    "QwenImage21Transformer2DModel": {"transformer_blocks.0.attn": (BOTH, "")},
    "CogVideoXTransformer3DModel": {"transformer_blocks.0.attn1": ((), "no RMSNorm")},
}


def norms_in(model, fused):
    """The norms of ``NORMS`` that are fused, or the others."""
    paths = ({**NORMS, **SLOW_NORMS})[type(model).__name__]
    named = {path: model.get_submodule(path).named_children() for path in paths}
    return [
        norm
        for path, children in named.items()
        for name, norm in children
        if "Norm" in type(norm).__name__ and (name in paths[path][0]) == fused
    ]


@pytest.mark.parametrize(
    "name", [*NORMS, *(pytest.param(one, marks=pytest.mark.slow) for one in SLOW_NORMS)]
)
def test_norms_before_a_rotation_do_not_run_on_their_own(name):
    """One kernel owes the model float32 rounding only, in the gradients of its weights as well."""
    model, given = tiny(name)
    fused, others = norms_in(model, fused=True), norms_in(model, fused=False)
    with OwnNorms(fused) as before:
        run(model, given)
    expected = [norm.weight.grad.clone() for norm in fused]

    report = patch(model)
    with OwnNorms([*fused, *others]) as after:
        run(model, given)
    ours = [norm.weight.grad.clone() for norm in fused]

    assert set(before.ran) == set(fused)
    assert not set(after.ran) & set(fused)
    rows = {row.module: row for row in report.norms}
    for path, (names, why) in {**NORMS, **SLOW_NORMS}[name].items():
        assert rows[path].fused == names
        assert rows[path].cls == type(model.get_submodule(path).processor).__name__
        assert all(why and why in said for _, said in rows[path].others)
    for a, b in zip(expected, ours, strict=True):
        assert apart([a], [b]) < 2e-5
    unpatch(model)
    with OwnNorms(fused) as again:
        run(model, given)
    assert set(again.ran) == set(fused)


def test_a_hook_on_a_norm_of_a_processor_gets_the_tensor_that_the_model_computes():
    """Whether it was registered before the patch, or after; and diffusers has hooks of its own."""
    from diffusers.hooks import HookRegistry, ModelHook

    class Sees(ModelHook):
        def post_forward(self, module, output):
            seen.append(output)
            return output

    model, given = flux()
    attention, seen = model.single_transformer_blocks[0].attn, []
    attention.norm_q.register_forward_hook(lambda module, args, out: seen.append(out))
    with torch.no_grad():
        model(**given)
        report = patch(model)
        HookRegistry.check_if_exists_or_initialize(attention.norm_k).register_hook(Sees(), "sees")
        model(**given)

    (row,) = (row for row in report.norms if row.module == "single_transformer_blocks.0.attn")
    assert row.fused == ("norm_k",)
    assert "hooks" in dict(row.others)["norm_q"]
    assert len(seen) == 3
    assert apart([seen[0]], [seen[1]]) < 2e-6
    assert type(seen[2]) is torch.Tensor


def test_attention_that_gets_no_tables_is_called_with_tensors(monkeypatch):
    """Diffusers attends by kernels of many packages, which take nothing else."""
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as registry

    model, given = tiny("LTXVideoTransformer3DModel")
    name, attend = registry.get_active_backend()
    seen = []

    def spy(**arguments):
        seen.append({type(arguments[name]) for name in ("query", "key", "value")})
        return attend(**arguments)

    monkeypatch.setitem(registry._backends, name, spy)
    with patched(model), torch.no_grad():
        model(**given)
    assert seen == [{torch.Tensor}] * 2
