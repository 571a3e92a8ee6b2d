import json
import os

import pytest
from typer.testing import CliRunner

import posenc.cli
from posenc.lab.comparison.encodings import ENCODINGS
from posenc.lab.comparison.plan import COMPARED, Plan
from posenc.lab.comparison.run import Run

TINY = (
    "--train-length 8 --steps 3 --batch 2 --width 16 --layers 1 --heads 2 --windows 2 --jobs 1"
).split()


@pytest.fixture
def run(monkeypatch):
    app = posenc.cli.application()
    monkeypatch.setattr("posenc.lab.comparison.training.REPEATS", 1)

    def invoke(*arguments):
        words = ["compare", *map(str, arguments)]
        monkeypatch.setattr("sys.argv", ["posenc", *words])
        return CliRunner().invoke(app, words)

    return invoke


def test_a_run_writes_page_figures_and_numbers_and_says_where(run, tmp_path):
    out = tmp_path / "out"
    done = run(*TINY, "--encodings", "none,alibi", "--seeds", 2, "-o", out)
    assert done.exit_code == 0, done.output
    assert sorted(os.listdir(out)) == ["figure.png", "figure.svg", "report.html", "results.json"]
    assert "\x1b" not in done.stdout
    assert all(" % " in line for line in done.stderr.splitlines())
    lines = done.stdout.splitlines()
    assert lines[1].split() == "1 × (8) 2 × (16) 4 × (32) 8 × (64) how".split()
    assert {line.split()[0] for line in lines[2:4]} == {"none", "ALiBi"}
    assert "#1" in lines[2]
    assert lines[4].startswith("  A loss of x nats is ")
    assert lines[4].endswith("costs ln 56 = 4.03 nats.")
    assert lines[6] == "what each costs"
    for name, file in [
        ("report", "report.html"),
        ("figure", "figure.png"),
        ("numbers", "results.json"),
    ]:
        assert f"{name}: {out / file}" in lines
    found = json.loads((out / "results.json").read_text())
    assert found["complete"]
    assert (
        found["command"]
        == f"posenc compare {' '.join(TINY)} --encodings none,alibi --seeds 2 -o {out}"
    )


@pytest.fixture
def undrawn(monkeypatch):
    """Pictures take longer than the training of a tiny model; where they do not matter, none."""
    monkeypatch.setattr("posenc.cli.compare._draw", lambda run: {})


@pytest.mark.usefixtures("undrawn")
def test_json_has_the_plan_and_a_row_for_each_encoding(run, tmp_path):
    out = tmp_path / "out"
    done = run(*TINY, "--encodings", "rope,rope-yarn", "--times", "2,1", "-o", out, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found.keys() == {
        "posenc", "command", "machine", "plan", "text", "files", "complete", "units", "costs",
        "summary",
    }  # fmt: skip
    assert found["plan"]["times"] == [1, 2]
    assert [row["encoding"] for row in found["summary"]["text"]] == ["rope", "rope-yarn"]
    for row in found["summary"]["text"]:
        assert row.keys() == {
            "encoding", "label", "how", "past", "seeds", "score", "low", "high", "rank", "level",
            "by_position", "curve",
        }  # fmt: skip
        assert len(row["score"]) == len(row["rank"]) == 2
    assert list(found["costs"]) == ["rope", "rope-yarn"]
    for cost in found["costs"].values():
        assert cost.keys() == {"parameters", "step", "step_bytes", "read", "read_bytes"}
    rope, yarn = found["costs"].values()
    assert min(rope["step"], rope["read"], yarn["read"]) > 0
    assert yarn["step"] is None


@pytest.mark.usefixtures("undrawn")
def test_all_means_every_encoding(run, tmp_path, monkeypatch):
    """The default set stays short; what is trained with each is tested with its decoder."""
    monkeypatch.setattr(Run, "go", lambda self, progress, jobs: None)
    for words, names in (("all", ENCODINGS), (",".join(COMPARED), COMPARED)):
        done = run(*TINY, "--encodings", words, "-o", tmp_path / words[:3], "--json")
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)["plan"]["encodings"] == list(names)
    assert len(COMPARED) < len(ENCODINGS) / 2


@pytest.fixture
def without_charts(monkeypatch):
    """The page is written, and pictures are not drawn."""
    monkeypatch.setattr("posenc.lab.comparison.report._pictures", lambda charts: [])
    monkeypatch.setattr("posenc.cli.compare.save", lambda picture, path: None)


