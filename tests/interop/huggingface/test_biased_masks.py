"""Every mask of two axes on our attention with a bias: eager, compiled and exported."""

import copy

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from posenc.interop.huggingface import patch
from support.hf_biased import build, rarely
from support.hf_models import tokens

# BLOOM's own GELU.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated")
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
FAMILIES = ["bloom", "mpt", "falcon-groups", "falcon-multi-query", "t5", "umt5"]


def mask_of(name):
    return torch.tensor([[int(seen) for seen in row] for row in MASKS[name]])


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


@pytest.mark.parametrize("family", rarely(FAMILIES, "bloom", "t5"))
def test_every_mask_gives_the_models_logits(family, calls):
    """Padding between tokens too: nothing of it is left to the model's own attention."""
    model = build(family)
    expected = [model(**given).logits[real] for given, real in calls_of(model)]
    patch(model)
    for (given, real), logits in zip(calls_of(model), expected, strict=True):
        calls.clear()
        assert_near(model(**given).logits[real], logits)
        # Two layers in each of the stacks.
        assert len(calls) == (4 if model.config.is_encoder_decoder else 2)


@pytest.mark.parametrize("family", rarely(FAMILIES, "bloom", "t5"))
def test_one_compiled_graph_serves_every_mask(family):
    """A graph does not know the mask's values when it is made."""
    model, compiles = build(family), CompileCounterWithBackend("aot_eager")
    expected = [model(**given).logits[real] for given, real in calls_of(model)]
    patch(model)
    compiled = torch.compile(model, backend=compiles, fullgraph=True)
    for (given, real), logits in zip(calls_of(model), expected, strict=True):
        assert_near(compiled(**given).logits[real], logits)
    assert compiles.frame_count == 1
    assert "posenc.attend" in str(compiles.graphs[0].graph)


@pytest.mark.parametrize("family", rarely(FAMILIES, "bloom", "t5"))
def test_one_exported_program_serves_every_mask(family):
    model = build(family)
    expected = [model(**given).logits[real] for given, real in calls_of(model)]
    patch(model)
    first, _ = next(calls_of(model))
    program = torch.export.export(model, (), first).module()
    for (given, real), logits in zip(calls_of(model), expected, strict=True):
        assert_near(program(**given).logits[real], logits)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("family", rarely(FAMILIES, "bloom", "t5"))
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
        (logits * torch.linspace(-1, 1, logits.numel()).view(logits.shape)).sum().backward()
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
    with pytest.raises(ValueError, match="must have 13 columns, one for each key, got 1"):
        model(ids[:, :1], past_key_values=cache, attention_mask=torch.tensor([[1], [0]]))
