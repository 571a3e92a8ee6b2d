"""CoPE: levels at positions that gates of the scores count."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import torch
from torch import Tensor

from posenc.ops.attention.biases.kind import Where

if TYPE_CHECKING:
    from posenc.ops.attention.call import Call


class CopeLevels(NamedTuple):
    """CoPE's bias: levels at the positions that gates of the scores count.

    Attributes:
        q: Queries of the attention.
        k: Keys of the attention.
        values: The bias of queries at each whole position, ``(B, H, Q, P)``.
    """

    q: Tensor
    k: Tensor
    values: Tensor

    def of(self, where: Where, scores: Tensor) -> Tensor:
        """The bias of queries and keys, whose scores are minus infinity for hidden keys."""
        return level_rows(self.values[:, :, where.queries].to(scores.dtype), scores)

    def fits_kernels(self) -> bool:
        """Whether a kernel holds all positions."""
        return self.values.shape[3] <= 256

    def with_fields(self, q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, LevelFields]:
        """The queries, and what the op has of the bias."""
        return q, LevelFields(self.values)


class LevelFields(NamedTuple):
    """Levels as the ops have them."""

    levels: Annotated[Tensor, "B H Q P"]

    def is_valid(self, q: Any, k: Any, causal: bool) -> bool:
        """Whether the fields fit beyond their axes: gates count from the query backwards."""
        return causal

    def as_bias(self, q: Tensor, k: Tensor) -> CopeLevels:
        """The bias that the fields are of."""
        return CopeLevels(q, k, self.levels)


def level_rows(levels: Tensor, scores: Tensor) -> Tensor:
    """CoPE's bias: levels at the positions that gates of the scores count, ``[B, H, n, k]``."""
    # Count from the query backwards.
    at = scores.sigmoid().flip(-1).cumsum(-1).flip(-1).clamp(max=levels.shape[3] - 1)
    # A score that is NaN has a position that is NaN, and so a bias; its ends are any that exist.
    known = at.detach().nan_to_num()
    below = known.floor()
    ends = below.long(), known.ceil().long()
    # The gradient of gather has the same bits in every run on the CPU; see _gather.
    left, right = (
        levels.gather(-1, end) if levels.is_cpu else _gather(levels, end) for end in ends
    )
    return torch.lerp(left, right, at - below)


def _gather(x: Tensor, index: Tensor) -> Tensor:
    """``x.gather(-1, index)`` with a gradient that is sorted, and so repeats, on CUDA."""
    rows = torch.arange(x[..., 0].numel(), device=x.device).view(*x.shape[:-1], 1)
    return x.flatten(0, -2)[rows, index]
