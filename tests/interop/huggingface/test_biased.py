"""Models of transformers with ALiBi or T5's buckets on our attention."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from posenc.interop.huggingface import biased, patch, patched, unpatch
from support import hf_models
from support.attention import DEVICE
from support.hf_models import tiny

# BLOOM's own GELU.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated")

# Six heads: not a power of two, where the models' slopes differ.
ALIBI = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "vocab_size": 99}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 99}
T5 |= {"decoder_start_token_id": 0, "dropout_rate": 0.0}
# Distances past the last bucket are among 40 tokens.
T5 |= {"relative_attention_num_buckets": 12, "relative_attention_max_distance": 20}
FALCON = {**ALIBI, "alibi": True}
GROUPS = {"new_decoder_architecture": True, "num_kv_heads": 2}
FAMILIES = {
    "bloom": ("BloomForCausalLM", ALIBI),
    "mpt": ("MptForCausalLM", {**ALIBI, "max_seq_len": 64}),
    "falcon-multi-query": ("FalconForCausalLM", FALCON),
    "falcon-groups": ("FalconForCausalLM", {**FALCON, **GROUPS}),
    "falcon-all-heads": ("FalconForCausalLM", {**FALCON, "multi_query": False}),
    "t5": ("T5ForConditionalGeneration", T5),
    "mt5": ("MT5ForConditionalGeneration", T5),
    # With SDPA and no padding, transformers lets UMT5's decoder see later tokens up to 5.17.
    "umt5": ("UMT5ForConditionalGeneration", {**T5, "attn_implementation": "eager"}),
}
DECODERS = ["bloom", "mpt", "falcon-groups"]
SLOW = pytest.mark.slow


def rarely(names, *often):
    """The families with those but ``often`` in make test-all alone."""
    return [name if name in often else pytest.param(name, marks=SLOW) for name in names]


def build(family):
    name, changes = FAMILIES[family]
    return tiny(name, **changes).to(DEVICE)


def tokens(*sizes):
    return hf_models.tokens(*sizes).to(DEVICE)


def padding(batch=3, length=40):
    """None, some on the left, some on the right."""
    mask = torch.ones(batch, length, dtype=torch.long, device=DEVICE)
    mask[1, :5], mask[2, -9:] = 0, 0
    return mask


def inputs(model, length=40):
    ids, mask = tokens(3, length), padding(3, length)
    given = {"input_ids": ids, "attention_mask": mask}
    if model.config.is_encoder_decoder:
        # More queries than keys in the attention to the encoder.
        given |= {"input_ids": ids[:, :30], "attention_mask": mask[:, :30].roll(2, 0)}
        given |= {"decoder_input_ids": ids, "decoder_attention_mask": mask}
    return given, mask.bool()


def weights_like(logits):
    return torch.linspace(-1, 1, logits.numel(), device=DEVICE).view(logits.shape)


def run(model, length=40):
    """Logits of the tokens that are not padding, and the gradient of every parameter."""
    model.zero_grad()
    given, real = inputs(model, length)
    logits = model(**given).logits[real]
    logits.backward(weights_like(logits))
    return logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


@pytest.fixture(autouse=True)
def short_calls(monkeypatch):
    """Those of these tests run on our attention too."""
    monkeypatch.setattr(biased, "FEW_SCORES", 0)


@pytest.fixture
def calls(monkeypatch):
    """The biases of the calls of our attention."""
    seen = []

    def spy(q, k, v, bias, **named):
        if bias is not None:
            seen.append(bias)
        return ours(q, k, v, bias, **named)

    ours = biased.attend_last
    monkeypatch.setattr(biased, "attend_last", spy)
    return seen


QUICK = ["bloom", "mpt", "falcon-groups", "t5"]


@pytest.mark.parametrize("family", rarely(FAMILIES, *QUICK))
def test_logits_and_gradients_stay(family, calls):
    """What a patched model may owe the original is fp32 rounding, and nothing else."""
    model = build(family).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    logits, gradients = run(model)

    report = patch(model)
    calls.clear()
    ours, our_gradients = run(model)
    # Two layers in each of the biased.
    assert len(calls) == (4 if model.config.is_encoder_decoder else 2)
    unpatch(model)
    again, _ = run(model)

    assert {one.bias for one in report.attentions} <= {"alibi", "buckets", "none"}
    assert (ours - logits).abs().max() < 2e-5 * logits.abs().max()
    top = max(g.abs().max() for g in gradients.values())
    worst = max((our_gradients[n] - g).abs().max() for n, g in gradients.items())
    assert worst < 2e-5 * top
    assert torch.equal(again, logits)
    tables = [g for n, g in our_gradients.items() if "relative_attention_bias" in n]
    assert all(g.abs().max() > 1e-3 * top for g in tables)


def test_falcons_rounded_positions_are_kept():
    """Falcon computes its bias in bfloat16, which merges neighbours from position 256 on."""
    model = build("falcon-groups")
    logits, _ = run(model, length=300)

    with patched(model):
        ours, _ = run(model, length=300)

    assert (ours - logits).abs().max() < 2e-5 * logits.abs().max()


def generated(model, **how):
    """Eight tokens after prompts of different lengths."""
    prompt = tokens(3, 12)
    mask = torch.ones_like(prompt)
    mask[1, :5] = 0
    how = {"do_sample": False, "max_new_tokens": 8, "min_new_tokens": 8, "pad_token_id": 0, **how}
    return model.generate(prompt, attention_mask=mask, **how)


@pytest.mark.parametrize("family", rarely([*DECODERS, "t5", "umt5"], "bloom", "t5"))
def test_generate_gives_the_same_tokens(family, calls):
    model = build(family)
    expected, beams = generated(model), generated(model, num_beams=2)

    patch(model)
    calls.clear()
    assert torch.equal(generated(model), expected)
    # Every layer of every step.
    assert len(calls) == 16 + 2 * model.config.is_encoder_decoder
    assert torch.equal(generated(model, num_beams=2), beams)


@pytest.mark.skipif(DEVICE != "cpu", reason="of the CPU")
@pytest.mark.parametrize("family", ["bloom", "t5"])
def test_a_short_call_on_the_cpu_is_left_to_the_model(family, calls, monkeypatch):
    """There its own attention is as fast."""
    monkeypatch.setattr(biased, "FEW_SCORES", 40 * 40)
    model = build(family)
    given, real = inputs(model)
    with torch.no_grad():
        expected = model(**given).logits
        patch(model)
        calls.clear()
        assert torch.equal(model(**given).logits, expected)
    assert not calls
    assert_near(model(**given).logits[real], expected[real])
    assert calls


@pytest.mark.parametrize("family", rarely(["bloom", "t5"], "bloom"))
def test_a_static_cache_is_left_to_the_model(family, calls):
    """It has keys that are not there yet."""
    model = build(family)
    expected = generated(model, cache_implementation="static")

    patch(model)
    calls.clear()
    assert torch.equal(generated(model, cache_implementation="static"), expected)
    # An encoder has no cache.
    assert len(calls) == 2 * model.config.is_encoder_decoder


class Largest(TorchDispatchMode):
    """Number of elements of the largest tensor that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for one in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(one, torch.Tensor):
                self.elements = max(self.elements, one.numel())
        return made


