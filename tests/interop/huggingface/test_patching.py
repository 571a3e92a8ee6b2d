"""Models of transformers on our rotation; `tools/models` does this for every rotary folder."""

import copy
import gc
import sys

import pytest
import torch
import transformers
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from transformers.models.llama import modeling_llama

from posenc.interop.huggingface import drop_rotation, patch, patched, unpatch
from support.hf_models import LATENT, SMALL, VISION, Calls, apart, llama, tiny, tokens

MLA = {**SMALL, **LATENT, "num_key_value_heads": 4}
SECTIONS = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "vocab_size": 99}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

# A family for each way to rotate: class, configuration, changes to it, and how the model rotates.
FAMILIES = {
    "llama": ("LlamaModel", SMALL, "half"),
    "cohere": ("CohereModel", SMALL, "interleaved"),
    "gpt_neox-partial": ("GPTNeoXModel", SMALL, "half"),
    "gptj": ("GPTJModel", GPT, "interleaved"),
    "deepseek_v2-complex": ("DeepseekV2Model", MLA, "interleaved"),
    "deepseek_v3": ("DeepseekV3Model", MLA, "interleaved to half"),
    "qwen2_vl-text": ("Qwen2VLTextModel", {**SMALL, "rope_parameters": SECTIONS}, "half"),
    "gemma3-by-layer": (
        "Gemma3TextModel",
        {**SMALL, "head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]},
        "half",
    ),
    "gpt_oss-single": ("GptOssModel", {**SMALL, **EXPERTS, "head_dim": 16}, "half"),
    "nanochat-backwards": ("NanoChatModel", SMALL, "half"),
    "qwen3_vl-vision": ("Qwen3VLVisionModel", VISION, "half"),
    "roformer": ("RoFormerModel", {**SMALL, "embedding_size": 64}, "interleaved"),
}


def call(model):
    if "Vision" in type(model).__name__:
        patches = torch.randn(32, 48, generator=torch.Generator().manual_seed(1))
        return model(patches, grid_thw=torch.tensor([[1, 4, 4], [1, 4, 4]]))[0]
    return model(tokens())[0]


def run(model):
    """Output, and the gradient of every parameter."""
    model.zero_grad()
    out = call(model)
    (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
    return out.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_gradients_stay_and_the_models_rotation_is_not_called(family):
    """What a patched model may owe the original is fp32 rounding, and nothing else."""
    name, changes, layout = FAMILIES[family]
    model = tiny(name, **changes)
    with Calls() as before:
        out, gradients = run(model)

    report = patch(model)
    with Calls() as after:
        ours, our_gradients = run(model)
    unpatch(model)

    assert before.names
    assert not after.names
    assert layout in {place.layout for place in report.places}
    assert apart(out, ours) < 2e-5
    top = max(g.abs().max() for g in gradients)
    assert (
        max((a - b).abs().max() for a, b in zip(gradients, our_gradients, strict=True)) < 2e-5 * top
    )
    assert torch.equal(call(model), out)


def test_the_report_names_every_place():
    report = patch(llama())

    assert [(p.module, p.cls, p.function) for p in report.places] == [
        ("model.layers.0.self_attn", "LlamaAttention", "apply_rotary_pos_emb"),
        ("model.layers.1.self_attn", "LlamaAttention", "apply_rotary_pos_emb"),
    ]
    assert [(t.module, t.form, t.rates) for t in report.tables] == [
        ("model.rotary_emb", "doubled", "from the config")
    ]
    assert "model.layers.0.self_attn (LlamaAttention): apply_rotary_pos_emb" in str(report)
    assert report.kept == ()


def test_another_model_of_the_class_stays_as_it_was():
    one, other = llama(), llama()
    patch(one)

    with Calls() as calls:
        other(tokens())

    assert "apply_rotary_pos_emb" in calls.names
    assert not any("forward" in vars(module) for module in other.modules())


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "gemma3-by-layer"])
def test_nothing_stays_in_the_code_of_transformers(family):
    """What runs there after unpatch, other models included, must be all that transformers has."""
    name, changes, _ = FAMILIES[family]
    models = [tiny(name, **changes) for _ in range(2)]
    # Models of other tests, whose names go with them.
    gc.collect()
    names = vars(sys.modules[type(models[0]).__module__])
    before = dict(names)
    out = call(models[0])

    patch(models[0])
    models.append(copy.deepcopy(models[0]))
    ours = call(models[0])
    patch(models[1])
    assert len(names) > len(before)
    for model in models[:2]:
        unpatch(model)

    assert torch.equal(call(models[2]), ours), "a copy needs them still"
    unpatch(models[2])
    assert names == before
    assert torch.equal(call(models[2]), out)


