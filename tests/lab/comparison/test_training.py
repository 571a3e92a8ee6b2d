import dataclasses

import pytest
import torch

from posenc.lab.comparison import training
from posenc.lab.comparison.encodings import ENCODINGS
from posenc.lab.comparison.plan import Plan, Unit
from posenc.lab.comparison.tasks import IGNORED, TASKS, Batch, Reading
from posenc.lab.comparison.text import Text
from posenc.lab.comparison.training import Decoder, cost, losses_of

PLAN = Plan(train_length=8, times=(1, 3), width=16, layers=2, heads=2)
ONE_LAYER = dataclasses.replace(PLAN, layers=1)
TRAINED = [name for name, encoding in ENCODINGS.items() if encoding.trained_as is None]


def decoder(encoding, plan=PLAN, seed=0):
    return Decoder(encoding, plan, symbols=11, seed=seed)


def sharp_decoder(encoding, plan=PLAN):
    """At the first weights, of 0.02, attention is too even to show anything."""
    model, generator = decoder(encoding, plan), torch.Generator().manual_seed(0)
    for block in model.blocks:
        for part in (block.qkv, block.out):
            torch.nn.init.normal_(part.weight, std=0.4, generator=generator)
    return model


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
def test_every_encoding_sees_the_order_of_earlier_tokens(encoding):
    """A model without one cannot: earlier tokens in another order are the same set of keys."""
    model = sharp_decoder(encoding, ONE_LAYER)
    # Biases that are zero before training know no order yet.
    for weight in model.position.parameters():
        torch.nn.init.normal_(weight)
    tokens = torch.tensor([[1, 2, 3, 4, 5], [3, 1, 4, 2, 5]])
    last = model(tokens)[:, -1]
    assert not torch.allclose(last[0], last[1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("encoding", TRAINED[1:])
def test_one_step_trains_every_number_of_an_encoding(encoding):
    """A parameter that the loss does not reach would be compared untrained."""
    model = sharp_decoder(encoding)
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
    none, t5 = (sharp_decoder(name) for name in ("none", "t5"))
    torch.testing.assert_close(t5(tokens), none(tokens), rtol=0, atol=1e-5)


def test_without_an_encoding_one_layer_sees_a_set():
    model = decoder("none", ONE_LAYER)
    tokens = torch.tensor([[1, 2, 3, 4, 5], [3, 1, 4, 2, 5]])
    last = model(tokens)[:, -1]
    assert torch.allclose(last[0], last[1], rtol=0, atol=1e-5)


AFTERWARDS = [name for name, encoding in ENCODINGS.items() if encoding.trained_as]


@pytest.mark.parametrize("name", [n for n in AFTERWARDS if not ENCODINGS[n].recalibration])
def test_a_rule_changes_the_output_only_past_the_training_length(name):
    """Otherwise two lines of the picture would be one."""
    model = sharp_decoder("rope")
    tokens = torch.arange(24)[None] % 11
    plain = model(tokens)
    model.use(name, 24)
    assert (model(tokens) - plain).abs().max() > 1e-3
    model.use(name, 8)
    torch.testing.assert_close(model(tokens[:, :8]), plain[:, :8], rtol=0, atol=1e-5)


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


def test_products_are_in_the_dtype_of_the_plan_and_losses_in_float32():
    tokens = torch.randint(0, 5, (2, 7))
    lost = {}
    for dtype in ("fp32", "bf16"):
        plan = Plan(train_length=6, width=8, layers=1, heads=2, dtype=dtype)
        model = Decoder("rope", plan, symbols=5, seed=0)
        made = []
        model.blocks[0].up.register_forward_hook(lambda *seen, made=made: made.append(seen[2]))
        lost[dtype] = losses_of(model, Batch(tokens[:, :-1], tokens[:, 1:]))
        assert made[0].dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
        assert lost[dtype].dtype == torch.float32
    assert torch.allclose(lost["fp32"], lost["bf16"], atol=0.01)


def test_rows_past_the_training_length_are_never_trained():
    plan = Plan(train_length=8, steps=5, batch=4, width=8, layers=1, heads=2, learning_rate=0.1)
    model = Decoder("learned", plan, symbols=5, seed=0)
    before = model.position.pos_emb.weight.detach().clone()
    text = torch.randint(0, 5, (100,))
    data = Reading(Text("", text, text, 5, ""))
    training.train(model, data, plan, Unit("text", "learned", 0), lambda label, done: None)
    after = model.position.pos_emb.weight.detach()
    assert len(after) == 64
    assert torch.equal(after[8:], before[8:])
    assert (after[:8] != before[:8]).any(dim=1).all()


def test_a_recalibrated_model_was_trained_on_and_the_first_stays_as_it_was():
    plan = Plan(train_length=8, steps=10, batch=4, width=8, layers=1, heads=2, windows=2)
    data = TASKS["text"].load(plan)
    model = Decoder("rope", plan, symbols=data.symbols, seed=0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    unit = Unit("text", "rope", 0)
    dropped = training.evaluate(model, "drope", plan, unit, data)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    model.use("none", 8)
    assert dropped != training.evaluate(model, "none", plan, unit, data)


def test_the_accuracy_is_that_of_the_answers():
    """A model that always answers with letter 3 is right where 3 is the target."""
    plan = Plan(train_length=16, width=8, layers=1, heads=2, windows=20, times=(1, 2))
    data = TASKS["copy"].load(plan)
    model = Decoder("none", plan, symbols=data.symbols, seed=0)
    torch.nn.init.zeros_(model.norm.weight)
    torch.nn.init.ones_(model.norm.bias)
    torch.nn.init.zeros_(model.head.weight)
    torch.nn.init.ones_(model.head.weight[3])
    found = training.scores_by_length(model, "none", plan, "copy", data)
    targets = data.testing(plan, 16).targets
    share = (targets == 3).sum().item() / (targets != IGNORED).sum().item()
    assert found["score"] == pytest.approx([share, share])
    assert found["by_position"] == []


@pytest.mark.parametrize("name", ["rope", "drope", "cope"])
def test_a_cost_has_the_time_and_the_parameters_of_the_encoding(name):
    plan = Plan(train_length=8, batch=2, width=16, layers=1, heads=2)
    found = cost(name, plan)
    assert (found["step"] is None) == (name == "drope")
    assert found["read"] > 0
    # Memory is counted on CUDA.
    assert found["step_bytes"] is found["read_bytes"] is None
    assert found["parameters"] == (8 * 8 if name == "cope" else 0)
