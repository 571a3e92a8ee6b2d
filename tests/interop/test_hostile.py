"""Checkpoints that mean harm: what they claim is not built, and what they link to is not copied."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from posenc import RoPE
from posenc.interop.checkpoints import convert
from support.checkpoints import save_folder

LLAMA = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 1}
needs_pipes = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no pipes")


@pytest.fixture
def source(tmp_path):
    return save_folder(tmp_path / "source", LLAMA)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits are Linux's")
def test_reading_costs_what_the_file_is_and_not_what_it_claims(tmp_path):
    script = Path(__file__).parents[1] / "support" / "hostile.py"
    done = subprocess.run(
        [sys.executable, script, tmp_path], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]


def refuse(source, words):
    before = sorted(os.listdir(source.parent))
    with pytest.raises(ValueError, match=words) as error:
        convert(source, source.parent / "target", to="interleaved")
    assert sorted(os.listdir(source.parent)) == before
    return str(error.value)


@pytest.mark.parametrize("name", ["notes.txt", "model.safetensors", "config.json"])
@pytest.mark.parametrize("steps", [1, 2], ids=["at-once", "by-way-of-another"])
def test_a_link_to_a_file_outside_is_refused(source, tmp_path, name, steps):
    """It may lead to a secret, and the result may be published."""
    outside = tmp_path / "outside"
    outside.write_text("secret")
    if (source / name).exists():
        (source / name).replace(outside)
    (source / name).symlink_to(outside if steps == 1 else "../between")
    (tmp_path / "between").symlink_to(outside)
    assert "outside" in refuse(source, "links in .* must lead to a file in it")


def test_a_link_to_a_folder_outside_to_a_device_and_to_nothing_is_refused(source, tmp_path):
    for leads in (tmp_path, Path("/dev/zero"), source / "nothing", source / "link", Path("..")):
        (source / "link").symlink_to(leads)
        refuse(source, "links in .* must lead to a file in it")
        (source / "link").unlink()


@needs_pipes
def test_a_pipe_is_refused_instead_of_waited_for(source):
    os.mkfifo(source / "notes.txt")
    refuse(source, "must be a regular file")
    (source / "notes.txt").unlink()
    (source / "model.safetensors").unlink()
    os.mkfifo(source / "model.safetensors")
    refuse(source, r"0 \.safetensors files|1 \.safetensors files|must be a regular file")
    (source / "model.safetensors.index.json").symlink_to("/dev/zero")
    refuse(source, "must be a regular file")


def test_a_link_to_a_folder_inside_is_refused(source):
    """Thirty folders with two links to the next one each would be 2**29 paths to the last file."""
    (source / "sub").mkdir()
    for leads in ("sub", "."):
        (source / "link").symlink_to(leads)
        refuse(source, "must be a regular file, got .* a link to a folder")
        (source / "link").unlink()


def test_a_file_that_cannot_be_read_is_not_left_out_in_silence(source, tmp_path):
    if os.name == "nt" or os.geteuid() == 0:
        pytest.skip("everything can be read")
    (source / "closed").mkdir(mode=0)
    with pytest.raises(PermissionError):
        convert(source, tmp_path / "target", to="interleaved")
    assert os.listdir(tmp_path) == ["source"]


def test_a_cache_of_hugging_face_is_converted_through_its_links(tmp_path):
    """models--NAME/snapshots/REVISION/FILE is a link to models--NAME/blobs/HASH."""
    cache = tmp_path / "models--some--model"
    snapshot, blobs = save_folder(cache / "snapshots" / "abc", LLAMA), cache / "blobs"
    blobs.mkdir()
    (snapshot / "sub").mkdir()
    (snapshot / "sub" / "vocab.txt").write_text("v")
    for number, path in enumerate(p for p in sorted(snapshot.rglob("*")) if p.is_file()):
        path.rename(blobs / str(number))
        path.symlink_to(os.path.relpath(blobs / str(number), path.parent))
    convert(snapshot, tmp_path / "target", to="interleaved")
    files = sorted(p for p in (tmp_path / "target").rglob("*") if p.is_file())
    assert [p.name for p in files] == ["config.json", "model.safetensors", "vocab.txt"]
    assert not any(p.is_symlink() for p in files)
    # A blob that is itself a link may lead anywhere.
    (tmp_path / "secret").write_text("secret")
    (blobs / "9").symlink_to(tmp_path / "secret")
    (snapshot / "notes.txt").symlink_to("../../blobs/9")
    with pytest.raises(ValueError, match="must lead to a file in it"):
        convert(snapshot, tmp_path / "again", to="interleaved")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"partial_rotary_factor": 1e300}, "partial_rotary_factor must be at most 1"),
        ({"model_type": ["llama"], "position_embedding_type": "alibi"}, "must be rotary"),
        ({"num_key_value_heads": 3}, "multiple of num_kv_heads=3"),
        ({"rope_parameters": [1]}, "rope_parameters must be a dict"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused_by_name(source, config, words):
    (source / "config.json").write_text(json.dumps({**LLAMA, **config}))
    with pytest.raises((ValueError, TypeError), match=words):
        convert(source, source.parent / "target", to="interleaved")


@pytest.mark.parametrize(
    "config",
    [
        {"layer_types": 5, "rope_parameters": {"a": {"rope_theta": 1e4}}},
        {"layer_types": [{}], "rope_parameters": {"a": {"rope_theta": 1e4}}},
        {"layer_types": ["a"], "per_layer_config": {"²": {"head_dim": 4}}},
    ],
    ids=["no-list", "no-words", "no-number"],
)
def test_layer_entries_that_are_null_are_ignored(source, tmp_path, config):
    """These ended in errors of Python's own."""
    (source / "config.json").write_text(json.dumps({**LLAMA, "rope_theta": 1e4, **config}))
    assert convert(source, tmp_path / "target", to="interleaved").moved
    assert RoPE.from_config(source, layer_type="a").head_dim == 8


def test_rows_of_a_new_dtype_that_are_not_whole_bytes_are_refused(tmp_path):
    entry = {"dtype": "F4", "shape": [8, 1], "data_offsets": [0, 4]}
    text = json.dumps({"q_proj.weight": entry}).encode()
    (tmp_path / "a").write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 4)
    with pytest.raises(ValueError, match="not whole bytes"):
        convert(tmp_path / "a", tmp_path / "b", to="half", num_heads=1, head_dim=8)
    assert os.listdir(tmp_path) == ["a"]
