"""Attention with linear biases (ALiBi)."""

from __future__ import annotations

import torch
from torch import Tensor

from posenc import kernels
from posenc._contract import checks
from posenc.functional.alibi import alibi_bias, alibi_slopes
from posenc.nn._tables import DerivedBuffers
from posenc.numerics.tables import widest


class ALiBi(DerivedBuffers):
    """Lower each attention score in proportion to the distance it spans.

    Args:
        num_heads: Heads ``H``.
        causal: Whether a query sees only keys up to its own position.
        bias_max: The last head's slope is ``2**-bias_max``.
        plain: Slopes ``2**(-bias_max * h / H)`` for every ``H``, also where the paper's code
            takes others (``H`` not a power of two).

    Attributes:
        slopes: float32 of shape ``(H,)``, in the paper's head order.

    Examples:
        >>> alibi = ALiBi(num_heads=8)
        >>> alibi.get_bias(16).shape
        torch.Size([8, 16, 16])
        >>> alibi.get_bias(3)[0]
        tensor([[ 0.0000,    -inf,    -inf],
                [-0.5000,  0.0000,    -inf],
                [-1.0000, -0.5000,  0.0000]])

    References:
        Press et al., *Train Short, Test Long*, 2022.
    """

    slopes: Tensor
    _exact_slopes: Tensor

    def __init__(
        self,
        num_heads: int,
        *,
        causal: bool = True,
        bias_max: float = 8.0,
        plain: bool = False,
    ) -> None:
        super().__init__()
        who = type(self).__name__
        self.num_heads = checks.integer(who, "num_heads", num_heads)
        self.causal = checks.boolean(who, "causal", causal)
        self.bias_max = checks.positive_float(who, "bias_max", bias_max)
        self.plain = checks.boolean(who, "plain", plain)
        # The bias is made of exact slopes; `slopes` is for the kernels of others, in float32.
        self._derive("slopes", "_exact_slopes")
        self._rebuild(torch.get_default_device())

    def _rebuild(self, device: torch.device) -> None:
        with torch.inference_mode(False):
            self.slopes = self._slopes(device, torch.float32)
            self._exact_slopes = self._slopes(device, widest(device))

    def _slopes(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        return alibi_slopes(
            self.num_heads, bias_max=self.bias_max, plain=self.plain, device=device, dtype=dtype
        )

    def get_bias(self, seq_len: int) -> Tensor:
        """Bias for ``seq_len`` queries and keys, float32 of shape ``(H, L, L)``."""
        length = checks.integer(type(self).__name__, "seq_len", seq_len, least=0)
        return alibi_bias(self._exact_slopes, length, causal=self.causal)

    def forward(self, scores: Tensor) -> Tensor:
        """Add the bias to attention scores.

        Args:
            scores: Floating tensor of shape ``(..., H, Q, K)``; the last query is at the last key.

        Returns:
            A new tensor with the shape and dtype of ``scores``.
        """
        who = type(self).__name__
        checks.float_tensor(who, "scores", scores)
        if scores.dim() < 3 or scores.shape[-3] != self.num_heads:
            rule = f"scores must have shape (..., {self.num_heads}, Q, K)"
            got = f"shape {tuple(scores.shape)}"
            raise ValueError(checks.message(who, rule, got, "Put the heads third from last."))
        queries, keys = scores.shape[-2:]
        if keys < queries:
            rule = f"scores must have at least as many keys as queries, {queries}"
            raise ValueError(checks.message(who, rule, keys, "Queries are the last of the keys."))
        wide = torch.promote_types(scores.dtype, torch.float32)
        slopes = self._exact_slopes
        if slopes.device != scores.device:
            slopes = self._slopes(scores.device, widest(scores.device))
        bias = alibi_bias(slopes, queries, keys, causal=self.causal, dtype=wide)
        return kernels.add(scores, bias)

    def extra_repr(self) -> str:
        """Shown by ``print(module)``."""
        return (
            f"num_heads={self.num_heads}, causal={self.causal}, bias_max={self.bias_max}, "
            f"plain={self.plain}"
        )
