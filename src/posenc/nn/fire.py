"""FIRE: a learned function of the distance relative to the query's position."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from posenc._contract import checks, qk_checks
from posenc._contract.tracing import is_exporting, is_readable, without_autocast
from posenc.attention.biases import DistanceTable, RowBias, Terms
from posenc.nn._bias import RelativeBias
from posenc.nn._module import Linear, load_scalars
from posenc.numerics.spans import document_ends, gather_rows
from posenc.numerics.tables import widest

# The product of two of them is a normal number of float32.
_SMALLEST = 1e-15
# Units of the hidden layer that a kernel can hold.
_MOST_UNITS = 64


class FIRE(RelativeBias):
    r"""Add a learned function of the distance, measured against the query's position.

    .. math::
        \text{bias}_{h,i,j} = f_h\!\left(\frac{\psi(i - j)}{\psi(\max(L, i))}\right), \qquad
        \psi(x) = \ln(|c|\,x + 1)

    :math:`f` is a network with one hidden layer and ReLU, and :math:`i` counts from the beginning
    of the query's document. If no query is past :math:`L`, the bias is a table of distances;
    otherwise each query has a scale of its own. On CUDA the attention's kernel computes :math:`f`
    if ``hidden`` is at most 64.

    Args:
        num_heads: Heads ``H``.
        hidden: Width of the hidden layer.
        causal: Whether a query sees only keys up to its own; otherwise the distance is absolute.
        init_c: :math:`c` at the start.
        threshold: :math:`L` at the start.
        learn_threshold: Whether :math:`L` is learned, as a factor. Then attention on a device
            takes no table, because looking at :math:`L` would wait for the device. With False it
            takes the faster table for up to ``threshold + 1`` keys.
        dtype: The dtype of the parameters, torch's default if None. The bias is made in float32.

    Attributes:
        mlp: :math:`f`, from one number to ``num_heads``.
        c: Parameter of shape ``(1,)``; a checkpoint may have it as ``()``.
        L_multiplier: Parameter of shape ``(1,)`` if learned; :math:`L` is its absolute value times
            ``threshold``.

    Examples:
        >>> bias = FIRE(num_heads=8)
        >>> q, k, v = torch.randn(3, 1, 8, 700, 64).unbind()
        >>> bias.attention(q, k, v).shape
        torch.Size([1, 8, 700, 64])

    References:
        Li et al., *Functional Interpolation for Relative Positions Improves Long Context
        Transformers*, 2024, section 3.
    """

    def __init__(
        self,
        num_heads: int,
        *,
        hidden: int = 32,
        causal: bool = True,
        init_c: float = 0.1,
        threshold: float = 512.0,
        learn_threshold: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_heads, causal=causal, dtype=dtype)
        who = type(self).__name__
        self.hidden = checks.integer(who, "hidden", hidden)
        self.threshold = checks.positive_float(who, "threshold", threshold)
        self.learn_threshold = checks.boolean(who, "learn_threshold", learn_threshold)
        self.init_c = checks.positive_float(who, "init_c", init_c)
        self.mlp = nn.Sequential(
            Linear(1, self.hidden, dtype=dtype),
            nn.ReLU(),
            Linear(self.hidden, self.num_heads, dtype=dtype),
        )
        self.c = nn.Parameter(torch.empty(1, dtype=dtype))
        if learn_threshold:
            self.L_multiplier = nn.Parameter(torch.empty(1, dtype=dtype))
        self.register_load_state_dict_pre_hook(load_scalars)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the network as :class:`torch.nn.Linear` does, and set the other numbers."""
        for layer in (self.mlp[0], self.mlp[2]):
            layer.reset_parameters()  # type: ignore[operator]
        nn.init.constant_(self.c, self.init_c)
        if self.learn_threshold:
            nn.init.ones_(self.L_multiplier)

    def _as_bias(
        self, keys: int, dtype: torch.dtype, ids: Tensor | None, device: torch.device
    ) -> DistanceTable | RowBias:
        if self._is_table(keys):
            c, least = self._scales(widest(device))
            distance, zero = self._distances(keys, device)
            ratio = (c * distance.abs()).log1p() / (c * least).log1p()
            return DistanceTable(self.mlp(ratio[:, None]).T.to(dtype), zero)
        who = type(self).__name__
        ends = document_ends(qk_checks.check_key_ids(who, "document_ids", ids, keys, device))

        def rows(own: Tensor, index: Tensor) -> Tensor:
            c, least = self._scales(dtype)
            position = own if ends is None else own - gather_rows(ends[0], own)
            scale = torch.maximum(position.to(dtype), least)
            distance = (own[..., None] - index).abs()
            ratio = (c * distance).log1p() / (c * scale).log1p()[..., None]
            made: Tensor = self.mlp(ratio[..., None])
            return made.movedim(-1, 1)

        # Elsewhere, and for wider layers, there is no kernel.
        terms = None
        if self.c.device.type == "cuda" and self.hidden <= _MOST_UNITS:
            with without_autocast(self.c):
                terms = Terms(network=self._network(dtype))
        return RowBias(rows, terms)

    def _network(self, dtype: torch.dtype) -> Tensor:
        """The numbers of the network, see `Terms`."""
        like: Any = {"dtype": dtype, "device": self.c.device}
        # By calls of the layers, which may have hooks.
        ends = self.mlp[0](torch.arange(2, **like)[:, None])
        outputs = self.mlp[2](torch.eye(1 + self.hidden, **like)[:, 1:])
        least = torch.full((1,), self.threshold, **like)
        if self.learn_threshold:
            # In the wider dtype: half precision would round the product.
            least = self.L_multiplier.to(dtype) * self.threshold
        return torch.cat((self.c.to(dtype), least, ends.flatten(), outputs.flatten()))

    def _is_table(self, keys: int) -> bool:
        if not self.learn_threshold:
            # An exported program takes other lengths, and does not see the test.
            return not is_exporting() and keys - 1 <= self.threshold
        factor = self.L_multiplier.detach()
        return is_readable(factor) and keys - 1 <= abs(factor.item()) * self.threshold

    def _scales(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The absolute values of :math:`c` and :math:`L`, ``(1,)`` each."""
        # The ratio has a limit where either is zero, but no value.
        c = self.c.to(dtype).abs().clamp(min=_SMALLEST)
        if self.learn_threshold:
            return c, (self.L_multiplier.to(dtype).abs() * self.threshold).clamp(min=_SMALLEST)
        return c, torch.full_like(c, self.threshold, requires_grad=False)
