"""Tables beside tensors that are spread over processes."""

from __future__ import annotations

from torch import Tensor

from posenc._contract.sharding import replicate_like
from posenc.kernels.spec import RowOutOfRange, Rows


def shardable(x: Tensor, cos: Tensor, sin: Tensor, rows: Rows) -> tuple[Tensor, Tensor, Rows]:
    """Tables with one row for each token of ``x``, or tables and a position for each token.

    Where the tokens are then cut in shards, so are the rows or the positions, and a shard needs
    no first row that it could not know.

    Args:
        x: A sharded tensor ``[B, H, T, D]``.
        cos: ``[R, P]`` or ``[B, R, P]``.
        sin: As ``cos``.
        rows: Which table row each token takes.
    """
    length, held = x.shape[2], cos.shape[-2]
    if rows.positions is None:
        if rows.start + length > held:
            raise RowOutOfRange(rows.start + length - 1, held)
        if length != held:
            cos, sin = (table.narrow(-2, rows.start, length) for table in (cos, sin))
        return replicate_like(x, cos), replicate_like(x, sin), Rows()
    positions = replicate_like(x, rows.positions)
    if rows.start or rows.is_sequential():
        positions = Rows(rows.start, positions).as_index(length, x.device)
    return replicate_like(x, cos), replicate_like(x, sin), Rows(0, positions)
