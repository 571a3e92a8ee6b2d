import dataclasses

import pytest
import torch

from posenc.lab.comparison.decoder import Decoder
from posenc.lab.comparison.encodings import ENCODINGS
from posenc.lab.comparison.plan import Plan
from posenc.lab.comparison.tasks import Batch
from posenc.lab.comparison.training import losses_of

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
    # Biases that are zero before training know no order yet.
    for weight in model.position.parameters():
        torch.nn.init.normal_(weight)
    tokens = torch.tensor([[1, 2, 3, 4, 5], [3, 1, 4, 2, 5]])
    last = model(tokens)[:, -1]
    assert not torch.allclose(last[0], last[1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("encoding", TRAINED[1:])
def test_one_step_trains_every_number_of_an_encoding(encoding):
    """A parameter that the loss does not reach would be compared untrained."""
    model = decoder(encoding)
    # At the first weights of 0.02, gradients through attention are below the rounding.
    for block in model.blocks:
        torch.nn.init.normal_(block.qkv.weight, std=0.4)
    tokens = torch.randint(0, 11, (4, PLAN.train_length + 1))
    losses_of(model, Batch(tokens[:, :-1], tokens[:, 1:])).mean().backward()
    before = [p.detach().clone() for p in model.position.parameters()]
    torch.optim.AdamW(model.weight_groups(0.1), lr=1e-2).step()
    for old, new in zip(before, model.position.parameters(), strict=True):
        assert new.isfinite().all()
        assert not torch.equal(old, new)


def test_every_bias_has_the_scale_of_the_others():
    """T5's own is one: without the bias, which is zero here, its attention must be theirs."""
    tokens = torch.randint(0, 11, (2, 8))
    none, t5 = (decoder(name) for name in ("none", "t5"))
    for model in (none, t5):
        drawn = torch.Generator().manual_seed(0)
        for block in model.blocks:
            torch.nn.init.normal_(block.qkv.weight, std=0.4, generator=drawn)
    torch.testing.assert_close(t5(tokens), none(tokens), rtol=0, atol=1e-5)


def test_without_an_encoding_one_layer_sees_a_set():
    model = decoder("none", ONE_LAYER)
    tokens = torch.tensor([[1, 2, 3, 4, 5], [3, 1, 4, 2, 5]])
    last = model(tokens)[:, -1]
    assert torch.allclose(last[0], last[1], rtol=0, atol=1e-5)


AFTERWARDS = [name for name, encoding in ENCODINGS.items() if encoding.trained_as]


@pytest.mark.parametrize("name", [n for n in AFTERWARDS if not ENCODINGS[n].recalibration])
def test_a_rule_changes_what_the_same_weights_say_past_the_training_length_alone(name):
    """Otherwise two lines of the picture would be one."""
    model = decoder("rope")
    # At the first weights of 0.02, attention is too even for a rule to show.
    drawn = torch.Generator().manual_seed(0)
    for block in model.blocks:
        torch.nn.init.normal_(block.qkv.weight, std=0.4, generator=drawn)
    tokens = torch.arange(24)[None] % 11
    plain = model(tokens)
    model.use(name, 24)
    assert (model(tokens) - plain).abs().max() > 1e-3
    model.use(name, 8)
    torch.testing.assert_close(model(tokens[:, :8]), plain[:, :8], rtol=0, atol=1e-5)


def test_weight_decay_is_for_matrices_and_never_for_tables():
    """A learned row past the training length must stay as LearnedPosEmbedding made it."""
    model = decoder("learned")
    decayed, others = (group["params"] for group in model.weight_groups(0.1))
    tables = {id(model.embedding.weight), id(model.position.pos_emb.weight)}
    assert not tables & {id(p) for p in decayed}
    assert {p.dim() for p in decayed} == {2}
    assert len(decayed) + len(others) == len(list(model.parameters()))


def test_a_dropped_rotation_leaves_a_decoder_without_an_encoding():
    tokens = torch.arange(24)[None] % 11
    none, dropped = decoder("none"), decoder("rope")
    dropped.use("drope", 24)
    assert torch.equal(dropped(tokens), none(tokens))


def test_a_skipped_layer_attends_without_an_encoding():
    """Layers 0 and 2 of three rotate; the second sees a set."""
    encoding = ENCODINGS["rope-nope"]
    assert [encoding.acts_in(layer) for layer in range(4)] == [True, False, True, False]
    model, called = decoder("rope-nope", dataclasses.replace(PLAN, layers=3)), []
    model.position.register_forward_hook(lambda *_: called.append(1))
    model(torch.arange(8)[None])
    assert len(called) == 2


def test_queries_and_keys_may_become_wider():
    """Their products keep the scale of the head's own width."""

    class Doubled(torch.nn.Module):
        def forward(self, q, k):
            return torch.cat([q, q], -1), torch.cat([k, torch.zeros_like(k)], -1)

    tokens = torch.arange(8)[None]
    plain, wide = decoder("none"), decoder("rope")
    wide.position = Doubled()
    torch.testing.assert_close(wide(tokens), plain(tokens), rtol=0, atol=1e-6)


def test_every_encoding_says_whether_it_is_trained():
    assert ENCODINGS["alibi"].how == "trained"
    assert ENCODINGS["rope-yarn"].how == "applied to RoPE's model"
    assert ENCODINGS["drope"].how == "applied to RoPE's model, then trained further"
