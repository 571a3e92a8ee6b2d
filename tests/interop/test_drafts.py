"""No signal and no error loses a checkpoint, and two runs do not meet."""

import errno
import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from posenc.interop.checkpoints import convert, drafts, safetensors
from support.checkpoints import save_folder

SIZES = {"num_heads": 1, "head_dim": 8}


@pytest.fixture
def source(tmp_path):
    return save_folder(tmp_path / "source", {"model_type": "llama", "hidden_size": 8})


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a kill needs a child to be killed")
def test_no_signal_and_no_error_at_any_step_loses_a_checkpoint(tmp_path):
    """A whole copy is at the target or in the workspace, and the next run says how to go on."""
    script = Path(__file__).parents[1] / "support" / "kills.py"
    done = subprocess.run(
        [sys.executable, script, tmp_path], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["failures"] == []
    # The hook was called: a swap of folders has two renames, of a file one.
    renames = {kind: steps.count("os.rename") for kind, steps in found["steps"].items()}
    assert renames == {"a folder": 2, "a file": 1, "nothing": 1}


@pytest.mark.parametrize("made", ["a folder", "a file"])
def test_what_another_program_makes_between_the_renames_costs_no_checkpoint(
    source, tmp_path, monkeypatch, made
):
    """The former checkpoint is in the workspace then, and may be the only copy."""
    target = save_folder(tmp_path / "target", {"model_type": "llama", "hidden_size": 8})
    (target / "note.txt").write_text("former")
    replace, room = os.replace, drafts.workspace(target)

    def late(old, new):
        if made == "a folder":
            target.mkdir()
            (target / "log.txt").write_text("another's")
        else:
            target.write_text("another's")
        replace(old, new)

    monkeypatch.setattr(os, "replace", late)
    with pytest.raises(OSError, match=r"the former checkpoint, must go back to") as refused:
        convert(source, target, to="interleaved", overwrite=True, **SIZES)
    assert str(room / "old") in str(refused.value)
    assert (room / "old" / "note.txt").read_text() == "former"
    assert (room / "new" / "model.safetensors").exists()
    with pytest.raises(FileExistsError, match=r"move .*old, the complete .* to another place; the"):
        convert(source, target, to="interleaved", overwrite=True, **SIZES)


def test_two_runs_to_one_target_do_not_share_a_draft(source, tmp_path):
    target, refused = tmp_path / "target", []

    def another(name, share):
        with pytest.raises(FileExistsError, match=r"must not exist.*a run is writing") as error:
            convert(source, target, to="interleaved", **SIZES)
        refused.append(str(error.value))

    convert(source, target, to="interleaved", tell=another, **SIZES)
    assert refused
    assert f"If there is none, delete {drafts.workspace(target)} and run again" in refused[0]
    assert (
        load_file(target / "model.safetensors").keys()
        == load_file(source / "model.safetensors").keys()
    )
    assert sorted(os.listdir(tmp_path)) == ["source", "target"]


@pytest.mark.parametrize("what", ["a file", "a folder", "a link"])
def test_a_taken_name_of_the_workspace_is_left_alone(source, tmp_path, what):
    """A name that somebody took is theirs, whatever it is."""
    room = drafts.workspace(tmp_path / "target")
    if what == "a file":
        room.write_text("mine")
    elif what == "a link":
        (tmp_path / "elsewhere").mkdir()
        room.symlink_to(tmp_path / "elsewhere")
    else:
        (room / "new").mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(FileExistsError, match="must not exist"):
        convert(source, tmp_path / "target", to="interleaved", **SIZES)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_source_that_a_killed_run_was_to_replace_is_found(source, tmp_path):
    room = drafts.workspace(source)
    room.mkdir()
    source.rename(room / "old")
    with pytest.raises(FileNotFoundError, match=r"Use .*source\.posenc-convert.old, the complete"):
        convert(source, tmp_path / "target", to="interleaved", **SIZES)
    with pytest.raises(ValueError, match="must not contain each other"):
        convert(room / "old", source, to="interleaved", **SIZES)


@pytest.mark.skipif(os.name == "nt", reason="there are no modes")
def test_files_and_folders_keep_their_modes(source, tmp_path):
    """What nobody else may read stays so, on the way too."""
    (source / "sub").mkdir(mode=0o700)
    modes = {
        "model.safetensors": 0o600,
        "config.json": 0o440,
        "sub/a": 0o664,
        "sub/b": 0o400,
        "sub": 0o750,
        ".": 0o711,
    }
    for name, mode in modes.items():
        if name.startswith("sub/"):
            (source / name).write_text("x")
        (source / name).chmod(mode)
    seen = []

    def look(name, share):
        seen.append(stat.S_IMODE(drafts.workspace(tmp_path / "target").stat().st_mode))

    convert(source, tmp_path / "target", to="interleaved", tell=look, **SIZES)
    new = {name: stat.S_IMODE((tmp_path / "target" / name).stat().st_mode) for name in modes}
    assert new == modes
    assert set(seen) == {0o700}
    convert(source / "model.safetensors", tmp_path / "file", to="interleaved", **SIZES)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600


def test_a_disk_that_fills_up_is_a_clear_error_and_leaves_nothing(source, tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(safetensors, "_chunks", full)
    with pytest.raises(OSError, match="No space left"):
        convert(source, tmp_path / "target", to="interleaved", **SIZES)
    assert os.listdir(tmp_path) == ["source"]
    usage = shutil.disk_usage(tmp_path)._replace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OSError, match=r"bytes free, got 10.\n  Free some space"):
        convert(source, tmp_path / "target", to="interleaved", **SIZES)
    assert os.listdir(tmp_path) == ["source"]
