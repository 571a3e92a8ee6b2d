import math

import pytest
import torch

from posenc.lab.comparison import training
from posenc.lab.comparison.costs import cost, peak_bytes
from posenc.lab.comparison.decoder import Decoder
from posenc.lab.comparison.plan import Plan, Unit
from posenc.lab.comparison.tasks import TASKS, UNASKED, Batch, Reading
from posenc.lab.comparison.text import Text

# Python numbers in an expression become tensors of a few bytes.
NUMBERS = 100


def test_the_rate_rises_for_a_tenth_and_falls_to_a_twentieth():
    rates = [training.learning_rate(step, 100, 1.0) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9]
    assert rates[9:] == sorted(rates[9:], reverse=True)
    half = 0.05 + 0.95 / 2
    assert rates[50] == pytest.approx(half)
    last = 0.05 + 0.95 * (1 + math.cos(0.99 * math.pi)) / 2
    assert rates[99] == pytest.approx(last)


def test_products_are_in_the_dtype_of_the_plan_and_losses_in_float32():
    tokens = torch.randint(0, 5, (2, 7))
    lost = {}
    for dtype in ("fp32", "bf16"):
        plan = Plan(train_length=6, width=8, layers=1, heads=2, dtype=dtype)
        model = Decoder("rope", plan, symbols=5, seed=0)
        made = []
        model.blocks[0].up.register_forward_hook(lambda *seen, made=made: made.append(seen[2]))
        lost[dtype] = training.losses_of(model, Batch(tokens[:, :-1], tokens[:, 1:]))
        assert made[0].dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
        assert lost[dtype].dtype == torch.float32
    assert torch.allclose(lost["fp32"], lost["bf16"], atol=0.01)


def test_the_loss_is_that_of_the_next_token():
    plan = Plan(train_length=6, width=8, layers=1, heads=2)
    model = Decoder("none", plan, symbols=5, seed=0)
    tokens = torch.randint(0, 5, (2, 7))
    lost = training.losses_of(model, Batch(tokens[:, :-1], tokens[:, 1:]))
    chance = model(tokens[:, :-1]).log_softmax(-1)
    for row in range(2):
        for at in range(6):
            assert lost[row, at].item() == pytest.approx(
                -chance[row, at, tokens[row, at + 1]].item(), abs=1e-6
            )


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


def test_freed_memory_is_not_counted_twice():
    def chain():
        x = torch.zeros(1000)
        for _ in range(10):
            x = x + 1
        return x

    assert peak_bytes(chain) == pytest.approx(2 * 4000, abs=NUMBERS)


def test_views_and_the_callers_tensors_are_not_counted():
    x = torch.zeros(1000)

    def look():
        x.add_(1)
        return x.view(10, 100).t()[2:]

    assert peak_bytes(look) <= NUMBERS


def test_tensors_kept_for_backward_are_counted():
    """The first product is kept until the backward has used it: that is what training holds."""
    w = torch.randn(1000, requires_grad=True)

    def forward():
        with torch.no_grad():
            return w.exp().exp().exp().sum()

    def training():
        w.exp().exp().exp().sum().backward()
        w.grad = None

    assert peak_bytes(forward) == pytest.approx(2 * 4000, abs=NUMBERS)
    assert peak_bytes(training) >= 3 * 4000


def test_memory_that_an_operation_uses_inside_is_counted():
    """A matrix of scores that is gone when attention returns was memory all the same."""
    q = torch.randn(1, 1, 256, 8)
    mask = torch.zeros(256, 256)

    def attend():
        scores = torch.ops.aten._scaled_dot_product_attention_math(q, q, q, mask)[0]
        return scores.shape

    assert peak_bytes(attend) >= 256 * 256 * 4


def test_nothing_is_written_while_it_watches(capfd):
    peak_bytes(lambda: torch.zeros(10))
    assert capfd.readouterr() == ("", "")


def test_a_recalibrated_model_was_trained_on_and_the_first_stays_as_it_was():
    plan = Plan(train_length=8, steps=10, batch=4, width=8, layers=1, heads=2, windows=2)
    data = TASKS["copy"].load(plan)
    model = Decoder("rope", plan, symbols=data.symbols, seed=0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    unit = Unit("copy", "rope", 0)
    dropped = training.evaluate(model, "drope", plan, unit, data)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    model.use("none", 8)
    untrained = training.evaluate(model, "none", plan, unit, data)
    assert dropped["loss"] != untrained["loss"]


def test_the_accuracy_is_that_of_the_answers_alone():
    """A model that always answers with letter 3 is right where 3 is wanted."""
    plan = Plan(train_length=16, width=8, layers=1, heads=2, windows=20, times=(1, 2))
    data = TASKS["copy"].load(plan)
    model = Decoder("none", plan, symbols=data.symbols, seed=0)
    torch.nn.init.zeros_(model.norm.weight)
    torch.nn.init.ones_(model.norm.bias)
    torch.nn.init.zeros_(model.head.weight)
    torch.nn.init.ones_(model.head.weight[3])
    found = training.scores_by_length(model, "none", plan, "copy", data)
    wanted = data.testing(plan, 16).wanted
    share = (wanted == 3).sum().item() / (wanted != UNASKED).sum().item()
    assert found["score"] == pytest.approx([share, share])
    assert found["by_position"] == []


@pytest.mark.parametrize("name", ["rope", "drope", "cope"])
def test_a_cost_has_time_and_memory_of_what_the_encoding_does(name):
    plan = Plan(train_length=8, batch=2, width=16, layers=1, heads=2)
    found = cost(name, plan)
    afterwards = name == "drope"
    assert (found["step"] is None) == (found["step_bytes"] is None) == afterwards
    assert found["read"] > 0
    assert found["read_bytes"] > 64 * 16 * 4
    assert found["parameters"] == (8 * 8 if name == "cope" else 0)
