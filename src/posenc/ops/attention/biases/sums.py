"""The difference of a running sum over tokens."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from posenc._contract import checks
from posenc.ops.attention.biases.kind import Where, wide_of


class RunningSum(NamedTuple):
    r"""The difference of a running sum: :math:`c_i - c_j`.

    Attributes:
        values: :math:`c`, one number for each head and key, ``(H, K)`` or ``(B, H, K)``. Use
            float64: the difference of large sums loses bits.
    """

    # In a block of a longer sequence there are more, for queries past the keys.
    values: Annotated[Tensor, "1|B H K+"]

    def of(self, where: Where, scores: Tensor) -> Tensor:
        """The bias of queries and keys, ``[1 or B, H, n, k]``."""
        own, heads = where.query_index, self.values.shape[1]
        batch = own.shape[0] if self.values.shape[0] == 1 else self.values.shape[0]
        at = own[:, None].expand(batch, heads, -1)
        sums = self.values.expand(batch, -1, -1)
        return sums.gather(2, at)[..., None] - sums[:, :, where.key_index][:, :, None]

    def as_fields(self, dtype: torch.dtype) -> RunningSum:
        """As the ops have it."""
        values = self.values.to(wide_of(self.values, dtype))
        return RunningSum(values if values.dim() == 3 else values[None])

    def is_valid(self, q: Any, k: Any, causal: bool) -> bool:
        """Whether the fields fit beyond their axes."""
        return True

    def check(self, who: str, heads: int | None, keys: int) -> None:
        """Refuse sums for other heads, or another number of keys; None stands for any heads."""
        checks.float_tensor(who, "sums", self.values)
        shape = self.values.shape
        heads = shape[-2] if heads is None and len(shape) > 1 else heads
        if len(shape) not in (2, 3) or shape[-2:] != (heads, keys):
            rule = f"sums must have shape ({heads}, {keys}) or (B, {heads}, {keys})"
            hint = "Pass one for each head and key, those in the cache included."
            checks.fail(who, rule, f"shape {tuple(shape)}", hint)
