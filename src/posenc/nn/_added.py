"""The base of the modules that add a table to their input."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from posenc import kernels
from posenc._contract import checks
from posenc.nn._module import load_scalars
from posenc.nn._tables import TableModule


class AddedTable(TableModule):
    r"""A module that returns :math:`\text{dropout}(g x + \alpha P)` for rows :math:`P` of a table.

    :math:`g` is one, or the root of the width; :math:`\alpha` is a number, or learned.
    """

    scale_input: bool
    scale: float
    learn_scale: bool
    dropout: float
    alpha: nn.Parameter | None

    def _set_sum(
        self, who: str, scale_input: Any, scale: Any, learn_scale: Any, dropout: Any
    ) -> None:
        self.scale_input = checks.boolean(who, "scale_input", scale_input)
        self.scale = checks.positive_float(who, "scale", scale)
        self.learn_scale = checks.boolean(who, "learn_scale", learn_scale)
        self.dropout = checks.probability(who, "dropout", dropout)
        self.register_parameter("alpha", nn.Parameter(torch.empty(1)) if learn_scale else None)
        self.register_load_state_dict_pre_hook(load_scalars)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the learned factor, if there is one, to ``scale``."""
        if self.alpha is not None:
            nn.init.constant_(self.alpha, self.scale)

    def _sum(self, x: Tensor, rows: Tensor) -> Tensor:
        # math.sqrt: torch.jit.trace makes a tensor of a size, whose power would be a float32.
        gain = math.sqrt(x.shape[-1]) if self.scale_input else 1.0
        factor = self.scale if self.alpha is None else self.alpha
        total = kernels.add(x, rows, gain, factor)
        return nn.functional.dropout(total, self.dropout, self.training) if self.dropout else total
