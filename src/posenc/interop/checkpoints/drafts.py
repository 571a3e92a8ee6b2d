"""A target that is replaced as a whole or not at all, even if the process is killed.

A run works in a folder beside its target, ``NAME.posenc-convert``. Only one run can make that
folder, so it is the lock as well. In it are

- ``new``, which the run writes and renames to the target at the end;
- ``old``, the former target if it is a folder: complete as long as ``new`` is there too.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
    made = False
    try:
        with _uninterrupted():
            _make(work, target)
            made = True
        _check_replaceable(target, folder, overwrite)
        yield new
        # Another program may have made a target meanwhile.
        _check_replaceable(target, folder, overwrite)
        for path, _, _ in os.walk(work):
            _flush(path)
        with _uninterrupted():
            if target.is_dir():
                # Folders cannot be swapped in one step.
                os.rename(target, old)
                _flush(work)
            os.replace(new, target)
            _flush(work)
            _flush(target.parent)
            shutil.rmtree(work)
            made = False
    except BaseException:
        if made:
            with _uninterrupted():
                _undo(work, target)
        raise


def _make(work: Path, target: Path) -> None:
    try:
        os.mkdir(work, 0o700)
    except FileExistsError:
        rule, got = f"{work} must not exist", "a folder: a run is writing there, or was killed"
        old, first = work / "old", ""
        if old.exists() and (work / "new").exists():
            # The run ended between its two renames.
            place = "another place" if target.exists() else target
            first = f"move {old}, the complete former checkpoint, to {place}; then "
        way_out = f"Wait for that run. If there is none, {first}delete {work} and run again."
        _fail(rule, got, way_out, FileExistsError)


def _undo(work: Path, target: Path) -> None:
    """Put the former target back, if the new one has not taken its place, and remove ``work``."""
    old, new = work / "old", work / "new"
    # Listing the folder raises on a failing disk, where os.path.exists returns False.
    if {"old", "new"} <= set(os.listdir(work)):
        try:
            os.rename(old, target)
        except OSError as error:
            # Another program has made a folder there between the two renames, for example.
            rule = f"{old}, the former checkpoint, must go back to {target}"
            way_out = f"Move it, or {new}, to where you want it; then delete {work}."
            _fail(rule, error.strerror, way_out, OSError)
    shutil.rmtree(work)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Let signals that Python handles, such as that of Ctrl-C, wait until the block has ended."""
    handlers: dict[int, Any] = {}
    # Only the main thread is interrupted, and only there can handlers be set.
    if threading.current_thread() is threading.main_thread():
        found = {number: signal.getsignal(number) for number in signal.valid_signals()}
        handlers = {number: handler for number, handler in found.items() if callable(handler)}
    arrived: list[int] = []
    for number in handlers:
        signal.signal(number, lambda number, frame: arrived.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in arrived:
            signal.raise_signal(number)


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
