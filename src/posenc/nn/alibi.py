"""Attention with linear biases (ALiBi)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from posenc import attention, configs
from posenc._contract import checks, qk_checks
from posenc._contract.sharding import replicate_like
from posenc.functional.distance_biases import alibi_bias, alibi_model_slopes
from posenc.nn._bias import RelativeBias, check_num_heads
from posenc.nn._tables import SharedTables, TableModule, Tensors
from posenc.numerics.slopes import slope_numbers
from posenc.numerics.tables import widest


def _slope_table(positions: Tensor, dtype: torch.dtype, numbers: Any) -> Tensors:
    """Slopes ``(H,)`` or ``(B, H)``; they have no positions. Not every device has float64."""
    exact, device = torch.tensor(numbers, dtype=torch.float64, device="cpu"), positions.device
    return (exact.to(widest(device) if dtype == torch.float64 else dtype).to(device),)


class ALiBi(TableModule, RelativeBias):
    """Lower each attention score in proportion to the distance between query and key.

    The module is attention with this bias; its methods give the bias in the forms that other
    attention functions take. ``docs/alibi.md`` is the manual.

    Args:
        num_heads: Query heads ``H``.
        causal: Whether a query sees only keys up to its own position.
        bias_max: The last head's slope is ``2**-bias_max``.
        geometric: Use slopes ``2**(-bias_max * h / H)`` for every ``H``; the paper's code does so
            only if ``H`` is a power of two.
        slopes: Slopes of your own instead, ``(H,)`` or ``(B, H)``, not below zero. A head with
            slope zero has no bias, and is never pruned.
        learned: Learn the slopes, which start as above. What is learned is their logarithm, so
            that they stay above zero, and a step of the optimizer changes small and large ones by
            the same factor; zero cannot be learned.

    Attributes:
        slopes: float32 of shape ``(H,)`` or ``(B, H)``, in the paper's head order, as flash-attn's
            ``alibi_slopes``; gradients pass if they are learned.
        log_slopes: If ``learned``, a Parameter ``(H,)``.

    Examples:
        >>> alibi = ALiBi(num_heads=8)
        >>> q, k, v = torch.randn(3, 1, 8, 512, 64).unbind()
        >>> alibi(q, k, v).shape
        torch.Size([1, 8, 512, 64])
        >>> alibi.get_bias(16).shape
        torch.Size([8, 16, 16])
        >>> alibi.get_bias(3)[0]
        tensor([[ 0.0000,    -inf,    -inf],
                [-0.5000,  0.0000,    -inf],
                [-1.0000, -0.5000,  0.0000]])

    References:
        Press et al., *Train Short, Test Long*, 2022.
    """

    def __init__(
        self,
        num_heads: int,
        *,
        causal: bool = True,
        bias_max: float = 8.0,
        geometric: bool = False,
        slopes: Tensor | Sequence[Any] | None = None,
        learned: bool = False,
    ) -> None:
        super().__init__(num_heads, causal=causal)
        who = type(self).__name__
        self.bias_max = checks.positive_float(who, "bias_max", bias_max)
        self.geometric = checks.boolean(who, "geometric", geometric)
        self._has_own_slopes = slopes is not None
        if slopes is None:
            numbers = slope_numbers(self.num_heads, self.bias_max, geometric=self.geometric)
        else:
            numbers = qk_checks.check_slope_numbers(who, slopes, self.num_heads)
        self.learned = checks.boolean(who, "learned", learned)
        self._tables = SharedTables(_slope_table, (numbers,), 1, torch.float64)
        if learned:
            if isinstance(numbers[0], tuple) or not all(numbers):
                rule = "learned slopes must be one for each head, above zero"
                checks.fail(who, rule, numbers, "Pass slopes of shape (H,), or learned=False.")
            self.log_slopes = nn.Parameter(torch.empty(self.num_heads))
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set learned slopes to those of the constructor."""
        if self.learned and not self.log_slopes.is_meta:
            with torch.no_grad():
                (exact,) = self._tables.at(torch.empty(0, device="cpu"))
                self.log_slopes.copy_(replicate_like(self.log_slopes, exact.log()))

    @property
    def slopes(self) -> Tensor:
        """A float32 copy of the slopes; the bias is computed from float64."""
        return self._exact(None).to(torch.float32, copy=True)

    @classmethod
    def from_model(
        cls, model: str, num_heads: int, *, head_dim: int | None = None, bias_max: float = 8.0
    ) -> ALiBi:
        """ALiBi of ``bloom``, ``mpt`` or ``falcon``; see :func:`alibi_model_slopes`.

        Examples:
            >>> ALiBi.from_model("falcon", 2, head_dim=64).slopes
            tensor([0.0078, 0.0005])
        """
        slopes = alibi_model_slopes(model, num_heads, head_dim=head_dim, bias_max=bias_max)
        return cls(num_heads, slopes=slopes)

    @classmethod
    def from_config(cls, config: dict[str, Any] | str | Path | Any, **keywords: Any) -> ALiBi:
        """ALiBi from the Hugging Face config of a BLOOM, MPT or Falcon; other models are refused.

        Args:
            config: A dict, the path of a ``config.json`` or of a model's folder, a model's name on
                the hub, or a config object of transformers.
            **keywords: Arguments of the constructor, which override the config.

        Examples:
            >>> ALiBi.from_config({"model_type": "bloom", "n_head": 2}).slopes
            tensor([0.0625, 0.0039])
        """
        recipe = configs.read_bias(config, configs.Alibi)
        arguments = {"num_heads": recipe.num_heads, "bias_max": recipe.bias_max, **keywords}
        if recipe.model == "falcon" and "slopes" not in arguments:
            heads, width = arguments["num_heads"], recipe.head_dim
            arguments["slopes"] = alibi_model_slopes("falcon", heads, head_dim=width)
        return cls(**arguments)

    def select_heads(self, start: int, stop: int) -> ALiBi:
        """The heads from ``start`` up to ``stop``, for one rank of tensor parallelism.

        Examples:
            >>> ALiBi(8).select_heads(2, 4).slopes
            tensor([0.1250, 0.0625])
        """
        who = type(self).__name__
        first = checks.integer(who, "start", start, least=0)
        last = checks.integer(who, "stop", stop)
        if not first < last <= self.num_heads:
            rule = f"start and stop must select at least one of the {self.num_heads} heads"
            checks.fail(who, rule, f"{first} to {last}", "Pass 0 <= start < stop <= num_heads.")
        (exact,) = self._tables.at(torch.empty(0, device="cpu"))
        slopes = exact[..., first:last]
        part = type(self)(last - first, causal=self.causal, slopes=slopes, learned=self.learned)
        if self.learned:
            part.log_slopes = nn.Parameter(self.log_slopes.detach()[first:last].clone())
        return part.to(self._device())

    def _as_bias(self, keys: int, dtype: torch.dtype, device: torch.device) -> attention.Slopes:
        return attention.Slopes(self._exact(device).to(dtype))

    def _bias_for(self, q: Tensor, k: Tensor) -> attention.Slopes:
        who = type(self).__name__
        checks.float_tensor(who, "q", q)
        if q.dim() == 4:
            check_num_heads(who, q, self.num_heads)
        # A GPU takes slopes in float32, unless q is wider.
        dtype = torch.float32 if q.is_cuda and q.dtype != torch.float64 else torch.float64
        tables = None if self.learned else self._tables.read(q, dtype)
        return attention.Slopes(self._exact(q.device) if tables is None else tables[0])

    def _exact(self, device: torch.device | str | None) -> Tensor:
        where = self._device() if device is None else torch.device(device)
        if self.learned:
            return self.log_slopes.to(where).to(widest(where)).exp()
        like = torch.empty(0, device=where)
        slopes: Tensor = (self._tables.read(like, torch.float64) or self._tables.at(like))[0]
        return slopes

    def _device(self) -> torch.device:
        return self.log_slopes.device if self.learned else self._tables.real_device

    def get_bias(self, seq_len: int) -> Tensor:
        """Bias for ``seq_len`` queries and keys, float32 of shape ``(H, L, L)``."""
        length = checks.integer(type(self).__name__, "seq_len", seq_len, least=0)
        return alibi_bias(self._exact(None), length, causal=self.causal)

    def bias(
        self,
        q_len: int,
        k_len: int | None = None,
        *,
        query_offset: int | Tensor | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        window: int | tuple[int, int] | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """The bias as an ``attn_mask`` for SDPA: :func:`posenc.functional.alibi_bias`."""
        return alibi_bias(
            self._exact(device),
            q_len,
            k_len,
            causal=self.causal,
            query_offset=query_offset,
            position_ids=position_ids,
            document_ids=document_ids,
            window=window,
            dtype=dtype,
        )

    def _argument_values(self) -> dict[str, Any]:
        slopes = self._tables.parameters[0] if self._has_own_slopes else None
        return {**super()._argument_values(), "slopes": slopes}
