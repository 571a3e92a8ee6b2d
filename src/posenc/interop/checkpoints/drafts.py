"""A target that is replaced as a whole or not at all, even if the process is killed.

A run works in a folder beside its target, ``NAME.posenc-convert``. Only one run can make that
folder, so it is the lock as well. In it are

- ``new``, which the run writes and renames to the target at the end;
- ``old``, the former target if it is a folder: complete as long as the target is missing.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from posenc._contract import checks

_fail = functools.partial(checks.fail, "convert")


def workspace(target: Path) -> Path:
    """The folder beside ``target`` in which a run works."""
    return target.with_name(f"{target.name}.posenc-convert")


@contextlib.contextmanager
def replaced(target: Path, *, folder: bool, overwrite: bool) -> Iterator[Path]:
    """A path to write to: it becomes ``target`` after the block, or is removed after an error."""
    work = workspace(target)
    old, new = work / "old", work / "new"
    try:
        os.mkdir(work, 0o700)
    except FileExistsError:
        rule, got = f"{work} must not exist", "a folder: a run is writing there, or was killed"
        first = f"move {old}, the complete former checkpoint, to {target}; then "
        first = first if old.exists() and not target.exists() else ""
        way_out = f"Wait for that run. If there is none, {first}delete {work} and run again."
        _fail(rule, got, way_out, FileExistsError)
    try:
        _check_replaceable(target, folder, overwrite)
        yield new
        # Another program may have made a target meanwhile.
        _check_replaceable(target, folder, overwrite)
        for path, _, _ in os.walk(work):
            _flush(path)
        if target.is_dir():
            # Folders cannot be swapped in one step.
            os.rename(target, old)
            _flush(work)
        os.replace(new, target)
        _flush(work)
        _flush(target.parent)
    finally:
        # Listing the folder raises on a failing disk, where os.path.exists returns False.
        if "old" in os.listdir(work) and not os.path.lexists(target):
            os.rename(old, target)
        shutil.rmtree(work)


def _check_replaceable(target: Path, folder: bool, overwrite: bool) -> None:
    replaceable = target.is_dir() if folder else target.is_file()
    if os.path.lexists(target) and not (overwrite and replaceable):
        rule = f"target must be new, or a {'folder' if folder else 'file'} to overwrite"
        way_out = "or pass overwrite=True (--overwrite)." if replaceable else "or move it away."
        _fail(rule, target, f"Pick another name, {way_out}", FileExistsError)
    if target.is_dir() and any(target.iterdir()) and not any(target.glob("*.safetensors")):
        rule = "a folder to overwrite must be a checkpoint, because everything in it is deleted"
        _fail(rule, target, "Pick another name.", FileExistsError)


def _flush(folder: str | Path) -> None:
    """Flush the names in a folder to the disk, where the system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
