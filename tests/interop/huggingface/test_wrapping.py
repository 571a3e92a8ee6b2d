"""Patched models beside what else changes methods: hooks, exporters, other kernels."""

import functools

import pytest
import torch
import transformers
from transformers.models.llama import modeling_llama

from posenc.interop.huggingface import patch, patched, unpatch
from support.hf_models import VISION, Calls, apart, llama, tokens


def test_a_method_that_was_wrapped_on_the_instance_is_refused():
    model = llama()
    inner = model.model.layers[0].self_attn
    own = inner.forward
    inner.forward = lambda *args, **kwargs: own(*args, **kwargs)
    with pytest.raises(ValueError, match="must have the forward of its class"):
        patch(model)

    # What accelerate leaves on an instance when it takes its hooks away.
    inner.forward = own
    with patched(model):
        model(tokens())


def test_hooks_that_keep_the_old_forward_stay():
    """accelerate's device maps call what they keep in ``_old_forward``."""
    model, seen = llama(), []
    expected = model(tokens()).logits
    inner = model.model.layers[0].self_attn
    inner._old_forward = inner.forward
    inner.forward = lambda *args, **kwargs: seen.append(1) or inner._old_forward(*args, **kwargs)

    patch(model)
    with Calls() as calls:
        ours = model(tokens()).logits
    unpatch(model)

    assert seen
    assert not calls.names
    assert apart(expected, ours) < 2e-5
    assert torch.equal(model(tokens()).logits, expected)


def add_hook(module, calls):
    """What accelerate's `add_hook_to_module` does."""
    module._old_forward = module.forward

    def hooked(module, *args, **kwargs):
        calls.append(module)
        return module._old_forward(*args, **kwargs)

    module.forward = functools.update_wrapper(functools.partial(hooked, module), module.forward)


def remove_hook(module):
    module.forward = module._old_forward
    del module._old_forward


@pytest.mark.parametrize("first", ["unpatch", "remove the hook"])
def test_hooks_that_are_added_after_the_patch_do_not_hold_it(first):
    model, seen = llama(), []
    expected = model(tokens()).logits
    patch(model)
    inner = model.model.layers[0].self_attn
    add_hook(inner, seen)
    with Calls() as calls:
        assert apart(expected, model(tokens()).logits) < 2e-5
    assert seen == [inner]
    assert not calls.names

    if first == "unpatch":
        unpatch(model)
        assert torch.equal(model(tokens()).logits, expected)
        assert seen == [inner] * 2
        remove_hook(inner)
    else:
        remove_hook(inner)
        unpatch(model)
    assert torch.equal(model(tokens()).logits, expected)
    patch(model)


def test_a_wrapper_added_after_the_patch_stays_and_calls_the_models_own_method():
    """Putting the class's forward back would throw the wrapper away."""
    model, seen = llama(), []
    expected = model(tokens()).logits
    patch(model)
    inner = model.model.layers[1].self_attn
    ours = inner.forward
    inner.forward = lambda *args, **kwargs: seen.append(1) or ours(*args, **kwargs)

    unpatch(model)

    with Calls() as calls:
        assert torch.equal(model(tokens()).logits, expected)
    assert seen
    assert calls.names


def test_a_name_that_is_replaced_in_the_models_module_after_the_patch_is_obeyed(monkeypatch):
    model, seen = llama(attn_implementation="eager"), []
    patch(model)
    own = modeling_llama.eager_attention_forward
    monkeypatch.setattr(
        modeling_llama,
        "eager_attention_forward",
        lambda *args, **kwargs: seen.append(1) or own(*args, **kwargs),
    )
    model(tokens())
    assert seen == [1, 1]


def test_a_forward_that_its_class_is_given_after_the_patch_is_obeyed(monkeypatch):
    """transformers' exporters put forwards of their own on the classes that they export."""
    model, seen = llama(), []
    expected = model(tokens()).logits
    patch(model)
    own = modeling_llama.LlamaAttention.forward
    with monkeypatch.context() as replaced:
        replaced.setattr(
            modeling_llama.LlamaAttention,
            "forward",
            lambda self, *args, **kwargs: seen.append(1) or own(self, *args, **kwargs),
        )
        assert apart(expected, model(tokens()).logits) < 2e-5
    assert seen == [1, 1]
    with Calls() as calls:
        model(tokens())
    assert not calls.names


def test_a_patched_vision_tower_is_exported_by_transformers():
    """Its exporter swaps the forward of the attention, whose own cannot be traced."""
    exporters = pytest.importorskip("transformers.exporters.exporter_dynamo")
    changes = {**VISION, "window_size": 8, "fullatt_block_indexes": [1]}
    del changes["deepstack_visual_indexes"]
    config = transformers.Qwen2_5_VLConfig(vision_config=changes).vision_config
    modeling = transformers.models.qwen2_5_vl.modeling_qwen2_5_vl
    model = modeling.Qwen2_5_VisionTransformerPretrainedModel(config).eval()
    inputs = {"hidden_states": torch.randn(16, 48), "grid_thw": torch.tensor([[1, 4, 4]])}
    expected = model(**inputs)[0]
    patch(model)

    exported = exporters.DynamoExporter().export(model, inputs, exporters.DynamoConfig())

    # transformers 5.23 puts the program that older ones return into a model.
    program = getattr(exported, "program", exported)
    assert apart(expected, program.module()(**inputs)[0]) < 2e-5
