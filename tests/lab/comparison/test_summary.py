import pytest

from posenc.lab.comparison.charts import board
from posenc.lab.comparison.plan import Plan
from posenc.lab.comparison.report import scores
from posenc.lab.comparison.summary import summarize

PLAN = Plan(encodings=("none", "rope", "rope-yarn", "alibi"), tasks=("text", "copy"), times=(1, 8))


def units(task, scores):
    """Made-up trainings: the scores of each seed at both lengths, by encoding."""
    found = {}
    for name, seeds in scores.items():
        for seed, score in enumerate(seeds):
            test = {"score": score, "loss": score, "by_position": []}
            found[f"{task}-{name}-{seed}"] = {
                "task": task,
                "seed": seed,
                "curve": {"step": [1], "loss": [float(seed)]},
                "tests": {name: test},
            }
    return found


SCORES = {
    "none": [[2.0, 3.0], [2.2, 3.2]],
    "rope": [[1.0, 4.0], [1.4, 4.4]],
    "rope-yarn": [[1.0, 2.0], [1.4, 2.2]],
    "alibi": [[1.3, 1.0], [1.9, 1.2]],
}


def test_rows_are_ranked_at_each_length_by_their_mean():
    rows = {row["encoding"]: row for row in summarize(PLAN, units("text", SCORES))["text"]}
    assert list(rows) == list(PLAN.encodings)
    assert {name: row["rank"] for name, row in rows.items()} == {
        "none": [4, 3],
        "rope": [1, 4],
        "rope-yarn": [1, 2],
        "alibi": [3, 1],
    }
    assert rows["none"]["score"] == pytest.approx([2.1, 3.1])
    assert (rows["none"]["low"], rows["none"]["high"]) == ([2.0, 3.0], [2.2, 3.2])
    assert rows["none"]["worse"] == pytest.approx([0.0, 1.0])
    assert rows["none"]["curve"]["loss"] == [0.5]


def test_a_range_that_reaches_that_of_the_best_is_level_with_it():
    """ALiBi's best seed, 1.3, is below 1.4, the worst of RoPE's."""
    rows = {row["encoding"]: row for row in summarize(PLAN, units("text", SCORES))["text"]}
    assert {name: row["level"] for name, row in rows.items()} == {
        "none": [False, False],
        "rope": [True, False],
        "rope-yarn": [True, False],
        "alibi": [True, True],
    }


def test_of_an_accuracy_more_is_better():
    rows = {row["encoding"]: row for row in summarize(PLAN, units("copy", SCORES))["copy"]}
    assert [rows[name]["rank"][1] for name in PLAN.encodings] == [2, 1, 3, 4]
    assert rows["rope"]["worse"] == pytest.approx([0.0, -3.0])
    assert [rows[name]["level"][0] for name in PLAN.encodings] == [True, False, False, False]


def test_an_encoding_without_a_finished_seed_has_no_row():
    done = units("text", {"alibi": SCORES["alibi"]})
    summary = summarize(PLAN, done)
    assert [row["encoding"] for row in summary["text"]] == ["alibi"]
    assert summary["copy"] == []


def test_the_board_has_every_score_with_the_best_mean_rank_first():
    """RoPE and YaRN have 2.25 on average, the others 2.5; equal ones stay in the plan's order."""
    both = units("text", SCORES) | units("copy", SCORES)
    drawn = board(PLAN, summarize(PLAN, both))
    (ax,) = drawn.axes
    names = [label.get_text() for label in ax.get_yticklabels()]
    assert names == ["RoPE", "RoPE + YaRN *", "none", "ALiBi"]
    cells = [text.get_text() for text in ax.texts][: 4 * len(names)]
    assert cells[4:8] == ["1.20", "2.10", "120%", "210%"]
    assert "* applied to a trained model" in ax.get_xlabel()


def test_a_score_is_shown_with_half_the_range_of_its_seeds():
    (row,) = summarize(PLAN, units("text", {"alibi": SCORES["alibi"]}))["text"]
    assert scores(row) == ["1.600 ± 0.300", "1.100 ± 0.100"]
    (alone,) = summarize(PLAN, units("text", {"alibi": SCORES["alibi"][:1]}))["text"]
    assert scores(alone) == ["1.300", "1.000"]
