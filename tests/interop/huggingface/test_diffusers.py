"""Transformers of diffusers on our rotation; `tools/diffusion` writes a table of all of them."""

import copy
import pickle
import sys

import pytest
import torch

from posenc.interop.huggingface import patch, patched, unpatch

diffusers = pytest.importorskip("diffusers")

from support.diffusion import MODELS, OWN_WARNINGS, noise, tiny  # noqa: E402

pytestmark = OWN_WARNINGS

# Ways in which a processor finds its function, and forms of tables.
QUICK = {
    "FluxTransformer2DModel": "imported by the module, flags",
    "WanTransformer3DModel": "defined inside the processor",
    "CogVideoXTransformer3DModel": "imported inside the processor",
    "LTX2VideoTransformer3DModel, split": "before the heads are split",
}
# Kandinsky 5 rounds to bfloat16 after the rotation, whatever the dtype of the model is.
LIMITS = {"Kandinsky5Transformer3DModel": 2**-9}


class Calls:
    """Rotating functions of diffusers that run."""

    def __enter__(self):
        self.names = set()
        sys.setprofile(self.see)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)

    def see(self, frame, event, _):
        name = frame.f_code.co_name
        turns = "apply_r" in name or ("apply_" in name and "rotary_emb" in name)
        # Our code for a function inside another calls a function of ours at once.
        ours = any(each.startswith("_posenc_") for each in frame.f_code.co_names)
        if event == "call" and turns and not ours and "diffusers" in frame.f_code.co_filename:
            self.names.add(name)


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


def check_patched(name):
    model, given = tiny(name)
    with Calls() as before:
        out, gradients = run(model, given)

    report = patch(model)
    with Calls() as after:
        ours, our_gradients = run(model, given)
    unpatch(model)

    limit = LIMITS.get(name, 2e-6)
    assert before.names
    assert not after.names
    assert {place.function for place in report.places} >= before.names - {"forward"}
    assert apart([out], [ours]) < limit
    assert apart(gradients, our_gradients) < limit
    assert torch.equal(run(model, given)[0], out)


@pytest.mark.parametrize("name", QUICK)
def test_outputs_and_gradients_stay_and_the_models_rotation_is_not_called(name):
    """What a patched model may owe the original is fp32 rounding, and nothing else."""
    check_patched(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODELS if name not in QUICK])
def test_every_tiny_model_keeps_its_outputs(name):
    check_patched(name)


def flux():
    return tiny("FluxTransformer2DModel")


def test_the_report_names_the_module_and_its_processor():
    report = patch(flux()[0])

    assert [(p.module, p.cls, p.function) for p in report.places] == [
        ("transformer_blocks.0.attn", "FluxAttnProcessor", "apply_rotary_emb"),
        ("single_transformer_blocks.0.attn", "FluxAttnProcessor", "apply_rotary_emb"),
    ]


def test_another_model_with_the_same_processors_stays_as_it_was():
    one, given = flux()
    other, _ = flux()
    other.set_attn_processor(one.transformer_blocks[0].attn.processor)
    patch(one)

    with Calls() as calls, torch.no_grad():
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
def test_a_copy_is_patched_and_can_be_unpatched(copied):
    model, given = flux()
    with torch.no_grad():
        expected = model(**given).sample
        patch(model)
        made = copied(model)
        with Calls() as calls:
            ours = made(**given).sample
        assert not calls.names
        assert torch.equal(ours, model(**given).sample)
        unpatch(made)
        assert torch.equal(made(**given).sample, expected)
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


@pytest.mark.parametrize(
    ("kind", "config", "function"),
    [
        (
            "ErnieImageTransformer2DModel",
            {
                "hidden_size": 16, "num_attention_heads": 1, "num_layers": 1,
                "ffn_hidden_size": 16, "in_channels": 4, "out_channels": 4, "patch_size": 1,
                "text_in_dim": 16, "rope_axes_dim": (8, 4, 4),
            },
            "apply_rotary_emb",
        ),
        (
            "Ideogram4Transformer2DModel",
            {
                "in_channels": 4, "num_layers": 1, "attention_head_dim": 8,
                "num_attention_heads": 2, "intermediate_size": 16, "adaln_dim": 16,
                "llm_features_dim": 8, "mrope_section": (2, 1, 1),
            },
            "_rotate_half",
        ),
    ],
    ids=["two angles to a pair", "no function of its own"],
)  # fmt: skip
@pytest.mark.slow
def test_a_rotation_that_is_not_known_is_refused_by_name(kind, config, function):
    model = getattr(diffusers, kind)(**config)

    with pytest.raises(ValueError, match=f"must be known to posenc, got .*{function} in"):
        patch(model)

    assert not any("_posenc" in name for m in model.modules() for name in vars(m))


@pytest.mark.slow
def test_a_patched_model_compiles_in_one_graph():
    model, given = flux()
    with torch.no_grad():
        expected = model(**given).sample
        patch(model)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert apart([expected], [compiled(**given).sample]) < 2e-6
