import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest
import torch

from posenc.lab.comparison.decoder import Decoder
from posenc.lab.comparison.plan import QUICK, Plan
from posenc.lab.comparison.run import RESULTS, Run
from posenc.lab.comparison.training import scores_by_length

TINY = {
    "train_length": 8,
    "steps": 6,
    "batch": 2,
    "width": 16,
    "layers": 1,
    "heads": 2,
    "windows": 3,
}


def numbers(folder):
    """Everything of a run but the times, which differ."""
    results = json.loads((folder / RESULTS).read_text())
    assert results["complete"]
    return results["units"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nobody stopped."""
    folder = tmp_path_factory.mktemp("whole")
    run = Run(folder, Plan(**TINY))
    run.begin()
    run.go()
    return numbers(folder)


def test_a_run_tests_every_encoding_at_every_length(whole):
    assert list(whole) == [
        f"text-{name}-0" for name in ("none", "sinusoidal", "learned", "rope", "alibi")
    ]
    assert list(whole["text-rope-0"]["tests"]) == ["rope", "rope-yarn"]
    for unit in whole.values():
        for test in unit["tests"].values():
            assert len(test["score"]) == len(test["loss"]) == 4
            assert len(test["by_position"]) == 32
        assert len(unit["curve"]["loss"]) == 6


def test_a_rule_is_applied_past_the_training_length_alone(tmp_path):
    """Weights are drawn, not trained, and large: the rule then shows in every digit."""
    run = Run(tmp_path, Plan(**TINY))
    model = Decoder("rope", run.plan, symbols=run.data["text"].symbols, seed=0)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=1.0, generator=torch.Generator().manual_seed(0))
    plain, yarn = (
        scores_by_length(model, name, run.plan, "text", run.data["text"])["score"]
        for name in ("rope", "rope-yarn")
    )
    assert plain[0] == yarn[0]
    assert all(abs(a - b) > 1e-2 for a, b in zip(plain[1:], yarn[1:], strict=True))


@pytest.mark.parametrize(
    ("unit", "step"),
    [
        pytest.param("text-none-0", 1, id="after-the-first-step"),
        pytest.param("text-sinusoidal-0", 4, id="within-a-training"),
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


SCRIPT = """
import sys
from pathlib import Path
from posenc.lab.comparison.plan import Plan
from posenc.lab.comparison.run import Run
if sys.argv[2] == "resume":
    run = Run.resume(Path(sys.argv[1]))
else:
    run = Run(Path(sys.argv[1]), Plan(**eval(sys.argv[2])))
    run.begin()
print("begun", flush=True)
run.go()
print("ended", flush=True)
"""


@pytest.mark.slow
def test_a_killed_run_leaves_whole_results_and_goes_on_to_the_same_numbers(tmp_path, whole):
    """SIGKILL at no chosen moment: nothing gets to clean up."""
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    for wait, what in ((0.0, repr(TINY)), (0.15, "resume")):
        with subprocess.Popen([*command, what], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout.readline() == "begun\n"
            time.sleep(wait)
            process.send_signal(signal.SIGKILL)
        left = set(os.listdir(tmp_path))
        assert left - {f".{RESULTS}.partial"} == {RESULTS}
        json.loads((tmp_path / RESULTS).read_text())
    done = subprocess.run(
        [*command, "resume"], capture_output=True, text=True, check=True, timeout=300
    )
    assert (done.stdout, done.stderr) == ("begun\nended\n", "")
    assert numbers(tmp_path) == whole
    assert os.listdir(tmp_path) == [RESULTS]


def test_a_run_writes_nothing_but_its_files(tmp_path, capfd):
    """The profiler warns about memory it did not see being taken; there must be none."""
    run = Run(tmp_path, Plan(**TINY))
    run.begin()
    run.go()
    assert capfd.readouterr() == ("", "")


def test_seeds_are_averaged_and_their_range_is_kept(tmp_path):
    run = Run(tmp_path, Plan(**TINY, encodings=("none",), seeds=2, times=(1, 2)))
    run.begin()
    run.go()
    first, second = (run.results["units"][f"text-none-{seed}"] for seed in (0, 1))
    (row,) = run.results["summary"]["text"]
    for i in range(2):
        both = [unit["tests"]["none"]["score"][i] for unit in (first, second)]
        assert both[0] != both[1]
        assert row["score"][i] == pytest.approx(sum(both) / 2)
        assert [row["low"][i], row["high"][i]] == sorted(both)
    assert row["worse"] == pytest.approx([0.0, row["score"][1] - row["score"][0]])


def test_the_last_symbols_are_the_same_at_every_length(tmp_path):
    """Only what is before them may differ, or a length would be compared on other text."""
    run = Run(tmp_path, Plan(**{**TINY, "steps": 1}, encodings=("none",)))
    seen = []
    text = run.data["text"].text
    original = text.held

    class Spy:
        def __len__(self):
            return len(original)

        def __getitem__(self, at):
            picked = original[at]
            if picked.dim() == 2 and picked.shape[0] == 3:
                seen.append(picked[:, -8:])
            return picked

    run.data["text"].text = text._replace(held=Spy())
    run.begin()
    run.go()
    assert len(seen) == 4
    assert all(torch.equal(each, seen[0]) for each in seen)


def test_a_run_says_how_much_of_all_trainings_is_done(tmp_path):
    run = Run(tmp_path, Plan(**TINY, encodings=("none", "rope", "rope-yarn"), times=(1,)))
    run.begin()
    told = []
    run.go(lambda label, done: told.append(done))
    # The costs of three encodings come first.
    assert told == pytest.approx([0] * 3 + [(i + 1) / 12 for i in range(12)])


def test_a_text_that_changed_is_not_gone_on_with(tmp_path):
    file = tmp_path / "text"
    file.write_bytes(bytes(range(256)) * 40)
    out = tmp_path / "out"
    Run(out, Plan(**TINY, text=str(file))).begin()
    file.write_bytes(bytes(range(255, -1, -1)) * 40)
    with pytest.raises(ValueError, match="has changed since"):
        Run.resume(out)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        pytest.param({"encodings": ("rope", "nope")}, "got nope", id="encoding"),
        pytest.param({"encodings": ()}, "got nothing", id="no-encoding"),
        pytest.param({"width": 12, "heads": 4}, "multiple of 2 × 4", id="width"),
        pytest.param({"times": (0, 2)}, "1 or more", id="times"),
        pytest.param({"base": 0.5}, "--base", id="base"),
        pytest.param({"learning_rate": 0.0}, "--learning-rate", id="rate"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        Plan(**fields)


def test_the_quick_plan_differs_in_size_alone():
    assert not QUICK.keys() & {"encodings", "times", "seeds", "text"}
    assert Plan(**QUICK).base == 32.0


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
def test_a_training_that_fails_in_a_job_says_what_it_says_in_one(tmp_path):
    before = multiprocessing.active_children()
    run = Run(tmp_path, Plan(**TINY, encodings=("none", "alibi"), learning_rate=1e30))
    run.begin()
    with pytest.raises(ValueError, match=r"diverged at step \d: lower --learning-rate"):
        run.go(jobs=2)
    assert multiprocessing.active_children() == before


def test_games_are_trained_and_summarized_beside_the_text(tmp_path):
    run = Run(tmp_path, Plan(**TINY, encodings=("rope", "drope"), tasks=("copy", "index")))
    run.begin()
    run.go()
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
