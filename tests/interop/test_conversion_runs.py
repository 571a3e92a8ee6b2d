"""What a conversion does while it runs: self-test, memory, progress, and how it ends."""

import gc
import os
import shutil
import signal
import subprocess
import sys
import tracemalloc

import pytest
import torch
from safetensors.torch import load_file, save_file

from posenc.interop.checkpoints import convert, convert_state, families, safetensors, selftest
from support.checkpoints import SIZES, save_layers


@pytest.fixture
def saved(tmp_path):
    return save_layers(tmp_path / "old.safetensors")


def test_paths_that_would_lose_something_are_refused(saved, tmp_path):
    there = tmp_path / "there"
    there.write_text("mine")
    with pytest.raises(FileExistsError, match="overwrite"):
        convert(saved, there, to="half", **SIZES)
    assert there.read_text() == "mine"
    for target in (saved, tmp_path):
        with pytest.raises(ValueError, match="must not contain each other"):
            convert(saved, target, to="half", overwrite=True, **SIZES)
    with pytest.raises(FileNotFoundError, match="a folder that exists"):
        convert(saved, tmp_path / "no" / "where", to="half", **SIZES)
    with pytest.raises(FileNotFoundError, match="source must be"):
        convert(tmp_path / "gone", tmp_path / "new", to="half", **SIZES)
    convert(saved, there, to="half", overwrite=True, **SIZES)
    assert load_file(there).keys() == load_file(saved).keys()


def test_a_folder_is_replaced_only_when_asked(saved, tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    saved.rename(old / "model.safetensors")
    new.mkdir()
    (new / "mine.safetensors").touch()
    with pytest.raises(FileExistsError):
        convert(old, new, to="half", **SIZES)
    assert os.listdir(new) == ["mine.safetensors"]
    convert(old, new, to="half", overwrite=True, **SIZES)
    assert os.listdir(new) == ["model.safetensors"]
    assert sorted(os.listdir(tmp_path)) == ["new", "old"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_only_a_regular_file_is_overwritten_by_a_file(saved, tmp_path, kind):
    target = tmp_path / "target"
    if kind == "folder":
        target.mkdir()
    else:
        os.mkfifo(target)
    before = target.lstat()
    with pytest.raises(FileExistsError, match=r"a file to overwrite[^$]*or move it away"):
        convert(saved, target, to="half", overwrite=True, **SIZES)
    assert target.lstat() == before


def test_the_self_test_finds_rows_that_did_not_move(saved, tmp_path, monkeypatch):
    """Written in their old order, they would be taken for the new one."""
    chunks = safetensors._chunks
    monkeypatch.setattr(safetensors, "_chunks", lambda *given: chunks(*given[:-1], None))
    with pytest.raises(ValueError, match=r"logits of layers\.0\.attn must stay the same"):
        convert(saved, tmp_path / "new", to="interleaved", **SIZES)
    assert os.listdir(tmp_path) == [saved.name]
    assert convert(saved, tmp_path / "new", to="interleaved", check=0, **SIZES).checked == ()


@pytest.mark.parametrize("wrong", ["k", "bias", "norm"])
def test_the_self_test_sees_every_kind_of_part(wrong):
    """One part left behind is enough."""
    stem = "layers.0.attn."
    old = {
        f"{stem}q_proj.weight": torch.randn(32, 16),
        f"{stem}q_proj.bias": torch.randn(32),
        f"{stem}k_proj.weight": torch.randn(16, 16),
        f"{stem}k_norm.weight": torch.randn(8),
    }
    model = families.from_config({}, families.Given(**SIZES))
    new = convert_state(old, to="interleaved", **SIZES)

    def run(new):
        readers = old.__getitem__, new.__getitem__
        return selftest.run({"attn": list(old)}, model, *readers, "interleaved", 1)["attn"]

    assert run(new) < 1e-13
    for name in old:
        if wrong in name.replace("k_norm", "norm").replace("k_proj.weight", "k"):
            new[name] = old[name]
    with pytest.raises(ValueError, match="logits of attn must stay the same") as error:
        run(new)
    assert float(str(error.value).split("a difference of ")[1].split(".\n")[0]) > 1e-2


def test_memory_is_bounded_by_the_largest_tensor_that_moves(tmp_path, monkeypatch):
    """However many tensors there are, and however large those that stay."""
    monkeypatch.setattr(safetensors, "CHUNK", 1 << 14)
    tensors = {"embed.weight": torch.zeros(1 << 22, dtype=torch.uint8)}
    for layer in range(8):
        tensors[f"layers.{layer}.q_proj.weight"] = torch.randn(32, 1 << 13)
    save_file(tensors, tmp_path / "a")
    largest = 32 * (1 << 13) * 4
    del tensors
    gc.collect()

    tracemalloc.start()
    convert(tmp_path / "a", tmp_path / "b", to="half", check=0, **SIZES)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert largest <= peak < 1.2 * largest


def test_progress_is_told_tensor_by_tensor(saved, tmp_path):
    told = []
    convert(saved, tmp_path / "b", to="half", tell=lambda *step: told.append(step), **SIZES)
    assert [name for name, _ in told] == sorted(
        load_file(saved), key=[name for name, _ in told].index
    )
    shares = [share for _, share in told]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_progress_advances_within_a_tensor(saved, tmp_path, monkeypatch):
    """The embedding of a large model takes as long as all the rest."""
    monkeypatch.setattr(safetensors, "CHUNK", 64)
    told = []
    convert(saved, tmp_path / "b", to="half", tell=lambda *step: told.append(step), **SIZES)
    for name in load_file(saved):
        assert len([share for each, share in told if each == name]) > 1, name
    assert told[-1][1] == 1.0


def test_an_interruption_leaves_nothing(saved, tmp_path):
    def interrupt(name, share):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(saved, tmp_path / "new", to="half", tell=interrupt, **SIZES)
    assert os.listdir(tmp_path) == [saved.name]


def test_a_kill_leaves_no_half_written_target(saved, tmp_path):
    """The name appears with the last byte behind it, or not at all."""
    before = saved.read_bytes()
    script = (
        "import sys, time; from posenc.interop.checkpoints import convert\n"
        "def hang(name, share):\n"
        "    print(name, flush=True); time.sleep(600)\n"
        f"convert(sys.argv[1], sys.argv[2], to='half', tell=hang, **{SIZES})"
    )
    target = tmp_path / "new.safetensors"
    command = [sys.executable, "-c", script, str(saved), str(target)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    assert not target.exists()
    assert saved.read_bytes() == before
    # What it left is named in the error of the next run.
    room = tmp_path / f"{target.name}.posenc-convert"
    assert sorted(os.listdir(tmp_path)) == [room.name, saved.name]
    with pytest.raises(FileExistsError, match=f"delete .*{room.name} and run again"):
        convert(saved, target, to="half", **SIZES)
    shutil.rmtree(room)
    convert(saved, target, to="half", **SIZES)
    assert load_file(target).keys() == load_file(saved).keys()
    assert sorted(os.listdir(tmp_path)) == [target.name, saved.name]
