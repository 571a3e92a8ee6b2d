"""Models of transformers with ALiBi or T5's buckets on our attention."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from posenc.interop.huggingface import biased, patch, patched, unpatch
from support.hf_biased import DECODERS, FAMILIES, build, inputs, rarely, run
from support.hf_models import tiny, tokens

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
    prompt, mask = tokens(3, 12), torch.ones(3, 12, dtype=torch.long)
    mask[1, :5] = 0
    how = {"do_sample": False, "max_new_tokens": 8, "min_new_tokens": 8, "pad_token_id": 0, **how}
    return model.generate(prompt, attention_mask=mask, **how)


@pytest.mark.parametrize("few", [biased.FEW_SCORES, 0], ids=["matrix", "kernel"])
@pytest.mark.parametrize("family", rarely([*DECODERS, "t5", "umt5"], "bloom", "t5"))
def test_generate_gives_the_same_tokens(family, few, calls, monkeypatch):
    monkeypatch.setattr(biased, "FEW_SCORES", few)
    model = build(family)
    expected, beams = generated(model), generated(model, num_beams=2)

    patch(model)
    calls.clear()
    assert torch.equal(generated(model), expected)
    # Every layer of every step.
    assert len(calls) == 16 + 2 * model.config.is_encoder_decoder
    assert torch.equal(generated(model, num_beams=2), beams)


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

    Inside of our attention, tests/attention looks.
    """
    length = 512
    changes = {"max_seq_len": length} if family == "mpt" else {}
    name, small = FAMILIES[family]
    model = tiny(name, **{**small, **changes})
    given = {"input_ids": tokens(1, length), "use_cache": False}
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = tokens(1, length)
    if padded:
        given["attention_mask"] = (torch.arange(length) > 9).long()[None]

    with Largest() as theirs, torch.no_grad():
        model(**given)
    patch(model)
    with Largest() as ours:
        model(**given).logits.sum().backward()

    assert theirs.elements >= length * length
    assert ours.elements < length * length / 2


# BLOOM's own GELU.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
@pytest.mark.slow
@pytest.mark.parametrize("family", [*DECODERS, "t5", "umt5"])
def test_a_patched_model_compiles_without_a_break(family):
    model = build(family)
    patch(model)
    given, real = inputs(model)
    expected = model(**given).logits[real]

    got = torch.compile(model, backend="eager", fullgraph=True)(**given, use_cache=False)

    assert (got.logits[real] - expected).abs().max() < 2e-5 * expected.abs().max()


@pytest.mark.slow
def test_a_patched_model_exports():
    model = tiny("MptModel", **{**FAMILIES["mpt"][1], "use_cache": False})
    patch(model)
    given, real = inputs(model)

    program = torch.export.export(model, (), given).module()

    expected, got = (one(**given).last_hidden_state[real] for one in (model, program))
    assert (got - expected).abs().max() < 2e-5 * expected.abs().max()
