"""A number for each head and distance."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding

from posenc._contract import checks
from posenc.ops.attention.biases.kind import Where, skew, wide_of


class DistanceTable(NamedTuple):
    r"""A number for each head and distance: :math:`t_{i - j + z}`, clipped at both ends.

    Attributes:
        values: :math:`t`, ``(H, R)``. A distance past either end has the number at that end.
        zero: :math:`z`, the column of distance zero; earlier columns are for later keys.
    """

    values: Annotated[Tensor, "H R"]
    zero: Annotated[int, "SymInt"] = 0

    def of(self, where: Where, scores: Tensor) -> Tensor:
        """The bias of queries and keys, ``[1 or B, H, n, k]``.

        One line of numbers for all distances, and then a row of it for each query.
        """
        own, index, table = where.query_index, where.key_index, self.values
        count, keys = own.shape[1], index.shape[0]
        if not count:
            return table.new_zeros((1, table.shape[0], 0, keys))
        line = own[:, -1:] - index[:1] - torch.arange(count + keys, device=own.device)
        # The gradient of indexing may depend on the order of threads.
        columns = (line + self.zero).clamp(0, table.shape[1] - 1)
        values = embedding(columns, table.T).mT
        return skew(values[:, :, None].expand(-1, -1, count, -1), keys)

    def as_fields(self, dtype: torch.dtype) -> DistanceTable:
        """As the ops have it."""
        return DistanceTable(self.values.to(wide_of(self.values, dtype)), self.zero)

    def is_valid(self, q: Any, k: Any, causal: bool) -> bool:
        """Whether the fields fit beyond their axes."""
        return 0 <= self.zero < self.values.shape[1]

    def check(self, who: str, heads: int | None, keys: int) -> None:
        """Refuse a table for other heads; None stands for any."""
        checks.float_tensor(who, "table", self.values)
        shape = self.values.shape
        checks.integer(who, "zero", self.zero, least=0)
        heads = shape[0] if heads is None and shape else heads
        if len(shape) != 2 or shape[0] != heads or self.zero >= shape[1]:
            rule = f"table must have shape ({heads}, R), with R above zero={self.zero}"
            hint = "Pass a row for each head, with a column for distance zero."
            checks.fail(who, rule, f"shape {tuple(shape)}", hint)
