"""Safetensors files, one tensor at a time: an 8-byte length, a JSON header, then the bytes.

The reader needs no package and knows no dtype but by name, so that every file can pass through.
"""

from __future__ import annotations

import functools
import json
import math
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from posenc._contract import checks, files
from posenc.interop.checkpoints import drafts

CHUNK = 1 << 22
# As many as a torch.Tensor may have.
_MOST_DIMENSIONS = 64
_METADATA = "__metadata__"
# Called with the bytes that were written since it was last called.
Advance = Callable[[int], None]
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file: where its bytes are, and how they are divided."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.stop - self.start


class Source:
    """A safetensors file opened for reading; nothing but its header is held."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with files.open_regular("convert", path) as file:
            status = os.fstat(file.fileno())
            self.header, self.body = _header(path, file, status.st_size)
        self.mode = stat.S_IMODE(status.st_mode)
        metadata = self.header.get(_METADATA, {})
        self.metadata: dict[str, str] = metadata if isinstance(metadata, dict) else {}
        self.entries = dict(_entries(path, self.header, status.st_size - self.body))

    def read(self, name: str) -> Tensor:
        """The bytes of one tensor, as uint8 of ``(nbytes,)``."""
        entry = self.entries[name]
        with files.open_regular("convert", self.path) as file:
            file.seek(self.body + entry.start)
            return _exactly(self.path, file, entry.nbytes)

    def tensor(self, name: str) -> Tensor:
        """One tensor; bytes ``(rows, n)`` where torch has no name for the dtype."""
        entry = self.entries[name]
        data = self.read(name)
        if entry.dtype in _DTYPES:
            return data.view(_DTYPES[entry.dtype]).view(entry.shape)
        whole = entry.shape and entry.nbytes and entry.nbytes % entry.shape[0] == 0
        return data.view(entry.shape[0], -1) if whole else data


def write(
    source: Source,
    target: Path,
    metadata: Mapping[str, str],
    rows: Mapping[str, Tensor],
    tell: Callable[[str, int], None],
) -> None:
    """Copy ``source`` to ``target``, with the rows of some tensors in another order.

    Sizes do not change, so neither does the header but for its metadata. Held at any time: the
    bytes of one tensor that moves, or a chunk of one that does not.
    """
    opened = files.open_regular("convert", source.path)
    with opened as old, drafts.written(target, source.mode) as new:
        header = dict(source.header)
        header.pop(_METADATA, None)
        if metadata:
            header = {_METADATA: dict(metadata), **header}
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        # The format wants the bytes to start at a multiple of eight.
        text += b" " * (-len(text) % 8)
        new.write(len(text).to_bytes(8, "little") + text)
        for name, entry in sorted(source.entries.items(), key=lambda item: item[1].start):
            old.seek(source.body + entry.start)
            advance = functools.partial(tell, name)
            if name in rows:
                if entry.nbytes % len(rows[name]):
                    raise _broken(source.path, f"rows of {name} are not whole bytes")
                data = _exactly(source.path, old, entry.nbytes)
                _write_rows(new, data.view(len(rows[name]), -1), rows[name], advance)
                del data
            else:
                _copy(source.path, old, new, entry.nbytes, advance)


def _write_rows(file: BinaryIO, data: Tensor, rows: Tensor, advance: Advance) -> None:
    # Through a buffer of Python's own: torch's memory can only be written by way of numpy.
    width = data.shape[1]
    step = max(1, CHUNK // max(1, width))
    for some in rows.split(step):
        buffer = bytearray(len(some) * width)
        chunk = torch.frombuffer(buffer, dtype=torch.uint8).view(-1, width)
        torch.index_select(data, 0, some, out=chunk)
        file.write(buffer)
        advance(len(buffer))


def _copy(path: Path, old: BinaryIO, new: BinaryIO, nbytes: int, advance: Advance) -> None:
    while nbytes:
        data = old.read(min(CHUNK, nbytes))
        if not data:
            raise _broken(path, "its tensors end early")
        new.write(data)
        nbytes -= len(data)
        advance(len(data))


def _exactly(path: Path, file: BinaryIO, nbytes: int) -> Tensor:
    buffer = bytearray(nbytes)
    if file.readinto(buffer) != nbytes:  # type: ignore[attr-defined]
        raise _broken(path, "its tensors end early")
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(buffer, dtype=torch.uint8)


def _header(path: Path, file: BinaryIO, size: int) -> tuple[dict[str, Any], int]:
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, files.LARGEST_JSON):
        if path.suffix != ".safetensors" or length.to_bytes(8, "little") == b"version ":
            rule, got = "source must be in the format of safetensors", f"{path}, which is not"
            way_out = "Save a .bin again with safetensors; fetch what Git LFS points to."
            raise ValueError(checks.message("convert", rule, got, way_out))
        raise _broken(path, f"a header of {length} bytes does not fit a file of {size}")
    try:
        header = files.parse_json(file.read(length), _once)
        # Escapes may spell what is no character, and what cannot be written again.
        json.dumps(header, ensure_ascii=False).encode()
    except ValueError as wrong:
        raise _broken(path, f"its header is {wrong}") from None
    return header, 8 + length


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _entries(path: Path, header: Mapping[str, Any], size: int) -> Iterator[tuple[str, Entry]]:
    end = 0
    found = []
    for name, value in header.items():
        if name == _METADATA:
            continue
        try:
            shape = tuple(value["shape"])
            start, stop = value["data_offsets"]
            sound = all(type(n) is int and 0 <= n < 1 << 63 for n in (*shape, start, stop))
            sound = sound and len(shape) <= _MOST_DIMENSIONS and isinstance(value["dtype"], str)
            entry = Entry(value["dtype"], shape, start, stop)
        except (KeyError, TypeError, ValueError):
            sound = False
        if not sound:
            raise _broken(path, f"{name} has no dtype, shape and data_offsets")
        dtype, size_said = _DTYPES.get(entry.dtype), math.prod(shape)
        # No element of any dtype is smaller than a bit.
        fits = size_said <= 8 * entry.nbytes
        if not (fits if dtype is None else size_said * dtype.itemsize == entry.nbytes):
            raise _broken(path, f"{name} has {entry.nbytes} bytes for shape {list(shape)}")
        found.append((name, entry))
    for name, entry in sorted(found, key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != end or entry.stop < entry.start:
            raise _broken(path, f"{name} starts at byte {entry.start} instead of {end}")
        end = entry.stop
    if end != size:
        raise _broken(path, f"its tensors take {end} bytes and the file has {size}")
    yield from found


def _broken(path: Path, why: str) -> ValueError:
    rule = f"{path} must be a whole safetensors file"
    return ValueError(checks.message("convert", rule, f"one where {why}", "Download it again."))
