"""Table rows and positions from ``offset`` and ``position_ids``; kernels that read such rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from posenc._contract import position_checks as checks
from posenc._contract.checks import describe, fail
from posenc._contract.position_checks import UNLIMITED, Limit
from posenc.ops import RowOutOfRange, TableRows

Result = TypeVar("Result")


def rows_of(
    who: str, x: Tensor, offset: int | Tensor, position_ids: Tensor | None, limit: Limit = UNLIMITED
) -> TableRows:
    """Table rows of the tokens of ``x``, ``(B, ..., L, D)``; values in a tensor are not checked."""
    if position_ids is not None:
        if type(offset) is not int or offset != 0:
            checks.exclusive_offset(who, offset)
        ids = checks.position_ids(who, position_ids, x, limit)
        return TableRows(0, ids if ids.dim() == 2 else ids[None])
    if type(offset) is not int and isinstance(offset, (Tensor, list, tuple)):
        return TableRows(0, checks.offsets(who, offset, x)[:, None])
    start = checks.first_position(who, offset)
    checks.check_range(who, start, x.shape[-2], limit)
    return TableRows(start)


def offset_by_position(
    who: str, unnamed: tuple[Any, ...], offset: Any, x: Any, seq_dim: int = -2
) -> Any:
    """The ``offset`` of a call whose arguments after those it must have are ``unnamed``.

    Other libraries take positions of tokens there, so a tensor that could be either is refused.
    """
    if len(unnamed) > 1 or not (type(offset) is int and offset == 0):
        rule = "only one optional argument may come without a name, and offset only once"
        hint = "Pass offset= or position_ids=, and others, by name."
        fail(who, rule, f"{len(unnamed)} and offset={describe(offset)}", hint, TypeError)
    value = unnamed[0]
    if torch.compiler.is_compiling():
        # The comparison would be a guard of the graph, or impossible for exported lengths.
        return value
    if isinstance(value, Tensor) and isinstance(x, Tensor) and value.dim() == 1 and x.dim() > 2:
        count, batch, length = value.shape[0], x.shape[0], x.shape[seq_dim]
        if count != 1 and count == batch and count == length:
            rule = "a tensor without a name must not fit both the sequences and the tokens"
            got = f"{count} numbers for {batch} sequences of {length} tokens"
            hint = (
                "Pass position_ids= for the positions of tokens, offset= for that of the first "
                "token of each sequence."
            )
            fail(who, rule, got, hint)
    return value


def positions_of(who: str, x: Tensor, rows: TableRows, limit: Limit = UNLIMITED) -> Tensor:
    """Positions of the tokens of ``x``, checked: int64 ``(B, L)``, or ``(L,)`` if shared."""
    if rows.positions is None:
        return torch.arange(rows.start, rows.start + x.shape[-2], device=x.device)
    return checked_positions(who, x, rows, limit)[0]


def checked_positions(
    who: str, x: Tensor, rows: TableRows, limit: Limit = UNLIMITED
) -> tuple[Tensor, int | None]:
    """The positions that a tensor has, and the largest plus one, if that can be read."""
    positions = rows.as_index(x.shape[-2], x.device)
    end = checks.check_ids(who, positions, limit)
    return positions[0] if positions.shape[0] == 1 else positions, end


def run_kernel(who: str, limit: Limit, kernel: Callable[..., Result], *arguments: Any) -> Result:
    """``kernel(*arguments)``, which raises an error before it writes if a row is out of range.

    That is a ValueError for a row that ``limit`` excludes, else `RowOutOfRange`.
    """
    try:
        return kernel(*arguments)
    except RowOutOfRange as error:
        checks.check_position(who, error.row, limit)
        raise
