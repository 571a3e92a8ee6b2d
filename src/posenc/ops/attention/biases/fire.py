"""FIRE: a network of one hidden layer, of the distance against the query's position."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import torch
from torch import Tensor

from posenc.numerics.spans import gather_rows
from posenc.ops.attention.biases.kind import Where

if TYPE_CHECKING:
    from posenc.ops.attention.call import Call

# The least c and threshold of a network: the product of two such is a normal number of float32.
SMALLEST = 1e-15


class FireNetwork(NamedTuple):
    r"""FIRE's bias :math:`f_h(x)`, with one hidden layer and ReLU.

    :math:`x = \ln(c\,|i - j| + 1) / \ln(c \max(L, i) + 1)`, where :math:`i` counts from the
    beginning of the query's document. All numbers are in at least float32.

    Attributes:
        c: ``(1,)``, whose absolute value counts, if it is not below 1e-15.
        threshold: :math:`L`, in the same way.
        units: The ``U`` hidden units before ReLU for :math:`x = 0`, and for 1, ``(2, U)``.
        outputs: Those of each head with no unit, and with each unit at 1, ``(1 + U, H)``.
    """

    c: Tensor
    threshold: Tensor
    units: Tensor
    outputs: Tensor

    def of(self, where: Where, scores: Tensor) -> Tensor:
        """The network for each query and key, ``[1 or B, H, n, k]``."""
        return network_rows(self, where.first, where.query_index, where.key_index)

    def fits_kernels(self) -> bool:
        """Whether a kernel holds all hidden units."""
        return self.units.shape[1] <= 64

    def with_fields(self, q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, NetworkFields]:
        """The queries, and what the op has of the bias."""
        return q, NetworkFields(torch.cat([x.flatten() for x in self]))


class NetworkFields(NamedTuple):
    """A network as the ops have it: c, the threshold, the units and the outputs, in one tensor."""

    network: Annotated[Tensor, "N"]

    def is_valid(self, q: Any, k: Any, causal: bool) -> bool:
        """Whether the numbers are those of a network with an output for each head."""
        units, rest = divmod(self.network.numel() - 2 - q.shape[1], 2 + q.shape[1])
        return self.network.dtype in (torch.float32, torch.float64) and units > 0 == rest

    def as_bias(self, q: Tensor, k: Tensor) -> FireNetwork:
        """The bias that the fields are of."""
        heads = q.shape[1]
        units = (self.network.shape[0] - 2 - heads) // (2 + heads)
        sizes = 1, 1, 2 * units, (1 + units) * heads
        c, threshold, ends, outputs = self.network.split(sizes)
        return FireNetwork(c, threshold, ends.view(2, units), outputs.view(1 + units, heads))


def network_rows(bias: FireNetwork, first: Tensor | None, own: Tensor, index: Tensor) -> Tensor:
    """The network for each query and key, ``[1 or B, H, n, k]``."""
    # The ratio has a limit where either is zero, but no value.
    c, least = (x.abs().clamp(min=SMALLEST) for x in (bias.c, bias.threshold))
    position = own
    if first is not None:
        position = own - gather_rows(first, own.clamp(0, first.shape[1] - 1))
    longest = position.to(c.dtype).maximum(least)
    x = (c * (own[..., None] - index).abs()).log1p() / (c * longest).log1p()[..., None]
    low, high = bias.units[..., None]
    hidden = (low + x.flatten(1)[:, None] * (high - low)).relu()
    base = bias.outputs[0]
    # Heads before keys, also in memory. Where heads are last, Inductor of torch 2.11 computes the
    # greatest score of several heads in one vector, and writes as many as fit into a vector.
    weights = (bias.outputs[1:] - base).T.expand(x.shape[0], -1, -1)
    result = torch.baddbmm(base[:, None], weights, hidden)
    rows: Tensor = result.unflatten(-1, x.shape[1:])
    return rows
