"""A model by its name on the hub: the config, and nothing else, is downloaded."""

import contextlib
import json
import re
import sys
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import posenc
from posenc.cli import application
from support.configs import BLOOM, SMOLLM3, T5
from support.hub import COMMIT, offline, serve

LLAMA = {"model_type": "llama", "hidden_size": 512, "num_attention_heads": 8, "rope_theta": 5e5}
FLUX = {
    "_class_name": "FluxTransformer2DModel",
    "attention_head_dim": 128,
    "axes_dims_rope": [16, 56, 56],
}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with a few models, and an empty current folder."""
    monkeypatch.chdir(tmp_path)
    with serve(tmp_path / "home") as hub:
        configs = {"org/llama": LLAMA, "bloom": BLOOM, "org/t5": T5, "org/smollm3": SMOLLM3}
        for model, config in configs.items():
            hub.files[model] = {
                "config.json": json.dumps(config).encode(),
                "model.safetensors": b"weights",
                "tokenizer.json": b"{}",
            }
        hub.files["org/flux"] = {
            "model_index.json": b"{}",
            "transformer/config.json": json.dumps(FLUX).encode(),
        }
        yield hub


def run(*arguments):
    return CliRunner().invoke(application(), arguments)


def test_every_reader_of_a_config_takes_a_name(hub):
    """Each asks for the config, and for no other file."""
    assert posenc.RoPE.from_config("org/llama").base == 5e5
    assert hub.asked == ["org/llama/config.json"]
    assert torch.equal(posenc.ALiBi.from_config("bloom").slopes, posenc.ALiBi(16).slopes)
    assert posenc.T5Bias.from_config("org/t5", causal=True).num_heads == 8
    assert posenc.rope_layers("org/smollm3").count(None) == 9
    names = ["org/llama", "bloom", "org/t5", "org/smollm3"]
    assert hub.asked == [f"{name}/config.json" for name in names]


def test_the_lines_of_the_manual_run(hub):
    page = (Path(__file__).parents[2] / "docs/recipes/huggingface.md").read_text()
    section = page.split("### A model by its name")[1].split("\n## ")[0]
    hub.files["Qwen/Qwen3-0.6B"] = hub.files["org/llama"]
    (command,) = re.findall(r"^\$ posenc (.*)", section, re.MULTILINE)
    assert run(*command.split()).exit_code == 0
    (code,) = re.findall(r"^```python\n(.*?)```", section, re.MULTILINE | re.DOTALL)
    names = {"posenc": posenc}
    exec(code, names)
    assert names["rope"].base == 5e5


def test_a_pipeline_of_diffusers_has_its_config_in_a_folder(hub, tmp_path):
    """On the hub and on the disk."""
    assert posenc.RoPE.from_config("org/flux").axes.coordinates == (16, 56, 56)
    assert hub.asked == ["org/flux/config.json", "org/flux/transformer/config.json"]
    (tmp_path / "pipeline/transformer").mkdir(parents=True)
    (tmp_path / "pipeline/transformer/config.json").write_text(json.dumps(FLUX))
    assert posenc.RoPE.from_config(tmp_path / "pipeline").head_dim == 128


def test_a_path_that_exists_is_no_name(hub, tmp_path):
    (tmp_path / "org/llama").mkdir(parents=True)
    (tmp_path / "org/llama/config.json").write_text(json.dumps({"head_dim": 64}))
    assert posenc.RoPE.from_config("org/llama").base == 10_000.0
    with pytest.raises(ValueError, match=r"cannot read org.no\.json: .*\n  Pass the path of a fil"):
        posenc.RoPE.from_config("org/no.json")
    with pytest.raises(ValueError, match=r"or a model's name on the hub \(org/name\)"):
        # The name of a path object is not one of a model.
        posenc.RoPE.from_config(Path("org/smollm3"))
    assert hub.asked == []


def test_a_revision_follows_the_name(hub):
    assert posenc.RoPE.from_config(f"org/llama@{COMMIT}").base == 5e5
    with pytest.raises(OSError, match=r"^from_config: org/llama has no revision v9\.\n  Pass a br"):
        posenc.RoPE.from_config("org/llama@v9")


@pytest.mark.parametrize(
    ("model", "refusal", "text"),
    [
        pytest.param(
            "org/nobody",
            None,
            "from_config: org/nobody is not a path here, and the hub has no model of this name.\n"
            "  Check the spelling; if the model is private, log in with hf auth login.",
            id="unknown",
        ),
        pytest.param(
            "a--b",
            None,
            "from_config: a--b is not a path here, and the hub has no model of this name.\n"
            "  Check the spelling; if the model is private, log in with hf auth login.",
            id="no-name-of-the-hub",
        ),
        pytest.param(
            "org/gated",
            (403, "GatedRepo"),
            "from_config: org/gated is gated, and you have no access to it.\n"
            "  Accept the terms on its page, and log in with hf auth login.",
            id="gated",
        ),
        pytest.param(
            "org/empty",
            None,
            "from_config: org/empty has no config.json or transformer/config.json.\n"
            "  Pass the path of a config.json.",
            id="without-config",
        ),
    ],
)
def test_what_the_hub_refuses_is_said_with_the_way_out(hub, model, refusal, text):
    hub.files["org/empty"] = {"README.md": b""}
    if refusal is not None:
        hub.refused[model] = refusal
    with pytest.raises(OSError, match="from_config") as error:
        posenc.RoPE.from_config(model)
    assert str(error.value) == text
    assert error.value.__cause__ is not None

    result = run("explain", model)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"posenc: {' '.join(text.split())}\n"


def test_offline_a_config_of_the_cache_is_read_and_another_is_an_error(hub):
    for model in ("org/llama", "org/flux"):
        posenc.RoPE.from_config(model)
    before = list(hub.asked)
    with offline():
        assert posenc.RoPE.from_config("org/llama").base == 5e5
        assert posenc.RoPE.from_config("org/flux").head_dim == 128
        with pytest.raises(OSError, match="org/smollm3") as error:
            posenc.RoPE.from_config("org/smollm3")
    assert str(error.value) == (
        "from_config: org/smollm3 is not a path here, the hub's cache has no config.json or "
        "transformer/config.json of it, and offline mode is on.\n"
        "  Unset HF_HUB_OFFLINE, or pass the path of a config.json."
    )
    assert hub.asked == before


def test_without_a_connection_the_cache_serves_too(hub, monkeypatch):
    # huggingface_hub tries again after seconds.
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    posenc.RoPE.from_config("org/llama")
    hub.shutdown()
    hub.server_close()
    assert posenc.RoPE.from_config("org/llama").base == 5e5
    hint = r"and the hub does not answer\.\n  Go online, set HF_HUB_OFFLINE=1 not to wait, or pass"
    with pytest.raises(OSError, match=hint):
        posenc.RoPE.from_config("org/smollm3")


@pytest.mark.parametrize(
    ("status", "headers", "said"),
    [
        pytest.param(403, {}, "answers 403 Forbidden", id="forbidden"),
        pytest.param(400, {}, "answers 400 Bad Request", id="bad-request"),
        pytest.param(520, {}, "answers 520", id="of-no-standard"),
        pytest.param(
            403, {"X-Error-Message": "Blocked by us"}, "answers 403 Blocked by us", id="in-words"
        ),
        pytest.param(
            None,
            {"X-Repo-Commit": None},
            "answers as no hub does: its X-Repo-Commit is None",
            id="page-of-another",
        ),
    ],
)
def test_an_answer_that_is_no_help_is_said(hub, status, headers, said):
    """Of a proxy that blocks, a page to log in, or a mirror: going online would not help."""
    if status is not None:
        hub.refused["org/llama"] = (status, "")
    hub.headers = headers
    with pytest.raises(OSError, match="from_config") as error:
        posenc.RoPE.from_config("org/llama")
    assert str(error.value) == (
        "from_config: org/llama is not a path here, the hub's cache has no config.json or "
        f"transformer/config.json of it, and {hub.url} {said}.\n"
        "  Check HF_ENDPOINT, the proxy and your login (hf auth login), or pass the path of a "
        "config.json."
    )


def test_a_token_that_is_refused_is_said(hub):
    hub.refused["org/llama"] = (401, "")
    with pytest.raises(
        OSError, match=r"cannot get config\.json of org/llama: http.* answers 401 Una"
    ):
        posenc.RoPE.from_config("org/llama")


@pytest.mark.parametrize("header", ["ETag", "X-Repo-Commit"])
@pytest.mark.parametrize("model", ["org/llama", "org/without"])
@pytest.mark.parametrize("honest", [0, 1], ids=["at-once", "in-the-second-answer"])
def test_a_hub_does_not_choose_where_it_is_written(hub, tmp_path, header, model, honest):
    """huggingface_hub makes paths of these headers, also to note which files are missing."""
    hub.files["org/without"] = {}
    hub.headers, hub.honest = {header: "../../../../escaped"}, honest
    before = {*tmp_path.iterdir(), tmp_path / "home"}
    with contextlib.suppress(OSError):
        posenc.RoPE.from_config(model)
    assert set(tmp_path.iterdir()) <= before
    assert not [path for path in tmp_path.rglob("*") if "escaped" in path.name]


def test_a_hub_that_does_not_answer_is_asked_once(hub, monkeypatch):
    """huggingface_hub would ask again for half a minute."""
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("a retry"))
    hub.shutdown()
    hub.server_close()
    with pytest.raises(OSError, match="the hub does not answer"):
        posenc.RoPE.from_config("org/llama")


def test_a_download_that_breaks_is_an_error_and_the_next_one_is_whole(hub, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    hub.cut = 10
    with pytest.raises(OSError, match=r"cannot get config\.json of org/llama: .*\n  Try again, or"):
        posenc.RoPE.from_config("org/llama")
    hub.cut = None
    assert posenc.RoPE.from_config("org/llama").base == 5e5


def test_without_huggingface_hub_the_extra_is_named(hub, monkeypatch):
    """Paths need no package."""
    Path("config.json").write_text(json.dumps(LLAMA))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "huggingface_hub", None)
        wanted = r"org/llama is not a path here.*pip install 'posenc\[hub\]'"
        with pytest.raises(ImportError, match=wanted):
            posenc.RoPE.from_config("org/llama")
        result = run("explain", "org/llama")
        assert posenc.RoPE.from_config("config.json").base == 5e5
    assert result.exit_code == 2
    assert re.match(f"posenc: from_config: {wanted}", result.stderr)
    assert result.stderr.count("\n") == 1


def test_explain_and_show_take_a_name(hub):
    explained = run("explain", "org/llama", "--json")
    assert explained.exit_code == 0, explained.stderr
    (layer,) = json.loads(explained.stdout)["layers"]
    assert layer["arguments"]["base"] == {"value": 5e5, "from": "rope_theta"}
    shown = run("show", "--config", "org/llama", "--json")
    assert shown.exit_code == 0, shown.stderr
    assert hub.asked == ["org/llama/config.json"]
