import json
import shlex

import pytest
from typer.testing import CliRunner

import posenc.cli
from posenc.lab.show import ENCODINGS

YARN = {
    "hidden_size": 512,
    "num_attention_heads": 8,
    "max_position_embeddings": 16384,
    "rope_theta": 5e5,
    "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
}


@pytest.fixture
def run():
    app = posenc.cli.application()
    return lambda *arguments: CliRunner().invoke(app, ["show", *map(str, arguments)])


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(YARN))
    return path


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_encoding_has_numbers(run, encoding, tmp_path, monkeypatch):
    """And no picture is drawn that nobody asked for."""
    monkeypatch.chdir(tmp_path)
    done = run(encoding, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["encoding"] == encoding
    assert list(tmp_path.iterdir()) == []


def test_without_a_file_it_draws_in_the_current_folder(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run("alibi", "--heads", 4)
    assert done.exit_code == 0, done.output
    assert done.stdout == f"picture: {tmp_path / 'posenc-show.png'}\n"
    assert (tmp_path / "posenc-show.png").read_bytes().startswith(b"\x89PNG")


def test_the_example_in_the_help_runs(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = " ".join(run("--help").stdout.split())
    example = text.split("Example: posenc show ")[1].split(" ╭")[0]
    done = run(*shlex.split(example))
    assert done.exit_code == 0, done.output
    assert (tmp_path / "rope.png").exists()


def test_rule_against_rule_as_numbers(run):
    done = run(
        "rope", "--scaling", "ntk", "--factor", 4, "--against", "linear", "--dim", 8, "--json"
    )
    found = json.loads(done.stdout)
    assert found.keys() == {"encoding", "trained", "dim", "base", "rates"}
    labels = [each["label"] for each in found["rates"]]
    assert labels == ["as trained", "ntk × 4", "linear × 4"]
    plain, ntk, linear = (each["rates"] for each in found["rates"])
    assert [a / b for a, b in zip(plain, linear, strict=True)] == pytest.approx([4.0] * 4)
    assert plain[0] / ntk[0] == pytest.approx(1.0)
    assert plain[-1] / ntk[-1] == pytest.approx(4.0)


@pytest.mark.parametrize("folder", [False, True], ids=["file", "folder"])
def test_a_config_is_read_for_rule_base_and_context(run, config, folder):
    done = run("--config", config.parent if folder else config, "--against", "linear", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["trained"] == 4096
    assert found["dim"] == 64
    assert found["base"] == 5e5
    labels = [each["label"] for each in found["rates"]]
    assert labels == ["without a rule", "YaRN", "linear × 4"]
    assert found["rates"][1]["gain"] == pytest.approx(1.1386, abs=1e-4)


def test_a_config_without_a_rule_is_drawn(run, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"head_dim": 32, "rope_theta": 1e4, "max_position_embeddings": 512}))
    found = json.loads(run("rope", "--config", path, "--json").stdout)
    assert found["trained"] == 512
    assert [each["label"] for each in found["rates"]] == ["without a rule"]


def test_a_rule_that_stops_every_pair_is_drawn(run, tmp_path):
    """There is no wavelength to draw for it, and the rest is drawn."""
    path = tmp_path / "config.json"
    rope = {"rope_type": "proportional", "partial_rotary_factor": 0.01, "rope_theta": 1e4}
    path.write_text(json.dumps({"head_dim": 64, "rope_parameters": rope}))
    done = run("--config", path, "-o", tmp_path / "x.svg")
    assert done.exit_code == 0, done.output
    assert "Positions for a full turn" in (tmp_path / "x.svg").read_text("utf-8")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param([], "ENCODING must be one of sinusoidal", id="nothing"),
        pytest.param(["nope"], "got nope", id="encoding"),
        pytest.param(["alibi", "--dim", "8"], "--dim is not for alibi", id="dim-of-alibi"),
        pytest.param(["rope", "--scaling", "x"], "must be one of linear", id="rule"),
        pytest.param(["rope", "--factor", "2"], "--factor needs --scaling", id="factor-alone"),
        pytest.param(["rope", "--dim", "7"], "must be even", id="odd"),
        pytest.param(["rope", "-o", "x.gif"], ".png, .svg or .pdf", id="suffix"),
        pytest.param(["rope", "-o", "no/such/x.png"], "folder that exists", id="folder"),
        pytest.param(["--config", "no-such.json"], "no-such.json", id="no-config"),
        pytest.param(["alibi", "--config", "x"], "describes rope, not alibi", id="config-of-alibi"),
        pytest.param(
            ["--config", "x", "--dim", "8"], "--dim is not for --config", id="config-and-dim"
        ),
    ],
)
def test_an_error_is_one_line_and_exit_code_2(run, arguments, words):
    done = run(*arguments)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.startswith("posenc: ")
    assert done.stderr.count("\n") == 1
    assert words in done.stderr
