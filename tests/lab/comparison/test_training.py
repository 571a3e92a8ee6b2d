import math

import pytest
import torch

from posenc.lab.comparison import training
from posenc.lab.comparison.decoder import Decoder


def test_the_data_order_is_a_function_of_the_seed_and_stays_in_the_text():
    text = torch.arange(50)
    starts = training.batches(text, 200, 4, 8, seed=5)
    assert starts.shape == (200, 4)
    assert torch.equal(starts, training.batches(text, 200, 4, 8, seed=5))
    assert not torch.equal(starts, training.batches(text, 200, 4, 8, seed=6))
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
    model = Decoder("none", symbols=5, width=8, layers=1, heads=2, longest=6, base=2.0, seed=0)
    tokens = torch.randint(0, 5, (2, 7))
    lost = training.next_token_loss(model, tokens)
    chance = model(tokens[:, :-1]).log_softmax(-1)
    for row in range(2):
        for at in range(6):
            assert lost[row, at].item() == pytest.approx(
                -chance[row, at, tokens[row, at + 1]].item(), abs=1e-6
            )


def test_rows_past_the_training_length_are_never_trained():
    model = Decoder("learned", symbols=5, width=8, layers=1, heads=2, longest=32, base=2.0, seed=0)
    before = model.position.pos_emb.weight.detach().clone()
    text = torch.randint(0, 5, (100,))
    starts = training.batches(text, 5, 4, 8, seed=0)
    training.train(
        model,
        text,
        starts,
        length=8,
        peak=0.1,
        name="learned",
        tell=lambda progress: None,
    )
    after = model.position.pos_emb.weight.detach()
    assert torch.equal(after[8:], before[8:])
    assert (after[:8] != before[:8]).any(dim=1).all()
