"""What a conversion does while it runs: memory, progress, and how it ends."""

import errno
import os
import shutil
import stat
import sys
import weakref

import pytest
import safetensors.torch
from safetensors.torch import load_file

from posenc.interop.checkpoints import convert
from support import hf_models as models
from support.checkpoints import SIZES, save_folder, save_layers

ONE_HEAD = {"num_heads": 1, "head_dim": 8}


@pytest.fixture
def saved(tmp_path):
    return save_layers(tmp_path / "old.safetensors")


@pytest.fixture
def source(tmp_path):
    return save_folder(tmp_path / "source", {"model_type": "llama", "hidden_size": 8})


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


def test_a_folder_is_not_overwritten_by_a_file(saved, tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    with pytest.raises(FileExistsError, match=r"a file to overwrite[^$]*or move it away"):
        convert(saved, target, to="half", overwrite=True, **SIZES)
    assert target.is_dir()


def test_one_shard_is_in_memory_at_a_time(tmp_path, monkeypatch):
    models.build("Llama", models.GQA).save_pretrained(tmp_path / "old", max_shard_size="40KB")
    save, written = safetensors.torch.save_file, []

    def save_after_the_others_are_freed(tensors, *arguments):
        assert [name for name, tensor in written if tensor() is not None] == []
        written.extend((name, weakref.ref(tensor)) for name, tensor in tensors.items())
        save(tensors, *arguments)

    monkeypatch.setattr(safetensors.torch, "save_file", save_after_the_others_are_freed)
    report = convert(tmp_path / "old", tmp_path / "new", to="interleaved")
    assert len(written) == report.tensors > 0


def test_progress_is_reported_file_by_file(tmp_path):
    models.build("Llama", models.GQA).save_pretrained(tmp_path / "old", max_shard_size="40KB")
    told = []

    def progress(name, share):
        told.append((name, share))

    convert(tmp_path / "old", tmp_path / "new", to="interleaved", progress=progress)
    names, shares = zip(*told, strict=True)
    assert sorted(names) == sorted(path.name for path in tmp_path.glob("old/*.safetensors"))
    assert list(shares) == sorted(set(shares))
    assert shares[-1] == 1.0


def test_a_missing_package_is_named_with_its_extra(saved, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"needs safetensors: pip install 'posenc\[cli\]'"):
        convert(saved, tmp_path / "new", to="half", **SIZES)
    assert os.listdir(tmp_path) == [saved.name]


def interrupt(*arguments):
    raise KeyboardInterrupt


def fill_the_disk(*arguments):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("fail", [interrupt, fill_the_disk])
@pytest.mark.parametrize("step", ["safetensors.torch.save_file", "os.replace"])
@pytest.mark.parametrize("exists", ["a folder", "a file", "nothing"])
def test_a_conversion_that_fails_leaves_the_target_as_it_was(
    source, tmp_path, monkeypatch, fail, step, exists
):
    target = tmp_path / "target"
    if exists == "a folder":
        save_folder(target, {"of": "before"})
    elif exists == "a file":
        source = source / "model.safetensors"
        target.write_text("of before")
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    monkeypatch.setattr(step, fail)
    with pytest.raises((KeyboardInterrupt, OSError)):
        convert(source, target, to="interleaved", overwrite=True, **ONE_HEAD)
    after = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    assert after == before


def test_a_target_that_appears_during_a_run_is_refused(source, tmp_path):
    target = tmp_path / "target"

    def convert_too(name, share):
        if not target.exists():
            convert(source, target, to="interleaved", **ONE_HEAD)

    with pytest.raises(FileExistsError, match="target must be new"):
        convert(source, target, to="interleaved", progress=convert_too, **ONE_HEAD)
    assert load_file(target / "model.safetensors").keys()
    assert sorted(os.listdir(tmp_path)) == ["source", "target"]


@pytest.mark.skipif(os.name == "nt", reason="there are no modes")
def test_files_and_folders_keep_their_modes(source, tmp_path):
    (source / "sub").mkdir(mode=0o700)
    modes = {
        "model.safetensors": 0o640,
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
    convert(source, tmp_path / "target", to="interleaved", **ONE_HEAD)
    new = {name: stat.S_IMODE((tmp_path / "target" / name).stat().st_mode) for name in modes}
    assert new == modes
    convert(source / "model.safetensors", tmp_path / "file", to="interleaved", **ONE_HEAD)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


def test_a_file_that_cannot_be_written_is_an_error_with_its_name(source, tmp_path):
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match=r"cannot write model\.safetensors: .*File too large"):
            convert(source, tmp_path / "target", to="interleaved", **ONE_HEAD)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(tmp_path) == ["source"]


def test_a_disk_that_is_too_small_is_refused_before_the_work(source, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OSError, match=r"bytes free, got 10.\n  Free some space"):
        convert(source, tmp_path / "target", to="interleaved", **ONE_HEAD)
    assert os.listdir(tmp_path) == ["source"]
