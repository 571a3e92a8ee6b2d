"""Sandwich: the products of sinusoids as a bias."""

from __future__ import annotations

import torch
from torch import Tensor

from posenc._contract import checks
from posenc.attention.biases import DistanceTable
from posenc.nn._bias import RelativeBias
from posenc.nn._tables import SharedTables, TableModule, Tensors
from posenc.numerics.frequencies import Spectrum
from posenc.numerics.tables import angles, float64_device, round_once, widest


def _products(positions: Tensor, dtype: torch.dtype, dim: int) -> Tensors:
    """The products of the sinusoids at zero and at ``positions``, ``[K]``."""
    device = positions.device
    exact = angles(positions.to(float64_device(device)), Spectrum(dim)).cos().sum(-1)
    return (exact.to(widest(device)).to(device),)


class Sandwich(TableModule, RelativeBias):
    r"""Add the product of the sinusoids of query and key, which decays over the distance.

    .. math::
        \text{bias}_{h,i,j} = \frac{H}{8h} \sum_{k=0}^{d/2-1}
        \cos\!\left(\frac{i - j}{10000^{2k/d}}\right), \qquad h = 1, \dots, H

    Nothing is learned. The sum is computed in float64 and rounded once. A loader that moves only
    parameters leaves the table on the CPU: call ``model.to(device)``.

    Args:
        num_heads: Heads ``H``.
        dim: Channels ``d`` of the sinusoid, even; a hyperparameter beside the model's width.
        causal: Whether a query sees only keys up to its own.

    Examples:
        >>> bias = Sandwich(num_heads=8)
        >>> q, k, v = torch.randn(3, 1, 8, 512, 64).unbind()
        >>> bias.attention(q, k, v).shape
        torch.Size([1, 8, 512, 64])
        >>> bias.table(1)[:, 0]
        tensor([64.0000, 32.0000, 21.3333, 16.0000, 12.8000, 10.6667,  9.1429,  8.0000])

    References:
        Chi et al., *Dissecting Transformer Length Extrapolation via the Lens of Receptive Field
        Analysis*, 2023, section 5.
    """

    def __init__(self, num_heads: int, *, dim: int = 128, causal: bool = True) -> None:
        super().__init__(num_heads, causal=causal, dtype=torch.float32)
        self.dim = checks.even(type(self).__name__, "dim", dim)
        self._tables = SharedTables(_products, (self.dim,), None, torch.float64)

    def _as_bias(
        self, keys: int, dtype: torch.dtype, ids: Tensor | None, device: torch.device
    ) -> DistanceTable:
        distance, zero = self._distances(keys, device)
        held = self._tables.read(distance, torch.float64, max(keys, 1))
        (products,) = held or self._tables.at(distance[zero:])
        ratio = torch.arange(1, self.num_heads + 1, device=products.device).to(products.dtype)
        values = products[distance.abs()] * (self.num_heads / (8 * ratio))[:, None]
        return DistanceTable(round_once(values, dtype), zero)

    def _device(self) -> torch.device:
        device: torch.device = self._tables.real_device
        return device
