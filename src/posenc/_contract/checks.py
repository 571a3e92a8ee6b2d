"""Argument checks. Each error says who, what must hold, what came, and the way out."""

from __future__ import annotations

import numbers
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from posenc._contract import sharding
from posenc._contract.tracing import in_jit_trace, in_transform, is_readable

Value = TypeVar("Value")

FLOAT_DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
# Angles are exact up to here, and two thousand million tokens are enough.
FARTHEST = 2**31

INT_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


_LARGEST = sys.float_info.max


def message(who: str, rule: str, got: object, way_out: str) -> str:
    """Text of every error: one line for the rule, one for what to do about it.

    Rules and values may quote a file that a stranger wrote, so both are escaped.
    """
    return f"{who}: {printable(rule)}, got {printable(got)}.\n  {way_out}"


def printable(value: object) -> str:
    r"""``value`` as text whose control characters are escaped, so that a terminal shows them.

    Examples:
        >>> printable("\x1b[2Jgone")
        '\\x1b[2Jgone'
    """
    text = str(value)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def describe(value: object) -> str:
    """A value short enough for an error message."""
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def integer(who: str, name: str, value: Any, *, least: int = 1) -> int:
    """``value`` as an int of at least ``least``; bools and floats are not counts."""
    if type(value) is int and least <= value <= FARTHEST:
        return value
    if not isinstance(value, (int, torch.SymInt)) or isinstance(value, bool):
        # numpy's integers arrive here; a float or a bool has no place in a count.
        try:
            # What torch.jit.trace makes of a shape is a tensor.
            if isinstance(value, bool) or (isinstance(value, Tensor) and not in_jit_trace()):
                raise TypeError
            value = operator.index(value)
        except TypeError:
            got, way_out = describe(value), "Pass a Python int."
            raise TypeError(message(who, f"{name} must be an int", got, way_out)) from None
    if not least <= value <= FARTHEST:
        rule = (
            f"{name} must be at least {least}" if value < least else f"{name} must be at most 2**31"
        )
        raise ValueError(message(who, rule, value, f"Pass {least} or more, up to 2**31."))
    return value  # type: ignore[no-any-return]


def even(who: str, name: str, value: Any) -> int:
    """``value`` as a positive even int: channels are rotated in pairs."""
    value = integer(who, name, value)
    if value % 2:
        rule = f"{name} must be even, because channels are rotated in pairs"
        raise ValueError(message(who, rule, value, f"Pad to {value + 1} or drop one channel."))
    return value  # type: ignore[no-any-return]


def positive_float(who: str, name: str, value: Any) -> float:
    """``value`` as a finite float above zero."""
    # Plain numbers come first, because torch.compile knows them; numpy's are numbers too.
    plain = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not plain and (isinstance(value, (bool, Tensor)) or not isinstance(value, numbers.Real)):
        rule = f"{name} must be a number"
        raise TypeError(message(who, rule, describe(value), f"Pass float({name})."))
    if not 0 < value < _LARGEST:
        rule = f"{name} must be finite and above zero"
        raise ValueError(message(who, rule, describe(value), f"Pass a positive {name}."))
    return float(value)


def base(who: str, value: Any, name: str = "base") -> float:
    """``value`` as the base of rates: above one, so that each pair turns slower than the last."""
    number = positive_float(who, name, value)
    if number <= 1:
        rule = f"{name} must be above 1, because each pair must turn slower than the one before"
        raise ValueError(message(who, rule, describe(value), "Pass 10000.0, the usual one."))
    return number


def boolean(who: str, name: str, value: Any) -> bool:
    """``value`` as a real bool, so that a misplaced argument does not pass for one."""
    if not isinstance(value, bool):
        rule = f"{name} must be True or False"
        raise TypeError(message(who, rule, describe(value), f"Pass {name} by keyword."))
    return value


def optional(check: Callable[..., Value], who: str, name: str, value: Any) -> Value | None:
    """None, or ``value`` as ``check`` takes it."""
    return None if value is None else check(who, name, value)


def float_dtype(who: str, name: str, dtype: Any) -> torch.dtype:
    """``dtype`` if encodings can be computed in it."""
    if dtype not in FLOAT_DTYPES:
        rule = f"{name} must be one of float16, bfloat16, float32, float64"
        raise TypeError(message(who, rule, dtype, "Pass for example torch.float32."))
    return dtype  # type: ignore[no-any-return]


def float_tensor(who: str, name: str, x: Any) -> Tensor:
    """``x`` if it is a tensor of a real floating dtype."""
    if not isinstance(x, Tensor):
        rule = f"{name} must be a torch.Tensor"
        way_out = "Pass a tensor." if x is None else f"Pass torch.as_tensor({name})."
        raise TypeError(message(who, rule, type(x).__name__, way_out))
    if x.dtype not in FLOAT_DTYPES:
        rule = f"{name} must be a float16, bfloat16, float32 or float64 tensor"
        raise TypeError(message(who, rule, x.dtype, f"Convert {name} to one of these first."))
    if x.is_nested:
        rule = f"{name} must be a dense tensor"
        way_out = (
            f"Pass torch.nested.to_padded_tensor({name}, 0.0), or one packed sequence of "
            f"{name}.values() with positions.from_cu_seqlens({name}.offsets())."
        )
        raise TypeError(message(who, rule, "a nested tensor", way_out))
    return x


