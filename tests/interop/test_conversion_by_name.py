"""A conversion of a model by its name on the hub: its config and its weights are downloaded."""

import json
import os
import re
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save
from typer.testing import CliRunner

from posenc.cli import application
from posenc.interop.checkpoints import convert
from support.hub import COMMIT, offline, serve

CONFIG = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4}
INDEX = "model.safetensors.index.json"
ORDER = [0, 4, 1, 5, 2, 6, 3, 7]


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with a model in one file and one in two, and an empty current folder."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    q, k = (torch.randn(32, 3) for _ in "qk")
    shards = [{"layers.0.q_proj.weight": q}, {"layers.0.k_proj.weight": k, "norm": k[0].clone()}]
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    index = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    config = {"config.json": json.dumps(CONFIG).encode()}
    others = {"tokenizer.json": b"{}", "pytorch_model.bin": b"x", "other.safetensors": b"x"}
    with serve(tmp_path / "home") as hub:
        hub.files["org/one"] = {
            **config,
            **others,
            "model.safetensors": save(shards[0] | shards[1]),
        }
        hub.files["org/two"] = {
            **config,
            **others,
            **{name: save(shard) for name, shard in zip(names, shards, strict=True)},
            INDEX: json.dumps({"weight_map": index}).encode(),
        }
        hub.weights = shards[0] | shards[1]
        yield hub


def check(hub, folder):
    """All tensors are there, and the rows of queries and keys have moved."""
    found = {}
    for name in os.listdir(folder):
        if name.endswith(".safetensors"):
            found |= load_file(f"{folder}/{name}")
    assert found.keys() == hub.weights.keys()
    for name, tensor in hub.weights.items():
        moved = tensor.view(4, 8, 3)[:, ORDER].flatten(0, 1) if "proj" in name else tensor
        assert torch.equal(found[name], moved)


@pytest.mark.parametrize(
    ("model", "files"),
    [
        pytest.param("org/one", ["model.safetensors"], id="one-file"),
        pytest.param(
            "org/two",
            [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)] + [INDEX],
            id="two-files",
        ),
    ],
)
def test_the_config_and_the_weights_are_downloaded_and_nothing_else(hub, model, files):
    report = convert(model, "out", to="interleaved")
    assert report.source == model
    assert sorted(os.listdir("out")) == ["config.json", *files]
    check(hub, "out")
    # Whether there is an index is not known before.
    assert hub.asked[:2] == [f"{model}/config.json", f"{model}/{INDEX}"]
    assert sorted(hub.asked[2:]) == [f"{model}/{name}" for name in files if name != INDEX]
    # All files are of the commit that main was at first.
    assert hub.revisions == ["main", COMMIT]
    assert report.left_out == ()


def test_the_line_of_the_manual_runs(hub):
    page = (Path(__file__).parents[2] / "docs/checkpoints.md").read_text()
    (command,) = re.findall(r"^\$ posenc (convert Qwen/.*)", page, re.MULTILINE)
    hub.files["Qwen/Qwen3-0.6B"] = hub.files["org/one"]
    done = CliRunner().invoke(application(), command.split())
    assert done.exit_code == 0, done.stderr
    check(hub, "qwen3-interleaved")


def test_files_of_earlier_downloads_are_not_copied(hub):
    """The result depends on the model, not on what is in the cache."""
    from huggingface_hub import hf_hub_download

    hub.files["org/one"]["model.fp16.safetensors.index.json"] = b"{}"
    for name in ("tokenizer.json", "other.safetensors", "model.fp16.safetensors.index.json"):
        hf_hub_download("org/one", name)
    convert("org/one", "out", to="interleaved")
    assert sorted(os.listdir("out")) == ["config.json", "model.safetensors"]
    check(hub, "out")


def test_the_cache_serves_offline_and_is_not_written_to(hub, tmp_path):
    convert("org/two", "out", to="interleaved")
    asked = list(hub.asked)
    with offline():
        convert("org/two", "again", to="interleaved")
        with pytest.raises(OSError, match=r"org/one is not a path here.*offline mode is on"):
            convert("org/one", "third", to="interleaved")
    check(hub, "again")
    assert hub.asked == asked
    (folder,) = (tmp_path / "home/hub").glob("models--org--two/snapshots/*")
    assert folder.name == COMMIT
    for name, content in hub.files["org/two"].items():
        if (folder / name).exists():
            assert (folder / name).read_bytes() == content
    assert sorted(os.listdir()) == ["again", "out"]


@pytest.mark.parametrize(
    ("model", "text"),
    [
        pytest.param(
            "org/bin",
            f"convert: org/bin@{COMMIT} has no {INDEX} or model.safetensors.\n"
            "  Pass the path of a folder with the weights as safetensors.",
            id="no-safetensors",
        ),
        pytest.param(
            "org/empty",
            "convert: org/empty has no config.json.\n  Pass the path of a folder with one.",
            id="no-config",
        ),
        pytest.param("org/evil", "must name files of its own folder", id="index-leads-out"),
        pytest.param("org/half", "cannot get model.safetensors of org/half@", id="breaks"),
    ],
)
def test_an_error_leaves_nothing_behind(hub, model, text, monkeypatch):
    # huggingface_hub tries again after seconds.
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    config = {"config.json": json.dumps(CONFIG).encode()}
    hub.files["org/bin"] = {**config, "pytorch_model.bin": b"x"}
    hub.files["org/empty"] = {"model.safetensors": b"x"}
    hub.files["org/evil"] = {**config, INDEX: b'{"weight_map": {"x": "../x.safetensors"}}'}
    hub.files["org/half"] = {**config, "model.safetensors": bytes(2000)}
    hub.cut = 1000
    done = CliRunner().invoke(application(), ["convert", model, "-o", "out", "--to", "interleaved"])
    assert done.exit_code == 2
    # Before it, huggingface_hub may say that it tries again.
    assert " ".join(text.split()) in done.stderr.splitlines()[-1]
    assert os.listdir() == []
    with pytest.raises((OSError, ValueError), match="convert: ") as error:
        convert(model, "out", to="interleaved")
    assert text in str(error.value)


def test_a_target_that_cannot_be_written_is_found_before_weights_are_downloaded(hub):
    os.mkdir("out")
    with pytest.raises(FileExistsError, match="target must be new"):
        convert("org/one", "out", to="interleaved")
    with pytest.raises(FileNotFoundError, match="target must lie in a folder that exists"):
        convert("org/one", "nowhere/out", to="interleaved")
    assert hub.asked == ["org/one/config.json"]
