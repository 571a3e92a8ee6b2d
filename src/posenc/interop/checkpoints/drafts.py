"""A target that appears whole or not at all, whenever the process ends.

A run works in one folder beside its target, ``NAME.posenc-convert``:

- ``posenc.lock`` is locked while the run lives, so that two runs do not share the folder;
- ``new`` is what the run writes, and becomes the target by being renamed;
- ``old`` is the folder that was the target, until ``new`` has taken its place;
- ``gone`` is the same folder, to be deleted.

``old`` is therefore always whole. `_settle` puts the folder in order, and knows nothing but these
names: it serves the end of a run, a run that failed, and the run after one that was killed.
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
except ImportError:  # Windows has none; there the lock is that its file exists.
    fcntl = None  # type: ignore[assignment]

_LOCK = "posenc.lock"
_NAMES = frozenset((_LOCK, "new", "old", "gone"))
_fail = functools.partial(checks.fail, "convert")


def workspace(target: Path) -> Path:
    """The folder beside ``target`` in which runs work."""
    return target.with_name(f"{target.name}.posenc-convert")


@contextlib.contextmanager
def replaced(target: Path, *, folder: bool, overwrite: bool) -> Iterator[Path]:
    """A path to write a file or folder to: it becomes ``target`` after the block, or is removed.

    What a killed run has left beside ``target`` is put in order first.
    """
    room = _make_workspace(target)
    with _locked(room / _LOCK, target):
        _settle(room, target)
        try:
            _check_replaceable(target, folder, overwrite)
            yield room / "new"
            # Somebody may have made one meanwhile.
            _check_replaceable(target, folder, overwrite)
            _publish(room, target)
        finally:
            _settle(room, target)
            os.unlink(room / _LOCK)
            # The next run may have put its own lock here by now.
            with contextlib.suppress(OSError):
                os.rmdir(room)


def _check_replaceable(target: Path, folder: bool, overwrite: bool) -> None:
    if os.path.lexists(target) and (not overwrite or target.is_dir() != folder):
        rule = f"target must be new, or a {'folder' if folder else 'file'} to overwrite"
        way_out = "Pick another name, or pass overwrite=True (--overwrite)."
        _fail(rule, target, way_out, FileExistsError)
    if target.is_dir() and any(target.iterdir()) and not any(target.glob("*.safetensors")):
        rule = "a folder to overwrite must be a checkpoint, because all in it goes"
        _fail(rule, target, "Pick another name.", FileExistsError)


def _make_workspace(target: Path) -> Path:
    room = workspace(target)
    with contextlib.suppress(FileExistsError):
        os.mkdir(room, 0o700)
    is_folder = room.is_dir() and not room.is_symlink()
    names = set(os.listdir(room)) if is_folder else set()
    # A run makes the lock first and removes it last.
    if not is_folder or names - _NAMES or (names and _LOCK not in names):
        rule = f"{room} must be free, because the result is written there first"
        _fail(rule, "a file or folder that no run has made", "Move it away.", FileExistsError)
    return room


@contextlib.contextmanager
def _locked(path: Path, target: Path) -> Iterator[None]:
    try:
        file, created = open(path, "x"), True  # noqa: SIM115
    except FileExistsError:
        file, created = open(path, "a"), False  # noqa: SIM115
    with file:
        if _is_held(file, path, created):
            rule, got = f"one run at a time must write {target}", f"another one, which holds {path}"
            way_out = f"Wait for it; if none is running, delete {path} and run again."
            _fail(rule, got, way_out, FileExistsError)
        if fcntl is None:
            # Windows cannot remove a file that is open.
            file.close()
        yield


def _is_held(file: IO[str], path: Path, created: bool) -> bool:
    """Whether another run has the lock; where files cannot be locked, one that is there is held."""
    if fcntl is None:
        return not created
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The run that held it may have removed it since it was opened here.
        return not os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except (BlockingIOError, FileNotFoundError):
        return True
    except OSError:
        return not created


def _publish(room: Path, target: Path) -> None:
    """Put ``new`` in the place of ``target``, in steps that the disk holds one after the other."""
    new = room / "new"
    for path, _, _ in os.walk(new):
        _flush(path)
    if new.is_dir() and target.is_dir():
        # Folders cannot be swapped in one step.
        os.rename(target, room / "old")
        _flush(room)
    os.replace(new, target)
    _flush(room)
    _flush(target.parent)


def _settle(room: Path, target: Path) -> None:
    """Leave one whole checkpoint at ``target``, and nothing else, whatever step came last."""
    old, new, gone = (room / name for name in ("old", "new", "gone"))
    try:
        if os.path.lexists(old):
            if not os.path.lexists(target):
                os.rename(old, target)
            elif os.path.lexists(new):
                # It did not take the place of the old one, so what did is not ours.
                raise FileExistsError(f"a new {target}")
            else:
                os.rename(old, gone)
        for path in (new, gone):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    except OSError as error:
        rule = f"what an unfinished run left in {room} must be put in order"
        way_out = (
            f"Move {old}, if it is there, to another name: it is the checkpoint that was"
            f" {target}. Then delete {room}."
        )
        raise OSError(checks.message("convert", rule, error, way_out)) from error


def _flush(folder: str | Path) -> None:
    """Ask the disk to hold the names in a folder, where the system can be asked."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
