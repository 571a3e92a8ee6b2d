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
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, BinaryIO

from posenc._contract import checks

try:
    import fcntl
except ImportError:  # Windows has none; there the lock is that its file exists.
    fcntl = None  # type: ignore[assignment]

_LOCK = "posenc.lock"
_NAMES = frozenset((_LOCK, "new", "old", "gone"))
_NOTE = """`posenc convert` works in this folder.
If it is not running any more: `old`, if it is there, is the whole checkpoint that it was to
replace, and `new` may be incomplete. The next run with the same target puts this in order.
"""


def workspace(target: Path) -> Path:
    """The folder beside ``target`` in which runs work."""
    return target.with_name(f"{target.name}.posenc-convert")


def recover(target: Path) -> None:
    """Put in order what a killed run has left beside ``target``, if anything."""
    if os.path.lexists(workspace(target)):
        with _working(target):
            pass


@contextlib.contextmanager
def replaced(target: Path, overwrite: bool) -> Iterator[Path]:
    """A path to write to, which becomes ``target`` when the block ends, or is removed."""
    with _working(target) as room:
        new = room / "new"
        yield new
        if not overwrite and os.path.lexists(target):
            rule, way_out = "target must still be new", "Pick another name."
            raise FileExistsError(checks.message("convert", rule, target, way_out))
        for folder, _, _ in os.walk(new):
            _flush(folder)
        if new.is_dir() and target.is_dir():
            # Folders cannot be swapped in one step.
            os.rename(target, room / "old")
            _flush(room)
        os.replace(new, target)
        _flush(room)
        _flush(target.parent)


@contextlib.contextmanager
def written(path: Path, mode: int) -> Iterator[BinaryIO]:
    """A new file to write to, flushed to the disk, and of this mode, when the block ends."""
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    set_mode(path, mode)


def set_mode(path: Path, mode: int) -> None:
    """Give a file or folder its permissions, on disks that have any."""
    with contextlib.suppress(PermissionError):
        os.chmod(path, mode & 0o777)


@contextlib.contextmanager
def _working(target: Path) -> Iterator[Path]:
    room = workspace(target)
    with contextlib.suppress(FileExistsError):
        os.mkdir(room, 0o700)
    ours = room.is_dir() and not room.is_symlink()
    names = set(os.listdir(room)) if ours else set()
    # A run makes the lock first and removes it last.
    if not ours or names - _NAMES or (names and _LOCK not in names):
        rule = f"{room} must be free, because the result is written there first"
        got, way_out = "a file or folder that no run has made", "Move it away."
        raise FileExistsError(checks.message("convert", rule, got, way_out))
    with _locked(room / _LOCK, target):
        _settle(room, target)
        try:
            yield room
        finally:
            _settle(room, target)
            os.unlink(room / _LOCK)
            # The next run may have put its own lock here by now.
            with contextlib.suppress(OSError):
                os.rmdir(room)


@contextlib.contextmanager
def _locked(path: Path, target: Path) -> Iterator[None]:
    file: IO[str]
    try:
        file, held = open(path, "x"), False  # noqa: SIM115
    except FileExistsError:
        file, held = open(path, "a"), True  # noqa: SIM115
    with file:
        if fcntl is None:
            # An open file could not be removed at the end.
            file.close()
        else:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The run that held it may have removed it since it was opened here.
                held = not os.path.exists(path) or not os.path.samestat(
                    os.fstat(file.fileno()), os.stat(path)
                )
            except BlockingIOError:
                held = True
            except OSError:
                # This disk has no locks: as without fcntl, the file stands for one.
                pass
        if held:
            rule = f"one run at a time must write {target}"
            got = f"another one, which holds {path}"
            way_out = f"Wait for it; if none is running, delete {path} and run again."
            raise FileExistsError(checks.message("convert", rule, got, way_out))
        if not file.closed and not os.fstat(file.fileno()).st_size:
            file.write(_NOTE)
            file.flush()
        yield


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
        for rest in (new, gone):
            if rest.is_dir() and not rest.is_symlink():
                shutil.rmtree(rest)
            else:
                rest.unlink(missing_ok=True)
    except OSError as wrong:
        rule = f"what an unfinished run left in {room} must be put in order"
        way_out = (
            f"Move {old}, if it is there, to another name: it is the checkpoint that was"
            f" {target}. Then delete {room}."
        )
        raise OSError(checks.message("convert", rule, wrong, way_out)) from wrong


def _flush(folder: str | Path) -> None:
    """Ask the disk to hold the names in a folder, where the system can be asked."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
