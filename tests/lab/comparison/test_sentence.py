import pytest

from posenc.lab.comparison.plan import Plan
from posenc.lab.comparison.report import sentence


def compared(scores, times=(1, 2, 8), task="text"):
    """A plan, a task, and rows of made-up scores at the first, a middle and the last length."""
    rows = [
        {
            "encoding": encoding,
            "label": label,
            "score": score,
            "worse": [each - score[0] for each in score],
        }
        for (encoding, label), score in scores.items()
    ]
    return Plan(train_length=32, times=times), task, rows


NONE, LEARNED = ("none", "none"), ("learned", "learned")
ROPE, ALIBI = ("rope", "RoPE"), ("alibi", "ALiBi")


def test_the_sentence_names_the_least_and_the_largest_rise_with_their_losses():
    """The rise tells, not the loss: here RoPE has the lowest one and is neither."""
    found = compared(
        {LEARNED: [1.684, 2.5, 3.191], ROPE: [1.2, 3.9, 1.4], ALIBI: [1.579, 1.58, 1.594]}
    )
    assert sentence(*found) == (
        "From 32 to 256 symbols, a transformer trained on 32 kept its loss best with "
        "ALiBi (1.58 → 1.59) and worst with learned positions (1.68 → 3.19)."
    )


def test_the_sentence_is_true_of_losses_that_fall_and_of_no_encoding():
    found = compared({NONE: [1.5, 1.5, 1.5], ALIBI: [1.6, 1.5, 1.4]}, times=(2, 3, 4))
    assert sentence(*found) == (
        "From 64 to 128 symbols, a transformer trained on 32 kept its loss best with "
        "ALiBi (1.60 → 1.40) and worst with no encoding (1.50 → 1.50)."
    )


def test_of_a_game_the_last_accuracy_tells():
    """An encoding that never found an answer keeps that best."""
    found = compared(
        {NONE: [0.1, 0.1, 0.1], ROPE: [1.0, 0.9, 0.5], ALIBI: [1.0, 0.0, 0.0]}, task="copy"
    )
    assert sentence(*found) == (
        "In copying at a distance, a transformer trained on 32 symbols was right at 256 most often "
        "with RoPE (1.00 → 0.50) and least with ALiBi (1.00 → 0.00)."
    )


def test_a_game_that_nobody_learned_has_no_winner():
    found = compared({NONE: [0.1, 0.1, 0.1], ROPE: [0.3, 0.2, 0.2]}, task="copy")
    assert sentence(*found) == (
        "No encoding learned copying at a distance in 1000 steps: train longer."
    )


@pytest.mark.parametrize(
    "found",
    [
        pytest.param(compared({}), id="nothing-finished"),
        pytest.param(compared({ALIBI: [1.0, 1.0, 1.0]}), id="one-encoding"),
        pytest.param(compared({ROPE: [1.0], ALIBI: [2.0]}, times=(1,)), id="one-length"),
    ],
)
def test_where_nothing_can_be_compared_nothing_is_said(found):
    assert sentence(*found) == ""
