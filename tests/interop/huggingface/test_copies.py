"""Copies of patched models: deepcopy, DataParallel's replicas, pickles."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch

from posenc.interop.huggingface import patch, unpatch
from support.hf_models import SMALL, Calls, apart, llama, tiny, tokens

# Methods of attention, and a forward of a rotary module that recomposes.
FAMILIES = {
    "LlamaModel": SMALL,
    "Qwen2VLTextModel": {
        **SMALL,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
    },
}


def test_a_copy_is_patched_and_on_its_own():
    model = llama()
    expected = model(tokens()).logits
    patch(model)

    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.model.layers[0].self_attn.q_proj.weight.zero_()
    assert apart(expected, model(tokens()).logits) < 2e-5
    assert apart(expected, twin(tokens()).logits) > 1e-2

    unpatch(twin)
    with Calls() as calls:
        twin(tokens())
    assert calls.names
    with Calls() as calls:
        model(tokens())
    assert not calls.names


def test_a_part_and_its_copy_can_be_unpatched():
    model = llama()
    before = model.model(tokens()).last_hidden_state
    patch(model)
    part = copy.deepcopy(model.model)
    for each in (part, model.model):
        unpatch(each)
        assert torch.equal(each(tokens()).last_hidden_state, before)
        patch(each)


def test_a_replica_runs_on_weights_of_its_own():
    """As DataParallel makes it: a shallow copy that then gets the tensors of its device."""
    model = llama()
    patch(model)
    inner = model.model.layers[0].self_attn
    replica = inner._replicate_for_data_parallel()
    replica.q_proj = torch.nn.Linear(inner.q_proj.in_features, inner.q_proj.out_features)
    states = torch.randn(1, 5, inner.q_proj.in_features)
    tables = model.model.rotary_emb(states, torch.arange(5)[None])
    ours, theirs = (
        each(states, position_embeddings=tables, attention_mask=None)[0]
        for each in (replica, inner)
    )
    assert apart(ours, theirs) > 1e-2
    unpatch(model)
    assert "_replicate_for_data_parallel" not in vars(inner)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pickled_model_comes_back_patched(family):
    model = tiny(family, **FAMILIES[family])
    expected = model(tokens())[0]
    patch(model)

    again = pickle.loads(pickle.dumps(model))

    with Calls() as calls:
        assert torch.equal(again(tokens())[0], model(tokens())[0])
    assert not calls.names
    unpatch(again)
    assert torch.equal(again(tokens())[0], expected)
    assert not any("forward" in vars(module) for module in again.modules())


RUN = """
import pickle, sys, torch
from posenc.interop.huggingface import unpatch
model, ids, expected = pickle.load(sys.stdin.buffer)
got = model(ids).logits
assert torch.allclose(got, expected, atol=1e-6), (got - expected).abs().max()
unpatch(model)
"""


@pytest.mark.slow
def test_a_pickled_model_comes_back_patched_in_another_process():
    model = llama()
    patch(model)
    with torch.no_grad():
        sent = pickle.dumps((model, tokens(), model(tokens()).logits))
    subprocess.run([sys.executable, "-c", RUN], input=sent, check=True, timeout=300)
