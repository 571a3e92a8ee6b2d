import math

import pytest
import torch

from posenc.lab.comparison import training
from posenc.lab.comparison.decoder import Decoder
from posenc.lab.comparison.plan import Plan, Unit
from posenc.lab.comparison.training import peak_bytes

# Python numbers in an expression become tensors of a few bytes.
NUMBERS = 100


def test_the_data_order_is_a_function_of_the_seed_and_stays_in_the_text():
    text = torch.arange(50)
    plan = Plan(steps=200, batch=4, train_length=8)
    starts = training.batches(text, plan, seed=5)
    assert starts.shape == (200, 4)
    assert torch.equal(starts, training.batches(text, plan, seed=5))
    assert not torch.equal(starts, training.batches(text, plan, seed=6))
    assert starts.min() == 0
    # The last sequence has 8 symbols and the one after them.
    assert starts.max() == 50 - 8 - 1


def test_the_rate_rises_for_a_tenth_and_falls_to_a_twentieth():
    rates = [training.learning_rate(step, 100, 1.0) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9]
    assert rates[9:] == sorted(rates[9:], reverse=True)
    half = 0.05 + 0.95 / 2
    assert rates[50] == pytest.approx(half)
    last = 0.05 + 0.95 * (1 + math.cos(0.99 * math.pi)) / 2
    assert rates[99] == pytest.approx(last)


def test_the_loss_is_that_of_the_next_token():
    plan = Plan(train_length=6, width=8, layers=1, heads=2)
    model = Decoder("none", plan, symbols=5, seed=0)
    tokens = torch.randint(0, 5, (2, 7))
    lost = training.next_token_loss(model, tokens)
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
    training.train(model, text, plan, Unit("learned", 0), lambda label, done: None)
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
