"""Positions of tokens, as `position_ids` for every encoding."""

from posenc.numerics.positions import (
    context_parallel,
    from_cu_seqlens,
    from_left_padding,
    from_offset,
    grid,
    mrope,
)

__all__ = [
    "context_parallel",
    "from_cu_seqlens",
    "from_left_padding",
    "from_offset",
    "grid",
    "mrope",
]