@pytest.mark.parametrize("padded", [False, True], ids=["no-mask", "padded"])
@pytest.mark.parametrize("family", rarely([*DECODERS, "t5", "umt5"], "bloom", "t5"))
def test_no_matrix_is_made(family, padded):
    """Neither for scores, nor for masks or biases, nor in the backward pass.

    Inside of our attention, tests/functional looks.
    """
    length = 512
    changes = {"max_seq_len": length} if family == "mpt" else {}
    name, small = FAMILIES[family]
    model = tiny(name, **{**small, **changes}).to(DEVICE)
    given = {"input_ids": tokens(1, length), "use_cache": False}
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = tokens(1, length)
    if padded:
        given["attention_mask"] = (torch.arange(length, device=DEVICE) > 9).long()[None]

    with Largest() as theirs, torch.no_grad():
        model(**given)
    patch(model)
    with Largest() as ours:
        model(**given).logits.sum().backward()

    assert theirs.elements >= length * length
    assert ours.elements < length * length / 2


def square_mask(model):
    given = {"input_ids": tokens(3, 40)}
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = given["input_ids"]
    given["attention_mask"] = torch.full((1, 1, 40, 40), -1e9, device=DEVICE).triu(1)
    return given


def weights(model):
    return {**inputs(model)[0], "output_attentions": True}


# BLOOM's and Falcon's own code takes no mask of four axes.
OWN = [("t5", square_mask), ("bloom", weights)]


@pytest.mark.parametrize(("family", "make"), OWN)
def test_what_ours_cannot_do_the_models_own_attention_does(family, make, calls):
    model = build(family)
    given = make(model)
    expected = model(**given)
    patch(model)
    calls.clear()

    got = model(**given)

    assert not calls
    apart = (got.logits - expected.logits)[padding().bool()].abs().max()
    assert apart < 2e-5 * expected.logits.abs().max()
    if make is weights:
        assert all(map(torch.equal, got.attentions, expected.attentions))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("BloomForCausalLM", {**ALIBI, "attention_dropout": 0.5}),
        ("T5ForConditionalGeneration", {**T5, "dropout_rate": 0.5}),
    ],
)
def test_dropout_of_weights_is_the_models_own_in_training(name, changes, calls):
    model = tiny(name, **changes).to(DEVICE).train()
    given, _ = inputs(model)
    torch.manual_seed(0)
    expected = model(**given).logits

    report = patch(model)
    calls.clear()
    torch.manual_seed(0)
    got = model(**given).logits

    assert not calls
    assert torch.equal(got, expected)
    assert "its own in training, dropout 0.5" in str(report)


