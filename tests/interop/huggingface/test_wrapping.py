"""Patched models beside what else changes methods: hooks, exporters, other kernels."""

from transformers.models.llama import modeling_llama

from hf_models import apart, llama, tokens
from posenc.interop.huggingface import patch


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


def test_a_rotation_that_is_replaced_after_the_patch_is_obeyed(monkeypatch):
    """As other libraries of kernels do it: the last that was asked for rotates."""
    model, seen = llama(), []
    expected = model(tokens()).logits
    patch(model)
    own = modeling_llama.apply_rotary_pos_emb
    with monkeypatch.context() as replaced:
        replaced.setattr(
            modeling_llama,
            "apply_rotary_pos_emb",
            lambda *args, **kwargs: seen.append(1) or own(*args, **kwargs),
        )
        assert apart(expected, model(tokens()).logits) < 2e-5
    assert seen == [1, 1]