def rank(who: str, name: str, x: Tensor, ranks: Sequence[int], axes: str) -> None:
    """Refuse a tensor whose number of dimensions is not among ``ranks``."""
    if x.dim() not in ranks:
        rule = f"{name} must have shape {axes}"
        got = f"shape {tuple(x.shape)}"
        raise ValueError(message(who, rule, got, "Add or merge dimensions with reshape."))


def check_embeddings(who: str, name: str, x: Any) -> tuple[int, int]:
    """Length and width of ``x``, a floating tensor of ``(L, D)`` or ``(N, L, D)``."""
    float_tensor(who, name, x)
    rank(who, name, x, (2, 3), "(L, D) or (N, L, D)")
    return x.shape[-2], x.shape[-1]


def equal(who: str, name: str, got: int, wanted: int, way_out: str) -> None:
    """Refuse a size that differs from the one that was fixed."""
    if got != wanted:
        raise ValueError(message(who, f"{name} must be {wanted}", got, way_out))


def check_last_position(who: str, last: int, limit_name: str, limit: int, instead: str) -> None:
    """Refuse a last position at or past ``limit``; ``instead`` is the way out beside raising it.

    A limit without a name is that of the arithmetic, and cannot be raised.
    """
    if last >= limit:
        rule = f"positions must stay below {limit_name}={limit}"
        way_out = f"Raise {limit_name}, or pass {instead}."
        if not limit_name:
            rule, way_out = "positions must be at most 2**31", f"Pass {instead}."
        raise ValueError(message(who, rule, last, way_out))


def check_range(
    who: str, start: int, length: int, limit_name: str = "", limit: int | None = None
) -> None:
    """Refuse ``length`` positions from ``start`` on that go past ``limit``, or past 2**31."""
    if limit is None:
        if torch.compiler.is_compiling():
            # A graph for all lengths compares none of them.
            return
        limit_name, limit = "", FARTHEST + 1
    last = start + length - 1
    if last >= limit:
        check_last_position(
            who, last, limit_name, limit, "a smaller offset" if start else "fewer tokens"
        )


def exclusive_offset(who: str, offset: int | Tensor) -> None:
    """Refuse an offset beside position_ids: they would say the same thing twice."""
    if isinstance(offset, Tensor) or integer(who, "offset", offset, least=0) != 0:
        rule = "offset and position_ids exclude each other"
        raise ValueError(message(who, rule, f"offset={offset}", "Add offset to position_ids."))


def position_ids(
    who: str,
    ids: Any,
    shape: Sequence[int],
    device: torch.device,
    limit_name: str = "",
    limit: int | None = None,
) -> Tensor:
    """Positions as int64 ``(L,)`` or ``(B, L)`` on ``device``.

    ``shape`` is that of the tensor to encode, ``(B, ..., L, D)``. Values are looked at only on
    their way from the CPU to a device: once there, they cannot be without waiting.
    """
    if not isinstance(ids, Tensor) or ids.dtype not in INT_DTYPES:
        rule = "position_ids must be an integer tensor"
        raise TypeError(message(who, rule, describe(ids), "Pass torch.tensor(ids) of int64."))
    length = shape[-2]
    fits = ids.dim() == 1
    if ids.dim() == 2 and len(shape) >= 3:
        fits = ids.shape[0] == shape[0] or ids.shape[0] == 1
    if not fits or ids.shape[-1] != length:
        allowed = f"({length},)" + (f" or ({shape[0]}, {length})" if len(shape) >= 3 else "")
        rule = f"position_ids must have shape {allowed}"
        got = f"shape {tuple(ids.shape)}"
        raise ValueError(message(who, rule, got, "Give one position to each token."))
    if ids.is_meta and device.type != "meta":
        raise ValueError(
            message(who, "position_ids must hold numbers", "a meta tensor", "Move it.")
        )
    if ids.device != device and is_readable(ids):
        check_ids(who, ids, limit_name, limit)
    return ids.to(device=device, dtype=torch.int64)


def offsets(
    who: str, offset: Tensor, shape: Sequence[int], device: torch.device, name: str = "offset"
) -> Tensor:
    """A first position for each sequence as int64 ``(B,)`` on ``device``; values unread."""
    if offset.dtype not in INT_DTYPES:
        rule = f"{name} must be an int, or an integer tensor of shape (B,)"
        raise TypeError(message(who, rule, describe(offset), f"Call {name}.long() first."))
    if offset.dim() != 1 or offset.shape[0] != shape[0]:
        rule = f"{name} must be an int, or have shape ({shape[0]},)"
        got = f"shape {tuple(offset.shape)}"
        raise ValueError(message(who, rule, got, "Give one to each sequence."))
    if offset.is_meta and device.type != "meta":
        raise ValueError(message(who, f"{name} must hold numbers", "a meta tensor", "Move it."))
    return offset.to(device=device, dtype=torch.int64)


