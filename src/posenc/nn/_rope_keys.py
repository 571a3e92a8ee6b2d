"""The bodies of `RoPE`'s calls with cached keys: unrotated ones, and rotated ones that move."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from posenc._contract.position_checks import Limit
from posenc.functional.rotary import check_heads, rotate_rows, swap_heads
from posenc.kernels import Rows, Spec
from posenc.nn._rope import rotate_by_tables, tables_of
from posenc.nn._tables import SharedTables


def rotate_last_queries(
    who: str,
    limit: Limit,
    tables: SharedTables,
    qk: list[Tensor],
    rows: Rows,
    spec: Spec,
    own: tuple[Tensor, Tensor] | None,
) -> list[Tensor]:
    """Rotate keys by ``rows``, and fewer queries by the last of these; ``own`` tables if any."""
    q, k = qk
    ahead, at = k.shape[2] - q.shape[2], rows.positions
    if own is not None:
        cos, sin = (table.narrow(-2, ahead, q.shape[2]) for table in own)
        (a,) = rotate_rows(who, limit, [q], cos, sin, rows, spec)
        return [a, *rotate_rows(who, limit, [k], *own, rows, spec)]
    if at is None or rows.is_sequential():
        ends = Rows(rows.start + ahead, at)
    else:
        ends = Rows(rows.start, at[:, ahead:])
    # Keys first: the table grows for them, and for their queries too.
    keys = rotate_by_tables(who, limit, tables, [k], rows, spec)
    return [*rotate_by_tables(who, limit, tables, [q], ends, spec), *keys]


def move_keys(
    who: str, rope: Any, k: Tensor, to: Tensor, before: Tensor, to_len: Any, len_before: Any
) -> Tensor:
    """See :meth:`RoPE.rerotate`."""
    k = _rotated_keys(who, rope, k)
    phi, gain = rope._angles.moved(who, k, to, before, to_len, len_before)
    return _rotate_again(who, rope, k, phi, gain, Rows())


def shift_keys(who: str, rope: Any, k: Tensor, by: int | Tensor, seq_len: Any) -> Tensor:
    """See :meth:`RoPE.shift`."""
    k = _rotated_keys(who, rope, k)
    phi = rope._angles.shifted(who, k, by, seq_len)
    # One row serves every token of a sequence.
    first = torch.zeros((1, k.shape[2]), dtype=torch.int64, device=k.device)
    return _rotate_again(who, rope, k, phi, 1.0, Rows(0, first))


def _rotated_keys(who: str, rope: Any, k: Tensor) -> Tensor:
    check_heads(who, "k", [k], rope.head_dim, rope.seq_dim)
    return swap_heads([k], rope.seq_dim)[0]


def _rotate_again(who: str, rope: Any, k: Tensor, phi: Tensor, gain: Any, rows: Rows) -> Tensor:
    # Rotated keys are in the layout of the output.
    spec = rope._spec._replace(interleaved=rope._spec.interleaved_out)
    tables = tables_of(phi, k.device, gain)
    ys = rotate_rows(who, rope._angles.limit, [k], *tables, rows, spec)
    return swap_heads(ys, rope.seq_dim)[0]
