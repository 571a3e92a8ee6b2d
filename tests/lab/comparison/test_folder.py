import json
import os

import pytest

from posenc.lab.comparison.plan import Plan
from posenc.lab.comparison.run import FILES, RESULTS, Run

TINY = Plan(
    encodings=("none",), train_length=8, steps=3, batch=2, width=16, layers=1, heads=2, windows=2
)
DAMAGED = "results.json is damaged, or from another version of posenc compare: move it away"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The text of a results.json whose run is complete."""
    run = Run(tmp_path_factory.mktemp("finished"), TINY)
    run.begin()
    run.go()
    return (run.folder / RESULTS).read_text()


def content(folder):
    return {
        path.name: os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in folder.iterdir()
    }


@pytest.mark.parametrize("overwrite", [False, True], ids=["plain", "overwrite"])
@pytest.mark.parametrize(
    "name",
    ["checkpoint-500.pt", ".movie.partial", "report.html", "figure.png", f".{RESULTS}.partial"],
)
def test_a_folder_without_a_run_is_refused_and_left_as_it_is(tmp_path, name, overwrite):
    """Whatever its files are called, no run of ours can be known to have written them."""
    (tmp_path / name).write_bytes(b"mine")
    with pytest.raises(ValueError, match=r"and no run of posenc compare: name a new or an empty"):
        Run(tmp_path, TINY).begin(overwrite=overwrite)
    assert content(tmp_path) == {name: b"mine"}


def test_overwrite_replaces_the_files_of_a_run_and_no_others(tmp_path, finished):
    foreign = dict.fromkeys(("checkpoint-none-0.pt", ".movie.partial", "figure.pdf"), b"mine")
    own = dict.fromkeys(FILES, b"old") | {RESULTS: finished.encode()}
    for name, old in (foreign | own).items():
        (tmp_path / name).write_bytes(old)
    Run(tmp_path, TINY).begin(overwrite=True)
    left = content(tmp_path)
    assert json.loads(left.pop(RESULTS))["units"] == {}
    assert left == foreign


def test_a_run_is_begun_in_a_folder_that_is_empty_or_not_there(tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("empty", "a/b"):
        Run(tmp_path / name, TINY).begin()
        assert os.listdir(tmp_path / name) == [RESULTS]


@pytest.mark.parametrize("name", ["report.html", RESULTS])
def test_a_link_with_the_name_of_our_file_is_replaced_and_what_it_leads_to_stays(
    tmp_path, finished, name
):
    out, outside = tmp_path / "out", tmp_path / "outside"
    out.mkdir()
    outside.write_text(finished)
    (out / RESULTS).write_text(finished)
    (out / name).unlink(missing_ok=True)
    (out / name).symlink_to(outside)
    Run(out, TINY).begin(overwrite=True)
    assert os.listdir(out) == [RESULTS]
    assert not (out / RESULTS).is_symlink()
    assert outside.read_text() == finished


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"{", id="cut-off"),
        pytest.param(b"\xff\xfe\x00", id="not-text"),
        pytest.param(b"[1, 2]", id="a-list"),
        pytest.param(b'{"plan": {"frob": 1}}', id="another-program"),
    ],
)
@pytest.mark.parametrize("how", ["resume", "overwrite"])
def test_results_of_another_program_are_refused_and_stay(tmp_path, text, how):
    (tmp_path / RESULTS).write_bytes(text)
    with pytest.raises(ValueError, match=DAMAGED):
        Run.resume(tmp_path) if how == "resume" else Run(tmp_path, TINY).begin(overwrite=True)
    assert content(tmp_path) == {RESULTS: text}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        pytest.param("encodings", [["none"]], id="encodings"),
        pytest.param("times", 4, id="times"),
        pytest.param("frob", 1, id="unknown"),
    ],
)
def test_a_plan_that_this_version_cannot_have_is_refused(tmp_path, finished, field, value):
    results = json.loads(finished)
    results["plan"][field] = value
    (tmp_path / RESULTS).write_text(json.dumps(results))
    with pytest.raises(ValueError, match=DAMAGED):
        Run.resume(tmp_path)


def test_a_finished_run_is_read_back_as_it_was_written(tmp_path, finished):
    (tmp_path / RESULTS).write_text(finished)
    run = Run.resume(tmp_path)
    assert run.plan == TINY
    assert run.results == json.loads(finished)
    assert run.results["complete"]
