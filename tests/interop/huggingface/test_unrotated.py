"""Models without their rotation, and models that read past their trained length."""

import copy
import pickle
from functools import partial

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, StaticCache
from transformers.models.llama import modeling_llama

import oracles
from posenc.interop.huggingface import drop_rotation, dual_chunk, patch, self_extend, unpatch

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"intermediate_size": 32, "num_hidden_layers": 4, "vocab_size": 50, "head_dim": 16}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2}
SIZES |= {"tie_word_embeddings": False, "rms_norm_eps": 1e-6}
EXTENSIONS = {
    "self-extend": (self_extend, {"group": 3, "window": 8}, oracles.self_extend),
    "dual-chunk": (dual_chunk, {"chunk": 9, "window": 4}, oracles.dual_chunk),
}


def slow(value):
    return pytest.param(value, marks=pytest.mark.slow)


extensions = pytest.mark.parametrize("extension", EXTENSIONS.values(), ids=list(EXTENSIONS))
IDS = torch.randint(3, 50, (2, 40), generator=torch.Generator().manual_seed(0))


def made(kind="llama", **more):
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**{**SIZES, **more})
    return AutoModelForCausalLM.from_config(config).double().eval()


@torch.no_grad()
def logits(model, ids=IDS, **more):
    return model(ids, **more).logits


@pytest.mark.parametrize("layers", [None, [1, 3]], ids=["all", "some"])
def test_a_llama_that_dropped_its_rotation_is_a_smollm3_without_it(layers):
    """SmolLM3 is Llama with layers that need not rotate."""
    model = made()
    flags = [int(layers is not None and i not in layers) for i in range(4)]
    other = made("smollm3", no_rope_layers=flags, rope_parameters=model.config.rope_parameters)
    other.load_state_dict(model.state_dict())
    before = logits(model)

    report = drop_rotation(model, layers=layers)

    assert len(report.places) == (4 if layers is None else 2)
    torch.testing.assert_close(logits(model), logits(other), rtol=0, atol=1e-12)
    unpatch(model)
    assert torch.equal(logits(model), before)


class Own(modeling_llama.LlamaAttention):
    def forward(self, hidden_states, position_embeddings, **kwargs):
        cos, sin = position_embeddings
        return self.o_proj(self.q_proj(hidden_states) * (cos + sin).repeat(1, 1, 4)), None


@pytest.mark.parametrize(
    "change", [drop_rotation, partial(self_extend, group=3, window=8)], ids=["drop", "extend"]
)
def test_a_layer_that_rotates_by_itself_is_refused(change):
    """It would go on rotating."""
    model = made()
    model.model.layers[2].self_attn.__class__ = Own
    with pytest.raises(
        ValueError, match=r"rotating code of its own in .*Own at 'model\.layers\.2\."
    ):
        change(model)
    assert not any("forward" in vars(module) for module in model.modules())


def test_other_models_of_the_class_rotate_whatever_is_patched_first():
    """The two ways to replace a function have names of their own in the model's module."""
    first, second, third = (made(num_hidden_layers=1) for _ in range(3))
    patch(first)
    wanted = logits(first)
    drop_rotation(second)
    patch(third)
    assert torch.equal(logits(first), wanted)
    assert torch.equal(logits(third), wanted)
    assert (logits(second) - wanted).abs().max() > 1e-3
    assert torch.equal(logits(pickle.loads(pickle.dumps(second))), logits(second))
    assert torch.equal(logits(copy.deepcopy(second)), logits(second))


@extensions
def test_an_extended_layer_attends_at_the_positions_of_the_paper(extension):
    extend, numbers, oracle = extension
    model, seen = made(num_hidden_layers=1), {}
    before = logits(model)
    extend(model, **numbers)
    layer = model.model.layers[0].self_attn

    def look(module, _, given, result):
        seen.update(x=given["hidden_states"], out=result[0])

    handle = layer.register_forward_hook(look, with_kwargs=True)
    logits(model)
    handle.remove()

    x, parts = seen["x"], (layer.q_proj, layer.k_proj, layer.v_proj)
    q, k, v = (of(x).unflatten(-1, (-1, 16)).transpose(1, 2) for of in parts)
    wanted = oracles.attention_at(q, k, v, oracle(40, *numbers.values()))
    wanted = layer.o_proj(wanted.transpose(1, 2).flatten(2))
    torch.testing.assert_close(seen["out"], wanted, rtol=0, atol=1e-12)
    unpatch(model)
    assert torch.equal(logits(model), before)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("kind", ["smollm3", *(slow(kind) for kind in ("qwen3", "gpt_neox"))])
def test_up_to_the_window_the_model_computes_what_it_did(kind):
    """SmolLM3's fourth layer has no rotation, and gets none. Tables of transformers are float32."""
    model = made(kind, **({"num_key_value_heads": 4} if kind == "gpt_neox" else {}))
    patch(model, fuse=False)
    before = logits(model)
    unpatch(model)
    for extend, numbers, _ in EXTENSIONS.values():
        extend(model, **dict.fromkeys(numbers, 40))
        torch.testing.assert_close(logits(model), before, rtol=0, atol=1e-11)
        unpatch(model)


