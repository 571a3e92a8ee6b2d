import dataclasses

import pytest
import torch

from posenc.lab.comparison.decoder import Decoder
from posenc.lab.comparison.plan import ENCODINGS, Plan

PLAN = Plan(train_length=8, times=(1, 3), width=16, layers=2, heads=2)
ONE_LAYER = dataclasses.replace(PLAN, layers=1)
TRAINED = [name for name, encoding in ENCODINGS.items() if encoding.trained_as is None]


def decoder(encoding, plan=PLAN, seed=0):
    return Decoder(encoding, plan, symbols=11, seed=seed)


@pytest.mark.parametrize("encoding", TRAINED)
def test_no_token_sees_a_later_one(encoding):
    model = decoder(encoding)
    tokens = torch.randint(0, 11, (2, 24))
    changed = tokens.clone()
    changed[:, 17:] = (changed[:, 17:] + 1) % 11
    before, after = model(tokens), model(changed)
    assert torch.allclose(before[:, :17], after[:, :17], rtol=0, atol=1e-6)
    assert not torch.allclose(before[:, 17:], after[:, 17:], rtol=0, atol=1e-3)


@pytest.mark.parametrize("encoding", TRAINED[1:])
def test_all_encodings_begin_with_the_same_weights(encoding):
    """Otherwise the comparison would be one of seeds."""
    plain, other = (decoder(name, seed=3) for name in ("none", encoding))
    shared = dict(other.named_parameters())
    for name, weight in plain.named_parameters():
        assert torch.equal(weight, shared[name])


@pytest.mark.parametrize("encoding", TRAINED[1:])
def test_every_encoding_sees_the_order_of_what_came_before(encoding):
    """A model without one cannot: earlier tokens in another order are the same set of keys."""
    model = decoder(encoding, ONE_LAYER)
    # At the first weights of 0.02, attention is too even for order to show.
    for block in model.blocks:
        for part in (block.qkv, block.out):
            torch.nn.init.normal_(part.weight, std=0.4)
    tokens = torch.tensor([[1, 2, 3, 4, 5], [3, 1, 4, 2, 5]])
    last = model(tokens)[:, -1]
    assert not torch.allclose(last[0], last[1], rtol=0, atol=1e-4)


def test_without_an_encoding_one_layer_sees_a_set():
    model = decoder("none", ONE_LAYER)
    tokens = torch.tensor([[1, 2, 3, 4, 5], [3, 1, 4, 2, 5]])
    last = model(tokens)[:, -1]
    assert torch.allclose(last[0], last[1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", [name for name, e in ENCODINGS.items() if e.trained_as])
def test_a_rule_changes_what_the_same_weights_say_past_the_training_length_alone(name):
    """Otherwise two lines of the picture would be one."""
    model = decoder("rope")
    # At the first weights of 0.02, attention is too even for a rule to show.
    drawn = torch.Generator().manual_seed(0)
    for block in model.blocks:
        torch.nn.init.normal_(block.qkv.weight, std=0.4, generator=drawn)
    tokens = torch.arange(24)[None] % 11
    plain = model(tokens)
    model.position = ENCODINGS[name].build(PLAN, 24)
    assert (model(tokens) - plain).abs().max() > 1e-3
    model.position = ENCODINGS[name].build(PLAN, 8)
    assert torch.equal(model(tokens), plain)


def test_weight_decay_is_for_matrices_and_never_for_tables():
    """A learned row past the training length must stay as LearnedPosEmbedding made it."""
    model = decoder("learned")
    decayed, others = (group["params"] for group in model.weight_groups(0.1))
    tables = {id(model.embedding.weight), id(model.position.pos_emb.weight)}
    assert not tables & {id(p) for p in decayed}
    assert {p.dim() for p in decayed} == {2}
    assert len(decayed) + len(others) == len(list(model.parameters()))
