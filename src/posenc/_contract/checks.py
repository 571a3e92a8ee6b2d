"""Argument checks. Each error names the caller, the rule, the value, and what to do."""

from __future__ import annotations

import numbers
import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from posenc._contract.tracing import in_jit_trace

Value = TypeVar("Value")

FLOAT_DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
INT_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
# The largest position: angles are exact up to here.
MAX_POSITION = 2**31


def message(who: str, rule: str, got: object, hint: str) -> str:
    """The text of an error, at most a screen. Rules and values may quote any file: escape them."""
    rule, got = shortened(printable(rule)), shortened(printable(got))
    return f"{who}: {rule}, got {got}.\n  {shortened(hint)}"


def fail(
    who: str, rule: str, got: object, hint: str, error: type[Exception] = ValueError
) -> NoReturn:
    """Raise ``error`` with the text of :func:`message`."""
    raise error(message(who, rule, got, hint)) from None


def printable(value: object) -> str:
    r"""``value`` as text, with control characters escaped.

    Examples:
        >>> printable("\x1b[2Jgone")
        '\\x1b[2Jgone'
    """
    text = str(value)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def shortened(text: str, most: int = 500) -> str:
    """``text`` without its middle if it is longer than ``most``; three such parts fit a screen.

    Examples:
        >>> shortened("1" * 40 + "2" * 60, most=20)
        '1111111111 ... (80 characters) ... 2222222222'
    """
    left_out = len(text) - most
    if left_out <= 0:
        return text
    return f"{text[: most // 2]} ... ({left_out} characters) ... {text[-(most // 2) :]}"


def describe(value: object) -> str:
    """A value short enough for an error message."""
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def integer(who: str, name: str, value: Any, *, least: int = 1, hint: str = "") -> int:
    """``value`` as an int of at least ``least``; bools and floats are refused.

    ``hint`` is the way out for a smaller one.
    """
    if type(value) is int and least <= value <= MAX_POSITION:
        return value
    if not isinstance(value, (int, torch.SymInt)) or isinstance(value, bool):
        try:
            # Integers of numpy are accepted, and the tensors that torch.jit.trace makes of sizes.
            if isinstance(value, bool) or (isinstance(value, Tensor) and not in_jit_trace()):
                raise TypeError
            value = operator.index(value)
        except TypeError:
            rule = f"{name} must be an int"
            fail(who, rule, describe(value), "Pass a Python int.", TypeError)
    if not least <= value <= MAX_POSITION:
        bound = f"at least {least}" if value < least else "at most 2**31"
        usual = f"Pass {least} or more, up to 2**31."
        fail(who, f"{name} must be {bound}", value, (value < least and hint) or usual)
    return value  # type: ignore[no-any-return]


def even(who: str, name: str, value: Any) -> int:
    """``value`` as a positive even int: channels come in pairs."""
    value = integer(who, name, value)
    if value % 2:
        rule = f"{name} must be even, because channels come in pairs"
        fail(who, rule, value, f"Pad to {value + 1} or drop one channel.")
    return value  # type: ignore[no-any-return]


def number(who: str, name: str, value: Any) -> float:
    """``value`` as an int or a float; bools and tensors are refused."""
    # Test int and float first: torch.compile cannot trace numbers.Real, the type of numpy scalars.
    plain = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not plain and (isinstance(value, (bool, Tensor)) or not isinstance(value, numbers.Real)):
        fail(who, f"{name} must be a number", describe(value), f"Pass float({name}).", TypeError)
    return value if plain else float(value)


def positive_float(who: str, name: str, value: Any) -> float:
    """``value`` as a finite float above zero."""
    result = number(who, name, value)
    if not 0 < result < sys.float_info.max:
        rule = f"{name} must be finite and above zero"
        fail(who, rule, describe(value), f"Pass a positive {name}.")
    return float(result)


def probability(who: str, name: str, value: Any) -> float:
    """``value`` as a float from 0 to 1."""
    result = number(who, name, value)
    if not 0 <= result <= 1:
        fail(who, f"{name} must be from 0 to 1", value, "Pass for example 0.1.")
    return float(result)


def base(who: str, value: Any, name: str = "base") -> float:
    """``value`` as a base of frequencies: a finite float above one."""
    result = positive_float(who, name, value)
    if result <= 1:
        rule = f"{name} must be above 1, because each pair is slower than the one before"
        fail(who, rule, describe(value), "Pass for example 10000.0.")
    return result