def positions(who: str, name: str, at: Any) -> Tensor:
    """``at`` if it is a tensor of whole or floating positions, with at least one dimension."""
    if (
        not isinstance(at, Tensor)
        or at.dim() == 0
        or (at.dtype not in INT_DTYPES and at.dtype not in FLOAT_DTYPES)
    ):
        rule = f"{name} must be a tensor of positions, (L,) or (B, L)"
        raise TypeError(message(who, rule, describe(at), "Pass torch.arange(L), say."))
    return at


def coordinates(
    who: str,
    name: str,
    at: Any,
    shape: Sequence[int],
    device: torch.device,
    axes: int | None,
    limit_name: str = "",
    limit: int | None = None,
) -> Tensor:
    """Positions as int64 or float64: ``(L,)`` or ``(B, L)``, after ``axes`` coordinates if any.

    ``shape`` is that of the tensor to encode, ``(B, ..., L, D)``. One position for all of the
    coordinates of a token is spread over them. Floating ones may be below zero: coordinates are
    often counted from the middle.
    """
    ids = positions(who, name, at)
    batch, length = shape[0], shape[-2]
    if axes is not None and ids.dim() == 1:
        ids = ids.expand(axes, *ids.shape)
    lead = () if axes is None else (axes,)
    if ids.shape not in ((*lead, length), (*lead, batch, length), (*lead, 1, length)):
        start = "" if axes is None else f"{axes}, "
        rule = f"{name} must have shape ({start}{length}) or ({start}{batch}, {length})"
        got = f"shape {tuple(ids.shape)}"
        each = f"Each token has {axes} coordinates; those that are not to turn have zeros."
        if ids.dim() == 2 and ids.shape[0] == batch != axes:
            each = f"Where all {axes} are the same, pass {name}.expand({axes}, -1, -1)."
        way_out = "Give one position to each token." if axes is None else each
        raise ValueError(message(who, rule, got, way_out))
    if ids.is_meta and device.type != "meta":
        raise ValueError(message(who, f"{name} must hold numbers", "a meta tensor", "Move it."))
    if ids.dtype in INT_DTYPES:
        if is_readable(ids):
            check_ids(who, ids, limit_name, limit)
        return ids.to(device=device, dtype=torch.int64)
    if is_readable(ids) and ids.numel():
        low, high = (float(end) for end in torch.aminmax(ids.detach()))
        most = FARTHEST + 1 if limit is None else limit
        if not (low >= -FARTHEST and high < most):
            below = "at most 2**31" if limit is None else f"below {limit_name}={limit}"
            rule = f"{name} must be finite and {below}"
            got = f"{low:g} to {high:g}"
            raise ValueError(message(who, rule, got, "Pass smaller coordinates."))
    return ids.to(device=device, dtype=torch.float32 if device.type == "mps" else torch.float64)


def check_instance(who: str, name: str, value: Any, kind: type, way_out: str) -> Any:
    """``value`` if it is None or of this kind."""
    if value is not None and not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        rule = f"{name} must be {article} {kind.__name__} or None"
        raise TypeError(message(who, rule, describe(value), way_out))
    return value


def check_ids(who: str, ids: Tensor, limit_name: str = "", limit: int | None = None) -> int | None:
    """One past the largest of ``ids``, or None where that cannot be read without waiting.

    Values on the CPU are read and refused here; values on a device, or inside a compiled graph,
    are refused there, so that nobody waits and no graph breaks.
    """
    if limit is None:
        limit_name, limit = "", FARTHEST + 1
    if sharding.is_sharded(ids):
        # Each process looks at its own; the largest of all would have to be asked for.
        check_ids(who, sharding.local(ids), limit_name, limit)
        return None
    if not is_readable(ids):
        if not in_transform(ids):
            inside = (ids >= 0) & (ids < limit)
            rule = f"{who}: position_ids must be in [0, {limit})."
            torch._assert_async(inside.all(), rule)
        return None
    if ids.numel() == 0:
        return 0
    # One token is decoded at a time, and reading its position should cost no more than that.
    ends = (ids,) if ids.numel() == 1 else torch.aminmax(ids)
    for end in ends:
        check_position(who, int(end), limit_name, limit)
    return int(ends[-1]) + 1


def check_position(who: str, value: int, limit_name: str, limit: int) -> None:
    """Refuse one of the positions: below zero, or at or past ``limit``."""
    if value < 0:
        rule = "positions must not be negative"
        raise ValueError(message(who, rule, value, "Count positions from zero."))
    check_last_position(who, value, limit_name, limit, "smaller ones")
