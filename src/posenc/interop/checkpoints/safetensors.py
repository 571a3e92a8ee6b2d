"""Safetensors files, one tensor at a time: an 8-byte length, a JSON header, then the bytes.

The safetensors package refuses dtypes that it does not know, and holds all tensors in memory to
write a file. Here rows are bytes, and one tensor is in memory at a time.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from posenc._contract import checks, files

CHUNK = 1 << 22
# As many as a torch.Tensor may have.
_MOST_DIMENSIONS = 64
_METADATA = "__metadata__"
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "BOOL": torch.bool,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor in a file: dtype, shape, and where its bytes are."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.stop - self.start


class Source:
    """A safetensors file, of which the header is in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with files.open_regular("convert", path) as file:
            status = os.fstat(file.fileno())
            self.header, self.body = _header(path, file, status.st_size)
        self.mode = status.st_mode
        metadata = self.header.pop(_METADATA, {})
        self.metadata: dict[str, str] = metadata if isinstance(metadata, dict) else {}
        entries = {name: _entry(path, name, value) for name, value in self.header.items()}
        # In the order of their bytes.
        self.entries = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)))
        end, size = 0, status.st_size - self.body
        for name, entry in self.entries.items():
            if entry.start != end:
                raise _broken(path, f"{name} starts at byte {entry.start} instead of {end}")
            end = entry.stop
        if end != size:
            raise _broken(path, f"its tensors take {end} bytes and the file has {size}")

    def tensor(self, name: str) -> Tensor:
        """One tensor; as bytes ``(rows, n)`` where torch has no such dtype."""
        entry = self.entries[name]
        with files.open_regular("convert", self.path) as file:
            data = _read(self, file, entry.start, entry.stop)
        dtype = _DTYPES.get(entry.dtype, torch.uint8)
        if not data:
            return torch.empty(entry.shape, dtype=dtype, device="cpu")
        shape = entry.shape if entry.dtype in _DTYPES else (entry.shape[0], -1)
        return torch.frombuffer(data, dtype=dtype).view(shape)


def write(
    source: Source,
    target: Path,
    metadata: Mapping[str, str],
    rows: Mapping[str, Tensor],
    tell: Callable[[str, int], None],
) -> None:
    """Copy ``source`` to ``target`` with new ``metadata``, and tensors in the order of ``rows``.

    One tensor that moves, or one chunk of a tensor that stays, is in memory at a time.
    """
    header = {_METADATA: dict(metadata), **source.header} if metadata else source.header
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    # The format aligns the tensors to eight bytes.
    text += b" " * (-len(text) % 8)
    opened = files.open_regular("convert", source.path)
    with opened as old, files.create(target, source.mode) as new:
        new.write(len(text).to_bytes(8, "little") + text)
        for name, entry in source.entries.items():
            if name in rows and entry.nbytes % len(rows[name]):
                raise _broken(source.path, f"rows of {name} are not whole bytes")
            for chunk in _chunks(source, old, entry, rows.get(name)):
                new.write(chunk)
                tell(name, len(chunk))


def _chunks(
    source: Source, file: BinaryIO, entry: Entry, order: Tensor | None
) -> Iterator[bytes | memoryview]:
    """The bytes of a tensor, with its rows in a new order if one is given."""
    if order is None:
        for start in range(entry.start, entry.stop, CHUNK):
            yield _read(source, file, start, min(start + CHUNK, entry.stop))
        return
    data = _read(source, file, entry.start, entry.stop)
    width = len(data) // len(order)
    for some in order.split(max(1, CHUNK // width)):
        yield b"".join(data[row * width : (row + 1) * width] for row in some.tolist())


def _read(source: Source, file: BinaryIO, start: int, stop: int) -> memoryview:
    data = bytearray(stop - start)
    file.seek(source.body + start)
    if file.readinto(data) != len(data):  # type: ignore[attr-defined]
        raise _broken(source.path, "its tensors end early")
    return memoryview(data)


def _header(path: Path, file: BinaryIO, size: int) -> tuple[dict[str, Any], int]:
    """The header, and the offset of the tensors' bytes."""
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, files.LARGEST_JSON):
        if path.suffix != ".safetensors" or length.to_bytes(8, "little") == b"version ":
            rule, got = "source must be a safetensors file", path
            way_out = "Save a .bin file as safetensors; run git lfs pull for a Git LFS pointer."
            checks.fail("convert", rule, got, way_out)
        raise _broken(path, f"a header of {length} bytes does not fit a file of {size}")
    try:
        return files.parse_json(file.read(length)), 8 + length
    except ValueError as error:
        raise _broken(path, f"its header is {error}") from None


def _entry(path: Path, name: str, value: Any) -> Entry:
    try:
        shape, (start, stop) = tuple(value["shape"]), value["data_offsets"]
        sound = all(type(n) is int and 0 <= n < 1 << 63 for n in (*shape, start, stop))
        sound = sound and len(shape) <= _MOST_DIMENSIONS and isinstance(value["dtype"], str)
        entry = Entry(value["dtype"], shape, start, stop)
    except (KeyError, TypeError, ValueError):
        sound = False
    if not sound:
        raise _broken(path, f"{name} has no dtype, shape and data_offsets")
    dtype, size = _DTYPES.get(entry.dtype), math.prod(shape)
    # The elements of an unknown dtype have at least a bit each.
    fits = size <= 8 * entry.nbytes if dtype is None else size * dtype.itemsize == entry.nbytes
    if not fits or entry.nbytes < 0:
        raise _broken(path, f"{name} has {entry.nbytes} bytes for shape {list(shape)}")
    return entry


def _broken(path: Path, why: str) -> ValueError:
    rule = f"{path} must be a whole safetensors file"
    return ValueError(checks.message("convert", rule, f"one where {why}", "Download it again."))