def frequencies(who: str, name: str, values: Any, count: int, hint: str) -> tuple[float, ...]:
    """``count`` finite numbers, from a sequence or a tensor that holds values, as floats."""
    if isinstance(values, Tensor):
        if values.requires_grad or values.is_meta:
            kind = "that requires grad" if values.requires_grad else "on the meta device"
            learn = "To learn frequencies, use MixedRoPE; otherwise pass inv_freq.detach()."
            fail(who, f"{name} must be constants", f"a tensor {kind}", learn, TypeError)
        rank(who, name, values, (1,), f"({count},)")
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, (list, tuple)):
        fail(who, f"{name} must be a sequence of numbers", describe(values), hint, TypeError)
    if len(values) != count:
        fail(who, f"{name} must have {count} numbers", len(values), hint)
    for value in values:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            fail(who, f"{name} must be numbers", describe(value), hint, TypeError)
        if not -MAX_POSITION <= float(value) <= MAX_POSITION:
            fail(who, f"{name} must be finite and within 2**31", value, hint)
    return tuple(map(float, values))


def choice(who: str, name: str, value: Any, allowed: Sequence[str]) -> str:
    """``value`` if it is one of the ``allowed`` words."""
    if value not in allowed:
        rule = f"{name} must be {' or '.join(map(repr, allowed))}"
        fail(who, rule, describe(value), "Pass one of them.")
    return value  # type: ignore[no-any-return]


def is_one_of(size: Any, allowed: Iterable[Any]) -> bool:
    """Whether a size, or a shape, equals one of those ``allowed``.

    Compared, not searched for: in a graph of torch.compile, ``in`` does not find a symbolic size,
    although it equals one of them.
    """
    return any(size == other for other in allowed)


def boolean(who: str, name: str, value: Any) -> bool:
    """``value`` if it is a bool; anything else is probably a misplaced argument."""
    if not isinstance(value, bool):
        rule = f"{name} must be True or False"
        fail(who, rule, describe(value), f"Pass {name}=True or {name}=False.", TypeError)
    return value


def optional(
    check: Callable[..., Value], who: str, name: str, value: Any, **limits: Any
) -> Value | None:
    """None, or the checked ``value``."""
    return None if value is None else check(who, name, value, **limits)


def check_instance(who: str, name: str, value: Any, kind: type, hint: str) -> Any:
    """``value`` if it is None or an instance of ``kind``."""
    if value is not None and not isinstance(value, kind):
        rule = f"{name} must be of type {kind.__name__}, or None"
        fail(who, rule, describe(value), hint, TypeError)
    return value


def float_dtype(who: str, name: str, dtype: Any) -> torch.dtype:
    """``dtype`` if it is one of `FLOAT_DTYPES`."""
    if not isinstance(dtype, torch.dtype) or dtype not in FLOAT_DTYPES:
        rule = f"{name} must be one of float16, bfloat16, float32, float64"
        fail(who, rule, dtype, "Pass for example torch.float32.", TypeError)
    return dtype


def float_tensor(who: str, name: str, x: Any) -> Tensor:
    """``x`` if it is a dense tensor of one of `FLOAT_DTYPES`."""
    if not isinstance(x, Tensor):
        hint = "Pass a tensor." if x is None else f"Pass torch.as_tensor({name})."
        fail(who, f"{name} must be a torch.Tensor", type(x).__name__, hint, TypeError)
    if x.dtype not in FLOAT_DTYPES:
        rule = f"{name} must be a float16, bfloat16, float32 or float64 tensor"
        hint = f"Convert {name} to one of these first; of token ids, pass the embeddings."
        fail(who, rule, x.dtype, hint, TypeError)
    if x.is_nested:
        hint = (
            f"Pass torch.nested.to_padded_tensor({name}, 0.0), or one packed sequence of "
            f"{name}.values() with positions.from_cu_seqlens({name}.offsets())."
        )
        fail(who, f"{name} must be a dense tensor", "a nested tensor", hint, TypeError)
    return x


def rank(who: str, name: str, x: Tensor, ranks: Sequence[int], axes: str) -> None:
    """Refuse a tensor whose number of dimensions is not among ``ranks``."""
    if x.dim() not in ranks:
        rule, got = f"{name} must have shape {axes}", f"shape {tuple(x.shape)}"
        fail(who, rule, got, "Add or merge dimensions with reshape.")


def check_embeddings(who: str, name: str, x: Any) -> tuple[int, int]:
    """Length and width of ``x``, a floating tensor of ``(L, D)`` or ``(N, L, D)``."""
    float_tensor(who, name, x)
    rank(who, name, x, (2, 3), "(L, D) or (N, L, D)")
    return x.shape[-2], x.shape[-1]


def equal(who: str, name: str, got: int, wanted: int, hint: str) -> None:
    """Refuse a size that differs from the constructor's."""
    if got != wanted:
        fail(who, f"{name} must be {wanted}", got, hint)
