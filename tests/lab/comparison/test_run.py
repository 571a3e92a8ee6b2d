import json
import multiprocessing
import os
from collections import Counter

import pytest

from posenc.lab.comparison.plan import Plan
from posenc.lab.comparison.report import scores
from posenc.lab.comparison.run import FILES, RESULTS, Run, summarize

TINY = {
    "train_length": 8,
    "steps": 6,
    "batch": 2,
    "width": 16,
    "layers": 1,
    "heads": 2,
    "windows": 3,
}
ONE = Plan(**TINY, encodings=("none",))


def run_in(folder, plan):
    run = Run(folder, plan)
    run.begin()
    run.go()
    return run


def numbers(folder):
    """Everything of a run but the times, which differ."""
    results = json.loads((folder / RESULTS).read_text())
    assert results["complete"]
    return results["units"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The numbers of a run that nobody stopped."""
    folder = tmp_path_factory.mktemp("whole")
    run_in(folder, Plan(**TINY))
    return numbers(folder)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The text of a results.json whose run is complete."""
    return (run_in(tmp_path_factory.mktemp("finished"), ONE).folder / RESULTS).read_text()


def test_a_run_tests_every_encoding_at_every_length(whole):
    assert list(whole) == [
        f"text-{name}-0" for name in ("none", "sinusoidal", "learned", "rope", "alibi")
    ]
    assert list(whole["text-rope-0"]["tests"]) == ["rope", "rope-yarn"]
    for unit in whole.values():
        for test in unit["tests"].values():
            assert len(test["score"]) == 4
            assert len(test["by_position"]) == 32
        assert len(unit["curve"]["loss"]) == 6


@pytest.mark.parametrize(
    ("unit", "step"),
    [
        pytest.param("text-none-0", 1, id="after-the-first-step"),
        pytest.param("text-alibi-0", 6, id="after-the-last-step"),
    ],
)
def test_a_run_that_was_stopped_goes_on_to_the_same_numbers(tmp_path, whole, unit, step):
    """What was finished is kept; the training that was stopped starts again."""

    steps = Counter()

    def stop(label, done):
        steps[label.split(",")[0]] += ", loss" in label
        if steps[unit] == step:
            raise KeyboardInterrupt

    run = Run(tmp_path, Plan(**TINY))
    run.begin()
    with pytest.raises(KeyboardInterrupt):
        run.go(stop)
    begun = []
    resumed = Run.resume(tmp_path)
    costs = dict(resumed.results["costs"])
    resumed.go(lambda label, done: begun.append(label.split(",")[0]))
    assert resumed.results["costs"] == costs
    assert numbers(tmp_path) == whole
    assert list(dict.fromkeys(begun)) == list(whole)[list(whole).index(unit) :]
    assert os.listdir(tmp_path) == [RESULTS]


def test_a_run_with_another_text_is_not_resumed(tmp_path):
    file = tmp_path / "text"
    file.write_bytes(bytes(range(256)) * 40)
    out = tmp_path / "out"
    Run(out, Plan(**TINY, text=str(file))).begin()
    file.write_bytes(bytes(range(255, -1, -1)) * 40)
    with pytest.raises(ValueError, match="has changed since"):
        Run.resume(out)


@pytest.mark.slow
def test_several_jobs_give_the_numbers_of_one_in_its_order(tmp_path, whole):
    run = Run(tmp_path, Plan(**TINY))
    run.begin()
    told = []
    run.go(lambda label, done: told.append(done), jobs=2)
    assert numbers(tmp_path) == whole
    assert list(numbers(tmp_path)) == list(whole)
    assert told[-5:] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


@pytest.mark.slow
def test_a_training_that_fails_in_one_of_several_jobs_ends_the_others(tmp_path):
    before = multiprocessing.active_children()
    run = Run(tmp_path, Plan(**TINY, encodings=("none", "alibi"), learning_rate=1e30))
    run.begin()
    with pytest.raises(ValueError, match=r"diverged at step \d: lower --learning-rate"):
        run.go(jobs=2)
    assert multiprocessing.active_children() == before


def test_games_are_trained_and_summarized(tmp_path):
    run = run_in(tmp_path, Plan(**TINY, encodings=("rope", "drope"), tasks=("copy", "index")))
    assert run.results["text"] is None
    assert list(numbers(tmp_path)) == ["copy-rope-0", "index-rope-0"]
    for task in ("copy", "index"):
        assert [row["encoding"] for row in run.results["summary"][task]] == ["rope", "drope"]
    resumed = Run.resume(tmp_path)
    assert resumed.plan == run.plan
    assert resumed.results["summary"] == run.results["summary"]


def test_a_gpu_that_is_not_there_is_refused(tmp_path, monkeypatch):
    """Before anything is written."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    run = Run(tmp_path, Plan(device="cuda"))
    for step in (run.begin, run.go):
        with pytest.raises(ValueError, match="--device cuda needs a GPU"):
            step()
    assert not list(tmp_path.iterdir())


def content(folder):
    return {
        path.name: os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in folder.iterdir()
    }


@pytest.mark.parametrize("overwrite", [False, True], ids=["plain", "overwrite"])
@pytest.mark.parametrize("name", ["report.html", f".{RESULTS}.partial"])
def test_a_folder_without_a_run_is_refused_and_left_as_it_is(tmp_path, name, overwrite):
    """Whatever the names of its files are, no run of ours can be known to have written them."""
    (tmp_path / name).write_bytes(b"mine")
    with pytest.raises(ValueError, match=r"and no run of posenc compare: name a new or an empty"):
        Run(tmp_path, ONE).begin(overwrite=overwrite)
    assert content(tmp_path) == {name: b"mine"}


def test_overwrite_replaces_only_the_files_of_a_run(tmp_path, finished):
    foreign = dict.fromkeys(("checkpoint-none-0.pt", ".movie.partial", "figure.pdf"), b"mine")
    written = dict.fromkeys(FILES, b"old") | {RESULTS: finished.encode()}
    for name, old in (foreign | written).items():
        (tmp_path / name).write_bytes(old)
    with pytest.raises(ValueError, match="continue it with --resume, or replace it with --overw"):
        Run(tmp_path, ONE).begin()
    Run(tmp_path, ONE).begin(overwrite=True)
    left = content(tmp_path)
    assert json.loads(left.pop(RESULTS))["units"] == {}
    assert left == foreign


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\xff\xfe\x00", id="not-text"),
        pytest.param(b"[1, 2]", id="a-list"),
        pytest.param(b'{"plan": {"frob": 1}}', id="another-program"),
    ],
)
@pytest.mark.parametrize("how", ["resume", "overwrite"])
def test_results_of_another_program_are_refused_and_stay(tmp_path, text, how):
    (tmp_path / RESULTS).write_bytes(text)
    with pytest.raises(ValueError, match=r"results\.json is damaged, or from another version"):
        Run.resume(tmp_path) if how == "resume" else Run(tmp_path, ONE).begin(overwrite=True)
    assert content(tmp_path) == {RESULTS: text}


RANKED = Plan(
    encodings=("none", "rope", "rope-yarn", "alibi"), tasks=("text", "copy"), times=(1, 8)
)
SCORES = {
    "none": [[2.0, 3.0], [2.2, 3.2]],
    "rope": [[1.0, 4.0], [1.4, 4.4]],
    "rope-yarn": [[1.0, 2.0], [1.4, 2.2]],
    "alibi": [[1.3, 1.0], [1.9, 1.2]],
}


def rows_of(task, of=SCORES):
    """Rows by encoding of trainings that nobody did: scores of each seed at both lengths."""
    units = {
        f"{task}-{name}-{seed}": {
            "task": task,
            "seed": seed,
            "curve": {"step": [1], "loss": [float(seed)]},
            "tests": {name: {"score": score, "by_position": []}},
        }
        for name, seeds in of.items()
        for seed, score in enumerate(seeds)
    }
    return {row["encoding"]: row for row in summarize(RANKED, units)[task]}


def test_rows_are_ranked_at_each_length_by_their_mean():
    rows = rows_of("text")
    assert list(rows) == list(RANKED.encodings)
    assert [row["rank"] for row in rows.values()] == [[4, 3], [1, 4], [1, 2], [3, 1]]
    assert rows["none"]["score"] == pytest.approx([2.1, 3.1])
    assert (rows["none"]["low"], rows["none"]["high"]) == ([2.0, 3.0], [2.2, 3.2])
    assert rows["none"]["curve"]["loss"] == [0.5]
    assert scores(rows["alibi"]) == ["1.600 ± 0.300 #3", "1.100 ± 0.100 #1"]


def test_a_range_that_reaches_that_of_the_best_is_level_with_it():
    """ALiBi's best seed, 1.3, is below 1.4, the worst of RoPE's."""
    levels = [row["level"] for row in rows_of("text").values()]
    assert levels == [[False, False], [True, False], [True, False], [True, True]]


def test_a_higher_accuracy_is_better():
    rows = rows_of("copy").values()
    assert [row["rank"][1] for row in rows] == [2, 1, 3, 4]
    assert [row["level"][0] for row in rows] == [True, False, False, False]


def test_an_encoding_without_a_finished_seed_has_no_row():
    (row,) = rows_of("text", {"alibi": SCORES["alibi"][:1]}).values()
    assert row["encoding"] == "alibi"
    assert scores(row) == ["1.300", "1.000"]
    assert rows_of("copy", {}) == {}
