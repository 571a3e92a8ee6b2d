"""A target that is replaced as a whole or not at all, whenever the process ends.

A run works in one folder beside its target, ``NAME.posenc-convert``, which has

- ``posenc.lock``, locked while the run lives, so that two runs do not share the folder;
- ``new``, which the run writes and renames to the target at the end;
- ``old``, the former target if it is a folder, until ``new`` is renamed: always complete;
- ``gone``, the former target, to be deleted.

`_clean_up` reads these names alone, after a run, after a failed one, and before the next.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from posenc._contract import checks

try:
    import fcntl
except ImportError:  # On Windows, a lock is held while its file exists.
    fcntl = None  # type: ignore[assignment]

_LOCK = "posenc.lock"
_NAMES = frozenset((_LOCK, "new", "old", "gone"))
_fail = functools.partial(checks.fail, "convert")


def workspace(target: Path) -> Path:
    """The folder beside ``target`` in which runs work."""
    return target.with_name(f"{target.name}.posenc-convert")


@contextlib.contextmanager
def replaced(target: Path, *, folder: bool, overwrite: bool) -> Iterator[Path]:
    """A path to write to: it becomes ``target`` after the block, or is removed after an error."""
    work = _make_workspace(target)
    with _locked(work / _LOCK, target):
        _clean_up(work, target)
        try:
            _check_replaceable(target, folder, overwrite)
            yield work / "new"
            # Another program may have made a target meanwhile.
            _check_replaceable(target, folder, overwrite)
            _publish(work, target)
        finally:
            _clean_up(work, target)
            os.unlink(work / _LOCK)
            # The next run may have put its own lock here by now.
            with contextlib.suppress(OSError):
                os.rmdir(work)


def _check_replaceable(target: Path, folder: bool, overwrite: bool) -> None:
    if os.path.lexists(target) and (not overwrite or target.is_dir() != folder):
        rule = f"target must be new, or a {'folder' if folder else 'file'} to overwrite"
        way_out = "Pick another name, or pass overwrite=True (--overwrite)."
        _fail(rule, target, way_out, FileExistsError)
    if target.is_dir() and any(target.iterdir()) and not any(target.glob("*.safetensors")):
        rule = "a folder to overwrite must be a checkpoint, because everything in it is deleted"
        _fail(rule, target, "Pick another name.", FileExistsError)


def _make_workspace(target: Path) -> Path:
    work = workspace(target)
    with contextlib.suppress(FileExistsError):
        os.mkdir(work, 0o700)
    is_folder = work.is_dir() and not work.is_symlink()
    names = set(os.listdir(work)) if is_folder else set()
    # A run makes the lock first and removes it last.
    if not is_folder or names - _NAMES or (names and _LOCK not in names):
        rule = f"{work} must be free, because the result is written there first"
        _fail(rule, "a file or folder that no run has made", "Move it away.", FileExistsError)
    return work


@contextlib.contextmanager
def _locked(path: Path, target: Path) -> Iterator[None]:
    try:
        file, created = open(path, "x"), True  # noqa: SIM115
    except FileExistsError:
        file, created = open(path, "a"), False  # noqa: SIM115
    with file:
        if _is_held(file, path, created):
            rule, got = f"one run at a time must write {target}", f"another run, which holds {path}"
            way_out = f"Wait for it; if none is running, delete {path} and run again."
            _fail(rule, got, way_out, FileExistsError)
        if fcntl is None:
            # Windows cannot remove a file that is open.
            file.close()
        yield


def _is_held(file: IO[str], path: Path, created: bool) -> bool:
    """Whether another run holds the lock; where files cannot be locked, the file is the lock."""
    if fcntl is None:
        return not created
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The run that held it may have deleted the file since it was opened here.
        return not os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except (BlockingIOError, FileNotFoundError):
        return True
    except OSError:
        return not created


def _publish(work: Path, target: Path) -> None:
    """Rename ``new`` to ``target``, and flush each step to the disk before the next."""
    new = work / "new"
    for path, _, _ in os.walk(new):
        _flush(path)
    if new.is_dir() and target.is_dir():
        # Folders cannot be swapped in one step.
        os.rename(target, work / "old")
        _flush(work)
    os.replace(new, target)
    _flush(work)
    _flush(target.parent)


def _clean_up(work: Path, target: Path) -> None:
    """Leave one complete checkpoint at ``target``, whatever step a run had reached."""
    old, new, gone = (work / name for name in ("old", "new", "gone"))
    try:
        if os.path.lexists(old):
            if not os.path.lexists(target):
                os.rename(old, target)
            elif os.path.lexists(new):
                # The target is neither old nor new, so another program made it.
                raise FileExistsError(f"a new {target}")
            else:
                os.rename(old, gone)
        for path in (new, gone):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    except OSError as error:
        rule = f"the files of an unfinished run in {work} must be cleaned up"
        way_out = (
            f"Move {old}, if it is there, to another name: it is the checkpoint that was"
            f" {target}. Then delete {work}."
        )
        raise OSError(checks.message("convert", rule, error, way_out)) from error


def _flush(folder: str | Path) -> None:
    """Flush the names in a folder to the disk, where the system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
