"""Which models and calls our attention with a bias serves, and which it leaves to the model."""

import copy
import pickle

import pytest
import torch
from torch import nn

from posenc.interop.huggingface import patch
from support.hf_biased import ALIBI, FALCON, T5, build, inputs, padding, rarely, run
from support.hf_models import tiny, tokens


def square_mask(model):
    given = {"input_ids": tokens(3, 40)}
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = given["input_ids"]
    given["attention_mask"] = torch.full((1, 1, 40, 40), -1e9).triu(1)
    return given


def weights(model):
    return {**inputs(model)[0], "output_attentions": True}


# BLOOM's and Falcon's own code takes no mask of four axes.
OWN = [
    ("mpt", square_mask),
    ("t5", square_mask),
    ("bloom", weights),
    ("umt5", weights),
]


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
    theirs = expected.get("attentions") or expected.get("decoder_attentions")
    ours = got.get("attentions") or got.get("decoder_attentions")
    assert (ours is None) == (theirs is None) == (make is not weights)
    assert ours is None or all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("BloomForCausalLM", {**ALIBI, "attention_dropout": 0.5}),
        ("T5ForConditionalGeneration", {**T5, "dropout_rate": 0.5}),
    ],
)
def test_dropout_of_weights_is_the_models_own_in_training(name, changes, calls):
    model = tiny(name, **changes).train()
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


def test_the_report_names_every_layer():
    assert str(patch(build("bloom"))).splitlines() == [
        "transformer.h.0.self_attention (BloomAttention): attention [alibi]",
        "transformer.h.1.self_attention (BloomAttention): attention [alibi]",
    ]
    report = patch(build("umt5"))
    assert [(one.module, one.bias) for one in report.attentions][2:4] == [
        ("decoder.block.0.layer.0.SelfAttention", "buckets"),
        ("decoder.block.0.layer.1.EncDecAttention", "none"),
    ]


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