@pytest.mark.parametrize(
    "extension", [slow(EXTENSIONS["self-extend"]), EXTENSIONS["dual-chunk"]], ids=list(EXTENSIONS)
)
def test_a_cache_and_padding_give_the_same_tokens(extension):
    extend, numbers, _ = extension
    model = made(num_hidden_layers=2)
    extend(model, **numbers)
    whole = logits(model)
    first = model(IDS[:, :17], use_cache=True)
    steps, cache = [first.logits], first.past_key_values
    for begin, end in ((17, 18), (18, 19), (19, 29), (29, 40)):
        steps.append(model(IDS[:, begin:end], past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=0, atol=1e-10)

    pad, mask = torch.zeros(2, 5, dtype=torch.long), torch.ones(2, 45, dtype=torch.long)
    mask[:, :5] = 0
    padded = logits(model, torch.cat((pad, IDS), 1), attention_mask=mask)[:, 5:]
    torch.testing.assert_close(padded, whole, rtol=0, atol=1e-10)
    longer = model.generate(IDS, max_new_tokens=3, do_sample=False)
    assert torch.equal(longer[:, 40], whole[:, -1].argmax(-1))
    loss = model(IDS, labels=IDS).loss
    loss.backward()
    assert all(weight.grad.isfinite().all() for weight in model.parameters())


@extensions
@pytest.mark.slow
def test_an_extension_that_fails_leaves_the_model_as_it_was(extension):
    extend, numbers, _ = extension
    window = made("mistral", sliding_window=16)
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    dynamic = made(rope_parameters=dynamic, max_position_embeddings=64)
    for model, text in ((window, "without a sliding window"), (dynamic, "depend on the length")):
        before = logits(model)
        with pytest.raises(ValueError, match=text):
            extend(model, **numbers)
        assert torch.equal(logits(model), before)
    model = made()
    with pytest.raises(ValueError, match="must be at least 1"):
        extend(model, **dict.fromkeys(numbers, 0))
    with pytest.raises(TypeError, match="must be a transformers model"):
        extend(model.model.layers, **numbers)
    extend(model, **numbers)
    with pytest.raises(ValueError, match="must not be patched"):
        drop_rotation(model)
    with pytest.raises(ValueError, match="Pass the whole model"):
        unpatch(model.model.layers[0])
    static = StaticCache(config=model.config, max_cache_len=64)
    with pytest.raises(ValueError, match="a static cache"):
        model(IDS, past_key_values=static)
    packed = torch.cat((torch.arange(20), torch.arange(20)))[None].expand(2, -1)
    with pytest.raises(ValueError, match="packed sequences"):
        model(IDS, position_ids=packed, use_cache=False)
    holes = torch.ones_like(IDS)
    holes[:, 5] = 0
    with pytest.raises(ValueError, match="ends of its row"):
        model(IDS, attention_mask=holes)


@extensions
def test_another_model_of_the_same_config_object_stays_as_it_is(extension):
    """from_config and many programs give one object to several models."""
    extend, numbers, _ = extension
    model = made(num_hidden_layers=2)
    config = model.config
    other = AutoModelForCausalLM.from_config(config).double().eval()
    before, others = logits(model), logits(other)

    extend(model, **numbers)
    extended = logits(model)
    assert other.config is config
    assert torch.equal(logits(other), others)
    assert model.config is model.model.config is model.model.layers[0].self_attn.config
    self_extend(other, group=2, window=4)
    assert torch.equal(logits(model), extended)

    unpatch(model)
    assert torch.equal(logits(model), before)
    unpatch(other)
    assert torch.equal(logits(other), others)
    assert {id(module.config) for module in model.modules() if hasattr(module, "config")} == {
        id(config)
    }


@pytest.mark.parametrize("part", ["", "model"], ids=["model", "part"])
def test_another_attention_is_refused_until_unpatch(part):
    """Its layers rotate no more, so with SDPA the model would have no positions."""
    model = made()
    before = logits(model)
    self_extend(model, group=3, window=8)
    model.get_submodule(part).set_attn_implementation("eager")

    with pytest.raises(ValueError, match=r"must stay 'posenc'.*got eager.*\n.*unpatch"):
        logits(model)

    unpatch(model)
    assert torch.equal(logits(model), before)


def test_layers_that_do_not_rotate_cannot_be_dropped():
    model = made("smollm3")
    with pytest.raises(ValueError, match=r"layers that rotate, got \[9\]"):
        drop_rotation(model, layers=[0, 9])
    with pytest.raises(ValueError, match="must have rotary embeddings"):
        drop_rotation(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="must be a torch"):
        drop_rotation(3)