@pytest.mark.usefixtures("without_charts")
def test_ctrl_c_keeps_finished_trainings_and_resume_does_the_others(run, tmp_path, monkeypatch):
    out = tmp_path / "out"
    go = Run.go

    def interrupted(self, progress, jobs):
        def stop(label, done):
            if label.startswith("text-alibi-0"):
                raise KeyboardInterrupt

        go(self, stop)

    monkeypatch.setattr(Run, "go", interrupted)
    stopped = run(*TINY, "--encodings", "none,alibi", "-o", out)
    assert stopped.exit_code == 130
    assert stopped.stderr == (
        f"posenc: stopped after 1 of 2 trainings; continue with posenc compare --resume -o {out}\n"
    )
    assert "Not finished" in (out / "report.html").read_text()
    monkeypatch.setattr(Run, "go", go)
    before = json.loads((out / "results.json").read_text())["units"]["text-none-0"]
    done = run("--resume", "-o", out, *TINY)
    assert done.exit_code == 0, done.output
    found = json.loads((out / "results.json").read_text())
    assert found["complete"]
    assert found["units"]["text-none-0"] == before
    assert list(found["units"]) == ["text-none-0", "text-alibi-0"]
    assert "Not finished" not in (out / "report.html").read_text()


def test_ctrl_c_in_the_first_training_draws_nothing(run, tmp_path, monkeypatch):
    def interrupted(self, progress, jobs):
        raise KeyboardInterrupt

    monkeypatch.setattr(Run, "go", interrupted)
    stopped = run(*TINY, "--encodings", "none", "-o", tmp_path)
    assert stopped.exit_code == 130
    assert os.listdir(tmp_path) == ["results.json"]


def test_resume_refuses_another_plan(run, tmp_path):
    Run(tmp_path, Plan(train_length=8, steps=3, encodings=("none",))).begin()
    other = run("--resume", "-o", tmp_path, "--steps", 4)
    assert other.exit_code == 2
    assert other.stderr == (
        f"posenc: {tmp_path} was begun with another --steps: leave it out to resume.\n"
    )


@pytest.mark.usefixtures("undrawn")
def test_one_seed_is_printed_without_ranks(run, tmp_path):
    """There is no spread that they could be outside of."""
    done = run(*TINY, "--encodings", "none,alibi", "-o", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert "#" not in done.stdout
    assert "--seeds 3 shows it" in done.stdout


@pytest.mark.usefixtures("without_charts")
def test_a_finished_run_of_a_gpu_is_drawn_without_one(run, tmp_path):
    run(*TINY, "--encodings", "none", "-o", tmp_path)
    path = tmp_path / "results.json"
    found = json.loads(path.read_text())
    found["plan"]["device"] = "cuda"
    path.write_text(json.dumps(found))
    (tmp_path / "report.html").unlink()
    done = run("--resume", "-o", tmp_path)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(["--encodings", "rope,x"], "--encodings must be among none", id="encoding"),
        pytest.param(["--tasks", "text,x"], "--tasks must be among text, copy, index", id="task"),
        pytest.param(["--device", "tpu"], "--device must be cpu or cuda", id="device-name"),
        pytest.param(["--dtype", "int8"], "--dtype must be fp32 or bf16", id="dtype"),
        pytest.param(["--times", "1,x"], "'--times': must be whole numbers", id="times"),
        pytest.param(["--times", "0"], "--times must be 1 or more", id="zero-times"),
        pytest.param(["--text", "no-such-file"], "No such file or directory: ", id="no-text"),
        pytest.param(["--times", "10000"], "is too short", id="too-long"),
        pytest.param(["--width", "30"], "--width must be a multiple of", id="width"),
        pytest.param(["--train-length", "3"], "--train-length", id="length"),
        pytest.param(["--base", "1"], "--base must be above 1", id="base"),
        pytest.param(["--learning-rate", "nan"], "--learning-rate must be above", id="rate"),
        pytest.param(["--resume"], "has no results.json to resume", id="nothing-to-resume"),
        pytest.param(["--resume", "--overwrite"], "exclude each other", id="both"),
    ],
)
def test_an_error_is_one_line_and_exit_code_2(run, tmp_path, arguments, words):
    done = run("-o", tmp_path / "out", *arguments)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.startswith("posenc: ")
    assert done.stderr.count("\n") == 1
    assert words in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_training_that_diverges_says_so_in_one_line(run, tmp_path):
    done = run("-o", tmp_path, *TINY, "--learning-rate", "1e30", "--encodings", "none")
    assert done.exit_code == 2
    *_, said = done.stderr.splitlines()
    assert said.startswith("posenc: the training of text-none-0 diverged at step ")
    assert said.endswith(": lower --learning-rate.")


@pytest.mark.parametrize("package", ["matplotlib", "jinja2"])
def test_a_missing_package_names_the_command_that_brings_it(run, tmp_path, monkeypatch, package):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name != package or None)
    done = run("-o", tmp_path / "out")
    assert done.exit_code == 2
    assert (
        done.stderr
        == f"posenc: compare needs {package}: pip install 'posenc[cli]', or '.[cli]' in a clone\n"
    )
