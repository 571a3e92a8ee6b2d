"""The keywords of `RoPE`'s methods, and the body of `RoPE.rotate_and_cache`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

from torch import Tensor

from posenc._contract import checks
from posenc.functional._cache import (
    CacheOptions,
    as_batch,
    as_given,
    cache_at_once,
    cache_rows,
    check_write,
)
from posenc.functional.rotary import check_heads, swap_heads
from posenc.kernels import Rows
from posenc.nn._rope import by_tables

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Where(TypedDict, total=False):
    """The keywords of :meth:`RoPE.forward`."""

    position_ids: Tensor | None
    seq_len: int | Tensor | None


class CacheWhere(Where, CacheOptions, total=False):
    """The keywords of :meth:`RoPE.rotate_and_cache`."""


def rotate_and_cache(
    who: str,
    rope: Any,
    qkv: tuple[Tensor, Tensor, Tensor],
    caches: tuple[Tensor, Tensor],
    slots: Tensor,
    offset: int | Tensor,
    position_ids: Tensor | None = None,
    seq_len: int | Tensor | None = None,
    **options: Unpack[CacheOptions],
) -> Tensor:
    """Rotate by the tables of ``rope``, and write the cache; see :meth:`RoPE.rotate_and_cache`."""
    tables = None if seq_len is not None else rope._tables_for(qkv[0], offset, position_ids)
    # Tokens of several sequences need positions.
    if tables is not None and (position_ids is not None or qkv[0].dim() == 4):
        where = slots, position_ids, offset, rope._layout
        rotated = cache_at_once(qkv, tables, caches, *where, **options)
        if rotated is not None:
            return rotated
    xs, seq_dim, as_tokens = as_batch(who, *qkv, rope.seq_dim)
    if as_tokens and position_ids is None:
        rule = "position_ids must be given for tokens (T, H, D), which may be of several sequences"
        checks.fail(who, rule, None, "Pass the position of each token in its sequence, (T,).")
    check_heads(who, "qk", xs[:2], rope.head_dim, seq_dim)
    q, k, v = swap_heads(xs, seq_dim)
    write = check_write(who, (q, k, v), caches, slots, as_tokens=as_tokens, **options)
    rows, own = rope._angles.rows(who, q, offset, position_ids, seq_len, False)

    def run(cos: Tensor, sin: Tensor, rows: Rows) -> Tensor:
        return cache_rows(who, rope._angles.limit, write, cos, sin, rows, rope._spec)

    if own is None:
        rotated = by_tables(who, rope._tables, [q], rows, run)
    else:
        rotated = run(own[0], own[1], rows)
    return as_given(rotated, seq_dim, as_tokens)