BERT_LIKE = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 32}
REFUSED = {
    "longt5": ("LongT5Model", T5, "LongT5LocalAttention at 'encoder.block.0"),
    "switch_transformers": ("SwitchTransformersModel", T5, "SwitchTransformersAttention at"),
    "mpnet": ("MPNetModel", {**BERT_LIKE, "vocab_size": 99}, "MPNetEncoder at 'encoder'"),
    # Its eager attention adds the bias twice, in the mask and to the scores.
    "falcon-eager": (
        "FalconModel",
        {**FALCON, "attn_implementation": "eager"},
        "FalconAttention at 'h.0.self_attention', which computes something else",
    ),
    # This flag makes BLOOM leave out the bias of a projection.
    "bloom-slow-but-exact": (
        "BloomModel",
        {**ALIBI, "pretraining_tp": 2, "slow_but_exact": True},
        "BloomAttention at 'h.0.self_attention', which computes something else",
    ),
}


@pytest.mark.parametrize("family", REFUSED)
def test_what_is_not_known_is_refused_by_name(family):
    name, changes, named = REFUSED[family]
    model = tiny(name, **changes)

    with pytest.raises(ValueError, match="every attention with a bias must be known") as caught:
        patch(model)

    assert named in str(caught.value)
    assert not any("forward" in vars(module) for module in model.modules())


def test_an_attention_layer_alone_is_refused():
    """Its mask is made by the model around it."""
    layer = build("t5").encoder.block[0]

    with pytest.raises(ValueError, match=r"T5Attention at .*, without the model around it"):
        patch(layer)


def test_trying_changes_no_random_numbers():
    model = build("bloom")
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)

    patch(model)

    assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize("family", rarely(["bloom", "t5"], "bloom"))
def test_a_copy_is_patched_too(family, calls):
    model = build(family)
    patch(model)
    given, _ = inputs(model)
    expected = model(**given).logits

    copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    calls.clear()
    got = copied(**given).logits

    assert calls
    assert torch.equal(got, expected)


@pytest.mark.parametrize("family", rarely(["mpt", "t5"], "t5"))
def test_gradient_checkpointing_runs_ours_again(family, calls):
    model = build(family).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    patch(model)
    model.config.use_cache = False
    _, expected = run(model)
    model.gradient_checkpointing_enable()
    calls.clear()

    _, got = run(model)

    assert len(calls) == (8 if model.config.is_encoder_decoder else 4)
    assert all(torch.equal(got[name], gradient) for name, gradient in expected.items())


# Of two sequences: which keys are seen.
MASKS = {
    "all": ("111111111111", "111111111111"),
    "left": ("111111111111", "000001111111"),
    "right": ("111111111111", "111111100000"),
    "both-ends": ("000111111100", "011111111110"),
    "holes": ("111000111111", "101111100111"),
    "after-a-right-padded-prompt": ("111111111111", "111100000001"),
    "ends-and-holes": ("011011011011", "001110000111"),
}
MASKED = ["bloom", "mpt", "falcon-groups", "falcon-multi-query", "t5", "umt5"]


def mask_of(name):
    return torch.tensor([[int(seen) for seen in row] for row in MASKS[name]], device=DEVICE)


def calls_of(model):
    """Arguments with each of the masks, those of an encoder in the opposite order, and the mask."""
    ids = tokens(2, 12)
    for name, other in zip(MASKS, reversed(MASKS), strict=True):
        given = {"input_ids": ids, "attention_mask": mask_of(name), "use_cache": False}
        if model.config.is_encoder_decoder:
            given |= {"decoder_input_ids": ids, "decoder_attention_mask": mask_of(name)}
            given["attention_mask"] = mask_of(other)
        yield given, mask_of(name).bool()


def assert_near(got, expected):
    assert got.isfinite().all()
    assert (got - expected).abs().max() < 2e-5 * expected.abs().max()


def assert_serves_every_mask(call, expected, model):
    for (given, real), logits in zip(calls_of(model), expected, strict=True):
        assert_near(call(**given).logits[real], logits)


@pytest.mark.parametrize("family", rarely(MASKED, "bloom", "t5"))
def test_every_mask_gives_the_models_logits(family, calls):
    """Padding between tokens too: nothing of it is left to the model's own attention."""
    model = build(family)
    expected = [model(**given).logits[real] for given, real in calls_of(model)]
    patch(model)
    calls.clear()
    assert_serves_every_mask(model, expected, model)
    # Two layers in each of the stacks.
    assert len(calls) == (4 if model.config.is_encoder_decoder else 2) * len(MASKS)


