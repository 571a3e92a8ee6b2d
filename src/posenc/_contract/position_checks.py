"""Checks of positions: tensors of the right shape, and values within their limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from posenc._contract import sharding
from posenc._contract.checks import (
    FLOAT_DTYPES,
    INT_DTYPES,
    MAX_POSITION,
    describe,
    fail,
    integer,
    is_one_of,
)
from posenc._contract.tracing import device_assert, in_transform, is_readable


class Limit(NamedTuple):
    """Positions must be below ``value``, set by the argument ``name``, or by default 2**31 + 1."""

    value: int = MAX_POSITION + 1
    name: str = ""
    hint: str = ""


UNLIMITED = Limit()
# The way out of a negative position, which padding on the left suggests.
FROM_ZERO = (
    "Count positions from zero; for padding on the left, pass "
    "position_ids=positions.from_left_padding(mask)."
)


def index_tensor(
    who: str,
    name: str,
    value: Any,
    shapes: Sequence[tuple[int, ...]],
    device: torch.device,
    *,
    kind: str = "an integer tensor",
    floating: bool = False,
    hint: str = "Pass one position for each token.",
) -> Tensor:
    """``value`` on ``device`` as int64, or as float64 if it is floating; values are not read.

    An error names ``kind`` and the first two of the ``shapes``.
    """
    typed = isinstance(value, Tensor) and (
        value.dtype in INT_DTYPES or (floating and value.dtype in (torch.float32, torch.float64))
    )
    if not typed or not is_one_of(value.shape, shapes):
        rule = f"{name} must be {kind} of shape {' or '.join(map(str, shapes[:2]))}"
        fail(who, rule, describe(value), hint, ValueError if typed else TypeError)
    wide = torch.int64
    if floating and value.is_floating_point():
        wide = torch.float32 if device.type == "mps" else torch.float64
    if value.device == device and value.dtype is wide:
        return value  # type: ignore[no-any-return]
    if value.is_meta and device.type != "meta":
        fail(who, f"{name} must hold values", "a meta tensor", f"Pass {name} on {device}.")
    return value.to(device=device, dtype=wide)  # type: ignore[no-any-return]


def offsets(who: str, value: Any, x: Tensor, name: str = "offset", *more: tuple[()]) -> Tensor:
    """Integers for the sequences of ``x``: int64 ``(B,)``, or of a shape in ``more``; not read."""
    shapes = ((x.shape[0] if x.dim() > 2 else 1,), *more)
    kind, hint = "an int, or an integer tensor", "Pass one for each sequence."
    if name == "offset":
        hint = "Pass one for each sequence, or the positions of tokens as position_ids=."
    return index_tensor(who, name, value, shapes, x.device, kind=kind, hint=hint)


def position_ids(who: str, ids: Any, x: Tensor, limit: Limit = UNLIMITED) -> Tensor:
    """Positions of the tokens of ``x``, ``(B, ..., L, D)``, as int64 ``(L,)`` or ``(B, L)``.

    Their values are checked only if they are copied from the CPU to another device.
    """
    shape, device = x.shape, x.device
    length = shape[-2]
    shapes = ((length,), (shape[0], length), (1, length)) if len(shape) > 2 else ((length,),)
    moved = index_tensor(who, "position_ids", ids, shapes, device)
    if moved is not ids and ids.device != device and is_readable(ids):
        check_ids(who, ids, limit)
    return moved


def coordinates(
    who: str, name: str, at: Any, x: Tensor, axes: int | None, limit: Limit = UNLIMITED
) -> Tensor:
    """Positions of the tokens of ``x``, int64 or float64, ``(axes, ..., L)`` if there are axes.

    Floating ones and those with several axes may be negative: images often count from the middle.
    """
    batch, length = x.shape[0], x.shape[-2]
    lead = () if axes is None else (axes,)
    one = axes is None or (isinstance(at, Tensor) and at.dim() == 1)
    if axes is not None and isinstance(at, Tensor) and at.dim() == 1:
        at = at.expand(axes, *at.shape)
    shapes = ((*lead, length), (*lead, batch, length), (*lead, 1, length))
    kind = "an integer, float32 or float64 tensor"
    hint = f"Pass one position for each token; {name}.expand(A, -1, -1) repeats it for A axes."
    # The second comparison would be a guard of compiled graphs, so it comes after the first.
    if isinstance(at, Tensor) and not is_one_of(at.shape, shapes) and at.shape == (length, axes):
        hint = f"Pass {name}.T: coordinates come first."
    ids = index_tensor(who, name, at, shapes, x.device, kind=kind, floating=True, hint=hint)
    if one and is_readable(at) and not at.is_floating_point():
        check_ids(who, at, limit)
    elif is_readable(at) and at.numel():
        low, high = (float(end) for end in torch.aminmax(at.detach()))
        if not (low >= -MAX_POSITION and high < limit.value):
            below = f"below {limit.name}={limit.value}" if limit.name else "at most 2**31"
            rule = f"{name} must be finite and {below}"
            fail(who, rule, f"{low:g} to {high:g}", "Pass smaller coordinates.")
    return ids


def positions(who: str, name: str, at: Any) -> Tensor:
    """``at`` if it is an integer or floating tensor of at least one dimension."""
    typed = isinstance(at, Tensor) and (at.dtype in INT_DTYPES or at.dtype in FLOAT_DTYPES)
    if not typed or at.dim() == 0:
        rule = f"{name} must be a tensor of positions, (L,) or (B, L)"
        fail(who, rule, describe(at), "Pass for example torch.arange(L).", TypeError)
    return at  # type: ignore[no-any-return]


def first_position(who: str, offset: Any) -> int:
    """An ``offset`` that is an int of at least zero."""
    return integer(who, "offset", offset, least=0, hint=FROM_ZERO)


def exclusive_offset(who: str, offset: int | Tensor) -> None:
    """Refuse an offset in addition to position_ids."""
    if isinstance(offset, Tensor) or first_position(who, offset) != 0:
        rule = "offset and position_ids exclude each other"
        fail(who, rule, f"offset={offset}", "Add offset to position_ids.")


def check_position(who: str, value: int, limit: Limit, instead: str = "smaller ones") -> None:
    """Refuse a position below zero, or at or past ``limit``."""
    if value < 0:
        fail(who, "positions must not be negative", value, FROM_ZERO)
    if value >= limit.value and not limit.name:
        fail(who, "positions must be at most 2**31", value, f"Pass {instead}.")
    if value >= limit.value:
        rule = f"positions must stay below {limit.name}={limit.value}"
        fail(who, rule, value, limit.hint or f"Raise {limit.name}, or pass {instead}.")


def check_range(who: str, start: int, length: int, limit: Limit = UNLIMITED) -> None:
    """Refuse ``length`` positions from ``start`` on that go past ``limit``."""
    if not limit.name and torch.compiler.is_compiling():
        # A comparison would fix the length in the graph.
        return
    if start + length > limit.value:
        instead = "a smaller offset" if start else "fewer tokens"
        check_position(who, start + length - 1, limit, instead)


def check_ids(who: str, ids: Tensor, limit: Limit = UNLIMITED) -> int | None:
    """Check ``ids``, and return the largest plus one; None if it cannot be read without waiting.

    Values on another device, or in a compiled graph, are checked there.
    """
    if not is_readable(ids):
        if sharding.is_sharded(ids):
            # Each process checks its local ids; the global maximum would need communication.
            check_ids(who, sharding.local(ids), limit)
        elif not in_transform(ids):
            inside = (ids >= 0) & (ids < limit.value)
            rule = f"{who}: position_ids must be in [0, {limit.value})."
            device_assert(inside.all(), rule)
        return None
    count = ids.numel()
    if count == 0:
        return 0
    # Decoding passes one position at each call: skip aminmax.
    for end in (ids,) if count == 1 else torch.aminmax(ids):
        value: int = end.item()  # type: ignore[assignment]
        if not 0 <= value < limit.value:
            check_position(who, value, limit)
    return value + 1