def test_the_model_is_itself_again_when_the_block_fails():
    model = llama()
    expected = model(tokens()).logits

    with pytest.raises(ZeroDivisionError), patched(model):
        raise ZeroDivisionError

    assert torch.equal(model(tokens()).logits, expected)


def test_patching_twice_is_refused_also_from_inside():
    model = llama()
    patch(model)
    with pytest.raises(ValueError, match="must not be patched, got a patched LlamaAttention"):
        patch(model)

    unpatch(model)
    patch(model.model.layers[1])
    with pytest.raises(ValueError, match=r"LlamaAttention at 'model.layers.1.self_attn'"):
        patch(model)


def test_unpatching_an_unpatched_model_is_refused():
    with pytest.raises(ValueError, match="unpatch: model must be patched, got LlamaForCausalLM"):
        unpatch(llama())


def test_a_model_without_rotation_is_refused():
    model = tiny("BertModel", **SMALL)
    with pytest.raises(ValueError, match=r"got BertModel, .*\n.*it needs no patch"):
        patch(model)


@pytest.mark.parametrize("kind", ["Wav2Vec2Conformer", "Wav2Vec2Bert"])
@pytest.mark.parametrize("scheme", ["relative", None])
def test_a_conformer_whose_config_has_no_rotation_is_refused(kind, scheme):
    """Its code has a rotation, which it calls only with position_embeddings_type="rotary"."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}
    sizes |= {"intermediate_size": 64, "vocab_size": 99}
    model = tiny(f"{kind}Model", **sizes, position_embeddings_type=scheme)
    with pytest.raises(ValueError, match=f"got {kind}Model, which calls no function that rotates"):
        patch(model)


def apply_rot_embed_cat(x, table):
    sin, cos = table.chunk(2, -1)
    return x * cos + torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2) * sin


class OfTimm(torch.nn.Module):
    def forward(self, x, table):
        return apply_rot_embed_cat(x, table)


@pytest.mark.parametrize("change", [patch, drop_rotation], ids=["patch", "drop_rotation"])
def test_a_rotation_that_is_not_seen_is_not_said_to_be_absent(change):
    """timm's models rotate, by functions whose names do not say so."""
    with pytest.raises(ValueError, match=r"got OfTimm, .*\n  If it rotates, .*a posenc module"):
        change(OfTimm())


def test_an_object_that_is_no_model_is_refused():
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module, got dict"):
        patch({})


def apply_rotary_pos_emb(q, k, cos, sin):
    return q * cos + k * sin, k * cos - q * sin


class Odd(nn.Module):
    def forward(self, q, cos, sin):
        return apply_rotary_pos_emb(q, q, cos, sin)


def test_a_rotation_that_is_not_understood_is_named_and_nothing_changes():
    """All or nothing: the layers before it were understood."""
    model = llama()
    model.odd = Odd()
    gc.collect()
    expected, names = model(tokens()).logits, dict(vars(modeling_llama))

    with pytest.raises(ValueError, match=r"apply_rotary_pos_emb in .*\.Odd at 'odd'"):
        patch(model)

    assert torch.equal(model(tokens()).logits, expected)
    assert not any("forward" in vars(module) for module in model.modules())
    gc.collect()
    assert vars(modeling_llama) == names


class Ambiguous(nn.Module):
    def forward(self, q, cos, sin):
        return apply_rotary_pos_emb_llama(q, q, cos, sin), self.apply_rotary_pos_emb_llama


apply_rotary_pos_emb_llama = modeling_llama.apply_rotary_pos_emb


def test_a_rotation_and_an_attribute_of_one_name_are_refused():
    """Compiled code has one list for both, so that to rename the one is to rename the other."""
    with pytest.raises(ValueError, match="which forward also has as an attribute"):
        patch(Ambiguous())


def test_a_rotation_behind_super_is_refused():
    """super() looks at classes, and would find the original."""
    attention = transformers.models.llama.modeling_llama.LlamaAttention

    class Loud(attention):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    model = llama()
    model.model.layers[0].self_attn.__class__ = Loud
    with pytest.raises(ValueError, match=r"LlamaAttention.forward, called by super\(\)"):
        patch(model)