@pytest.mark.parametrize("family", rarely(MASKED, "t5"))
def test_one_compiled_graph_serves_every_mask(family):
    """A graph does not know the mask's values when it is made."""
    model, compiles = build(family), CompileCounterWithBackend("aot_eager")
    expected = [model(**given).logits[real] for given, real in calls_of(model)]
    patch(model)
    compiled = torch.compile(model, backend=compiles, fullgraph=True)
    # The slow cases trace the gradient too.
    with torch.set_grad_enabled(family != "t5"):
        assert_serves_every_mask(compiled, expected, model)
    assert compiles.frame_count == 1
    assert "posenc.attend" in str(compiles.graphs[0].graph)


@pytest.mark.parametrize("family", rarely(MASKED, "bloom"))
def test_one_exported_program_serves_every_mask(family):
    model = build(family)
    expected = [model(**given).logits[real] for given, real in calls_of(model)]
    patch(model)
    first, _ = next(calls_of(model))
    program = torch.export.export(model, (), first).module()
    assert_serves_every_mask(program, expected, model)


@pytest.mark.parametrize(
    ("family", "compiled"),
    [("t5", False), ("bloom", True), *(pytest.param(f, True, marks=SLOW) for f in MASKED[1:])],
)
@torch.no_grad()
def test_a_token_after_a_right_padded_prompt(family, compiled):
    """Padding of the prompt is then between tokens."""
    model, ids = build(family), tokens(2, 12)
    mask, names = mask_of("after-a-right-padded-prompt"), ("input_ids", "attention_mask")
    others = {"use_cache": True}
    if model.config.is_encoder_decoder:
        others |= {"encoder_outputs": model.encoder(ids), "attention_mask": mask_of("holes")}
        names = "decoder_input_ids", "decoder_attention_mask"

    def given(tokens, mask, cache=None):
        return {**others, **dict(zip(names, (tokens, mask), strict=True)), "past_key_values": cache}

    cache = model(**given(ids[:, :-1], mask[:, :-1])).past_key_values
    expected = model(**given(ids[:, -1:], mask, copy.deepcopy(cache))).logits
    patch(model)
    step = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    assert_near(step(**given(ids[:, -1:], mask, cache)).logits, expected)


@pytest.mark.parametrize("family", rarely(["bloom", "t5"], "t5"))
@pytest.mark.parametrize("name", ["left", "ends-and-holes"])
def test_gradients_beside_padding_are_the_models(family, name):
    """A query at padding may see no other key; no gradient becomes NaN by it."""
    model = build(family)
    given, real = dict(zip(MASKS, calls_of(model), strict=True))[name]

    def gradients():
        model.zero_grad()
        logits = model(**given).logits[real]
        logits.backward(weights_like(logits))
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    expected = gradients()
    patch(model)
    assert_near(gradients(), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("family", rarely(["bloom", "mpt", "falcon-groups", "t5"], "t5"))
def test_hidden_keys_change_no_bit_in_half_precision(family, dtype):
    """Their weights are zero, not small: other tokens there give the same logits."""
    model = build(family).to(dtype)
    patch(model)
    for given, real in calls_of(model):
        ids = given["input_ids"]
        name = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
        logits = model(**given).logits[real]
        changed = {**given, name: torch.where(real, ids, (ids + 1) % 99)}
        assert torch.equal(model(**changed).logits[real], logits)


@pytest.mark.parametrize("family", ["bloom", "t5"])
@torch.no_grad()
def test_a_mask_of_the_new_tokens_alone_is_refused(family):
    """One column would hide all keys, or none."""
    model, ids = build(family), tokens(2, 12)
    patch(model)
    if model.config.is_encoder_decoder:
        model = model.decoder
    cache = model(ids, use_cache=True).past_key_values
    mask = mask_of("left")[:, :1]
    with pytest.raises(ValueError, match="must have 13 columns, one for each key, got 1"):
        model(ids[:, :1], past_key_values=cache, attention_mask=mask)


@pytest.mark.parametrize("family", rarely(["bloom", "mpt", "falcon-groups"], "bloom"))
@torch.no_grad()
def test_queries_at_padding_between_tokens_are_the_models(family):
    """They see tokens, by scores that have no rounding of what hides the others."""
    model, ids = build(family), tokens(2, 60)
    mask = torch.ones_like(ids)
    mask[0, 5:40:3], mask[1, 20:50] = 0, 0
    expected = model(input_ids=ids, attention_mask=mask).logits
    patch(model)
    assert_near(model(input_ids=ids, attention_mask=mask).logits, expected)
