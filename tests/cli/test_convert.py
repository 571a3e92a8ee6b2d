import json
import os
import signal

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import posenc.cli
from posenc.interop.checkpoints import Heads, permute
from support.processes import python

SIZES = ["--num-heads", "4", "--num-kv-heads", "2", "--head-dim", "8"]
NAMES = {"layers.0.attn.q_proj.weight": "q", "layers.0.attn.k_proj.weight": "k"}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The command, in a folder with a model."""
    monkeypatch.chdir(tmp_path)
    os.mkdir("model")
    tensors = {name: torch.randn(32 if kind == "q" else 16, 6) for name, kind in NAMES.items()}
    save_file({**tensors, "embed.weight": torch.randn(5, 6)}, "model/model.safetensors")
    config = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4}
    with open("model/config.json", "w") as file:
        json.dump({**config, "num_key_value_heads": 2}, file)
    runner = CliRunner()
    app = posenc.cli.application()
    return lambda *arguments: runner.invoke(app, ["convert", *arguments])


def check(target):
    old, new = load_file("model/model.safetensors"), load_file(target)
    for name, kind in NAMES.items():
        heads = Heads(4, 8, num_kv_heads=2)
        assert torch.equal(new[name], permute(old[name], kind, heads, to="interleaved"))
    assert torch.equal(new["embed.weight"], old["embed.weight"])


def test_the_example_in_the_help_runs(run):
    help_text = " ".join(run("--help").stdout.split())
    example = help_text.split("Example: posenc convert ")[1].split("--to interleaved")[0]
    done = run(*example.split(), "--to", "interleaved")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("model-interleaved: interleaved, 2 of 3 tensors moved\n")
    check("model-interleaved/model.safetensors")


def test_a_file_is_converted_by_the_sizes_of_the_command(run):
    os.rename("model/config.json", "elsewhere.json")
    done = run("model/model.safetensors", "-o", "out", "--to", "interleaved", *SIZES)
    assert done.exit_code == 0, done.output
    check("out")


def test_the_report_is_json_on_request(run):
    done = run("model", "-o", "out", "--to", "interleaved", "--json")
    report = json.loads(done.stdout)
    assert report["layout"] == "interleaved"
    assert report["family"] == "llama"
    assert sorted(report["moved"]) == sorted(NAMES)


def test_names_of_files_are_printed_without_their_escapes(run):
    name = "\x1b[2J.bin"
    with open(f"model/{name}", "wb") as file:
        file.write(b"x")
    done = run("model", "-o", "out\x1b[1m", "--to", "interleaved")
    assert done.exit_code == 0, done.output
    assert "\x1b" not in done.output
    assert "left out: \\x1b[2J.bin, weights in the old layout" in done.stdout


@pytest.mark.skipif(os.name == "nt", reason="signals are POSIX's")
@pytest.mark.parametrize(
    ("number", "ignored"),
    [
        pytest.param(signal.SIGTERM, False, id="terminated"),
        pytest.param(getattr(signal, "SIGHUP", 1), True, id="under-nohup", marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_end_leaves_nothing_behind(run, number, ignored):
    """As Ctrl-C does; and a signal that is ignored stays ignored."""
    script = (
        "import os, signal, posenc.cli\n"
        "from posenc.interop.checkpoints import files\n"
        f"number, ignored = {int(number)}, {ignored}\n"
        "if ignored: signal.signal(number, signal.SIG_IGN)\n"
        "write = files.write_shard\n"
        "def end(*arguments): os.kill(os.getpid(), number); return write(*arguments)\n"
        "files.write_shard = end\n"
        "posenc.cli.main()"
    )
    code, log = python("-c", script, "convert", "model", "-o", "out", "--to", "interleaved")
    assert code == (0 if ignored else 130), log
    assert sorted(os.listdir()) == (["model", "out"] if ignored else ["model"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(["model", "--to", "half"], "must be in the other layout", id="already"),
        pytest.param(["model", "--to", "sideways"], "to must be", id="to"),
        pytest.param(["model"], "--to", id="no-to"),
    ],
)
def test_an_error_is_one_line_and_exit_code_2_and_leaves_nothing(run, arguments, words):
    done = run(*arguments, "-o", "out")
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.startswith("posenc: ")
    assert done.stderr.count("\n") == 1
    assert words in done.stderr
    assert os.listdir() == ["model"]
