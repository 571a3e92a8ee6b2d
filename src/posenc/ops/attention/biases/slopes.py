"""A line for each head, by distance."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from posenc._contract import checks, qk_checks
from posenc.ops.attention.biases.kind import Where, wide_of


class Slopes(NamedTuple):
    r"""A line for each head: :math:`-m\,|i - j|` for query :math:`i` and key :math:`j`.

    Attributes:
        values: :math:`m`, ``(H,)`` or ``(B, H)``.
    """

    values: Annotated[Tensor, "1|B H"]

    def of(self, where: Where, scores: Tensor) -> Tensor:
        """The bias of queries and keys, ``[1 or B, H, n, k]``."""
        distance = where.query_index[:, None, :, None] - where.key_index
        return -self.values[..., None, None] * distance.abs()

    def as_fields(self, dtype: torch.dtype) -> Slopes:
        """As the ops have it: a slope times a distance is as precise as scores of ``dtype``."""
        values = self.values.to(wide_of(self.values, dtype))
        return Slopes(values if values.dim() == 2 else values[None])

    def is_valid(self, q: Any, k: Any, causal: bool) -> bool:
        """Whether the fields fit beyond their axes."""
        return True

    def check(self, who: str, heads: int | None, keys: int) -> None:
        """Refuse slopes for other heads; None stands for any."""
        qk_checks.check_slopes(who, self.values)
        if heads is not None and self.values.shape[-1] != heads:
            rule = f"q must have {self.values.shape[-1]} heads, one for each slope"
            checks.fail(who, rule, heads, "Pass the slopes of these heads.")
