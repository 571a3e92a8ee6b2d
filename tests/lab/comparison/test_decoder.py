import pytest
import torch

import posenc
from posenc.lab.comparison.decoder import Decoder
from posenc.lab.comparison.encodings import ENCODINGS

SIZES = {"symbols": 11, "width": 16, "layers": 2, "heads": 2, "longest": 24, "base": 8.0}
TRAINED = ["none", "sinusoidal", "learned", "rope", "alibi"]


@pytest.mark.parametrize("encoding", TRAINED)
def test_no_token_sees_a_later_one(encoding):
    model = Decoder(encoding, **SIZES, seed=0)
    tokens = torch.randint(0, 11, (2, 24))
    changed = tokens.clone()
    changed[:, 17:] = (changed[:, 17:] + 1) % 11
    before, after = model(tokens), model(changed)
    assert torch.allclose(before[:, :17], after[:, :17], rtol=0, atol=1e-6)
    assert not torch.allclose(before[:, 17:], after[:, 17:], rtol=0, atol=1e-3)


@pytest.mark.parametrize("encoding", TRAINED[1:])
def test_all_encodings_begin_with_the_same_weights(encoding):
    """Otherwise the comparison would be one of seeds."""
    plain, other = (Decoder(name, **SIZES, seed=3) for name in ("none", encoding))
    shared = dict(other.named_parameters())
    for name, weight in plain.named_parameters():
        assert torch.equal(weight, shared[name])


@pytest.mark.parametrize("encoding", TRAINED[1:])
def test_every_encoding_sees_the_order_of_what_came_before(encoding):
    """A model without one cannot: earlier tokens in another order are the same set of keys."""
    model = Decoder(encoding, **{**SIZES, "layers": 1}, seed=0)
    # At the first weights of 0.02, attention is too even for order to show.
    for block in model.blocks:
        for part in (block.attention.qkv, block.attention.out):
            torch.nn.init.normal_(part.weight, std=0.4)
    tokens = torch.tensor([[1, 2, 3, 4, 5], [3, 1, 4, 2, 5]])
    last = model(tokens)[:, -1]
    assert not torch.allclose(last[0], last[1], rtol=0, atol=1e-4)


def test_without_an_encoding_one_layer_sees_a_set():
    model = Decoder("none", **{**SIZES, "layers": 1}, seed=0)
    tokens = torch.tensor([[1, 2, 3, 4, 5], [3, 1, 4, 2, 5]])
    last = model(tokens)[:, -1]
    assert torch.allclose(last[0], last[1], rtol=0, atol=1e-5)


def test_a_rule_changes_rope_until_it_is_taken_away():
    model = Decoder("rope", **SIZES, seed=0)
    tokens = torch.randint(0, 11, (1, 24))
    plain = model(tokens)
    model.stretch(posenc.scaling.Linear(4.0))
    assert not torch.equal(model(tokens), plain)
    model.stretch(None)
    assert torch.equal(model(tokens), plain)


@pytest.mark.parametrize("name", [name for name, e in ENCODINGS.items() if e.stretch])
def test_every_rule_of_the_comparison_changes_what_the_same_weights_say(name):
    """Otherwise two lines of the picture would be one."""
    model = Decoder("rope", **SIZES, seed=0)
    # At the first weights of 0.02, attention is too even for a rule to show.
    drawn = torch.Generator().manual_seed(0)
    for block in model.blocks:
        torch.nn.init.normal_(block.attention.qkv.weight, std=0.4, generator=drawn)
    tokens = torch.arange(24)[None] % 11
    plain = model(tokens)
    model.stretch(ENCODINGS[name].stretch(4.0, 6))
    assert (model(tokens) - plain).abs().max() > 1e-3


def test_weight_decay_is_for_matrices_and_never_for_tables():
    """A learned row past the training length must stay as LearnedPosEmbedding made it."""
    model = Decoder("learned", **SIZES, seed=0)
    decayed, others = (group["params"] for group in model.weight_groups(0.1))
    tables = {id(model.embedding.weight), id(model.position.pos_emb.weight)}
    assert not tables & {id(p) for p in decayed}
    assert {p.dim() for p in decayed} == {2}
    assert len(decayed) + len(others) == len(list(model.parameters()))
