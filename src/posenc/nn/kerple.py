"""KERPLE: a learned decay over the distance."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from posenc._contract import checks
from posenc.attention.biases import DistanceTable
from posenc.nn._bias import RelativeBias
from posenc.numerics.tables import widest


class KERPLE(RelativeBias):
    r"""Lower each score by a learned logarithm or power of the distance.

    .. math:: -r_1 \ln(1 + r_2\,|i - j|) \qquad\text{or}\qquad -r_1\,|i - j|^{r_2}

    with :math:`r_1, r_2 > 0` of each head, and :math:`r_2 \le 2` for the power. They stay there
    by construction, where the authors' code clips them: :math:`r = e^{\text{raw}}`, and
    :math:`r_2 = 2\sigma(\text{raw})` for the power. The bias is computed in float64.

    Args:
        num_heads: Heads ``H``.
        kind: ``log`` or ``power``.
        causal: Whether a query sees only keys up to its own.
        dtype: The dtype of the parameters, torch's default if None. The bias is made in float32.

    Attributes:
        raw_r1: Parameter ``(num_heads,)``; :attr:`r1` is its exponential.
        raw_r2: Parameter ``(num_heads,)``, from which :attr:`r2` follows.

    Examples:
        >>> bias = KERPLE(num_heads=8)
        >>> q, k, v = torch.randn(3, 1, 8, 512, 64).unbind()
        >>> bias.attention(q, k, v).shape
        torch.Size([1, 8, 512, 64])
        >>> bool((bias.table(512).diff() < 0).all())
        True

    References:
        Chi et al., *KERPLE: Kernelized Relative Positional Embedding for Length Extrapolation*,
        2022, section 4.
    """

    def __init__(
        self,
        num_heads: int,
        *,
        kind: str = "log",
        causal: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_heads, causal=causal, dtype=dtype)
        self.kind = checks.choice(type(self).__name__, "kind", kind, ("log", "power"))
        self.raw_r1 = nn.Parameter(torch.empty(self.num_heads, dtype=dtype))
        self.raw_r2 = nn.Parameter(torch.empty(self.num_heads, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw :math:`r_1` from 0 to 2 and :math:`r_2` from 0 to 1, or to 2 for the power."""
        if self.raw_r1.is_meta:
            return
        with torch.no_grad():
            # The authors' code has this lower limit too.
            self.raw_r1.uniform_(0.01, 2).log_()
            if self.kind == "log":
                self.raw_r2.uniform_(0.01, 1).log_()
            else:
                self.raw_r2.uniform_(0.005, 0.995).logit_()

    @property
    def r1(self) -> Tensor:
        """:math:`r_1` of each head, above zero; float64, and gradients pass."""
        return self.raw_r1.to(widest(self.raw_r1.device)).exp()

    @property
    def r2(self) -> Tensor:
        """:math:`r_2` of each head, above zero, and at most 2 for the power."""
        raw = self.raw_r2.to(widest(self.raw_r2.device))
        return raw.exp() if self.kind == "log" else 2 * raw.sigmoid()

    def _as_bias(
        self, keys: int, dtype: torch.dtype, ids: Tensor | None, device: torch.device
    ) -> DistanceTable:
        distance, zero = self._distances(keys, device)
        r1, r2 = self.r1[:, None], self.r2[:, None]
        far = distance.abs().to(r1.dtype)
        if self.kind == "log":
            decay = (r2 * far).log1p()
        else:
            # The power of zero would have no second derivative.
            decay = torch.where(far > 0, (r2 * far.clamp(min=1).log()).exp(), 0.0)
        return DistanceTable((-r1 * decay).to(dtype), zero)