def attended(attention, hidden_states, position_embeddings):
    """Attention that rotates by itself; its ``cos`` and ``sin`` must be of the model's dtype."""
    shape = (*hidden_states.shape[:-1], -1, attention.head_dim)
    cos, sin = (table.unsqueeze(1) for table in position_embeddings)

    def turned(x):
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin

    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    q, k, v = (of(hidden_states).view(shape).transpose(1, 2) for of in projections)
    attend = nn.functional.scaled_dot_product_attention
    out = attend(turned(q), turned(k), v, is_causal=True, enable_gqa=True)
    return attention.o_proj(out.transpose(1, 2).flatten(2)), None


class Inherited(modeling_llama.LlamaAttention):
    def forward(self, hidden_states, **kwargs):
        return attended(self, hidden_states, kwargs["position_embeddings"])


class Alone(nn.Module):
    """With the parts of another, but not of its class."""

    def __init__(self, other):
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj", "head_dim"):
            setattr(self, name, getattr(other, name))

    def forward(self, hidden_states, position_embeddings, **kwargs):
        cos, sin = position_embeddings
        return attended(self, hidden_states, (cos, sin))


def with_own_attention(own):
    model = llama()
    first = model.model.layers[0]
    if own is Inherited:
        first.self_attn.__class__ = own
    else:
        first.self_attn = own(first.self_attn)
    return model


@pytest.mark.parametrize("own", [Inherited, Alone])
def test_an_attention_that_rotates_by_itself_is_named(own):
    """Nothing else would tell that a layer does without our rotation."""
    model = with_own_attention(own)
    expected = model(tokens(), use_cache=False).logits
    report = patch(model)

    path = "model.layers.0.self_attn"
    assert [(one.module, one.cls) for one in report.kept] == [(path, own.__name__)]
    assert f"{path} ({own.__name__}): left as it is" in str(report)
    assert [place.module for place in report.places] == ["model.layers.1.self_attn"]
    assert apart(expected, model(tokens(), use_cache=False).logits) < 2e-5


def test_an_attention_that_rotates_by_itself_gets_tables_of_the_models_dtype():
    """A product with float32 would be float32, which its next projection refuses."""
    model = with_own_attention(Inherited).bfloat16()
    patch(model)
    assert model(tokens(), use_cache=False).logits.dtype == torch.bfloat16
    at, width = torch.arange(9), model.config.head_dim
    cos, _ = model.model.rotary_emb(torch.zeros(1, dtype=torch.bfloat16), at[None])
    exact = (at[:, None] * 10_000.0 ** -(torch.arange(0, width, 2).double() / width)).cos()
    assert torch.equal(cos[0], torch.cat((exact, exact), -1).bfloat16())


def test_the_state_dict_and_the_saved_model_are_the_same(tmp_path):
    model = llama()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected = model(tokens()).logits
    patch(model)

    model.save_pretrained(tmp_path)

    assert list(model.state_dict()) == list(before)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(again(tokens()).logits, expected)


# With and without norms that are computed with the rotation.
@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_generation_with_a_cache_gives_the_same_tokens(family):
    model = tiny(f"{family}ForCausalLM", **SMALL)
    asked = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0  # left padding
    expected = model.generate(tokens(), attention_mask=mask, **asked)

    with patched(model), Calls() as calls:
        got = model.generate(tokens(), attention_mask=mask, **asked)

    assert not calls.names
    assert torch.equal(got, expected)


@pytest.mark.parametrize("family", ["Llama", "Olmo2"])
def test_gradient_checkpointing_gives_the_same_gradients(family):
    model = tiny(f"{family}Model", **SMALL).train()
    _, expected = run(model)
    model.gradient_checkpointing_enable()

    with patched(model), Calls() as calls:
        _, got = run(model)

    assert not calls.names
    top = max(g.abs().max() for g in expected)
    assert max((a - b).abs().max() for a, b in zip(expected, got, strict=True)) < 2e-5 * top


@pytest.mark.parametrize(
    "family", ["Llama", *(pytest.param(f, marks=pytest.mark.slow) for f in ("Qwen3", "Olmo2"))]
)
def test_a_patched_model_compiles_whole_and_once(family):
    """Neither for a second layer, nor when another model of the class is patched."""
    model, compiles = tiny(f"{family}Model", **SMALL), CompileCounterWithBackend("aot_eager")
    expected = model(tokens())[0]
    patch(model)

    compiled = torch.compile(model, fullgraph=True, backend=compiles)

    assert apart(expected, compiled(tokens())[0]) < 2e-5
    patch(tiny(f"{family}Model", **SMALL))
    compiled(tokens())
    assert compiles.frame_count == 1
