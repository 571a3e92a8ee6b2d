"""The base of the modules whose bias is a product with the queries or the keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from posenc._contract import checks, qk_checks
from posenc.attention.biased import attend, check_options
from posenc.attention.biases import RowBias, relative_bias
from posenc.nn._module import ReadOnlyArguments

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from posenc.attention.biased import AttentionOptions


class ProductBias(ReadOnlyArguments):
    """A bias that follows from queries and keys, by ``_rows`` of a subclass."""

    head_dim: int
    causal: bool
    # How many terms a score is the sum of, if it is scaled for that.
    _terms: int = 1

    def bias(
        self,
        q: Tensor,
        k: Tensor,
        *,
        scale: float | None = None,
        query_offset: int | Tensor | None = None,
        document_ids: Tensor | None = None,
        window: int | tuple[int, int] | None = None,
        attn_mask: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """The whole matrix ``(B, H, Q, K)``; ``-inf`` for keys that are not seen.

        It includes the scale, which the scores must have too, and ``attn_mask``.
        """
        scale = self._check(q, k, scale)
        found = self._rows(q, k, scale, {"query_offset": query_offset, "attn_mask": attn_mask})
        given: Any = {"query_offset": query_offset, "document_ids": document_ids, "dtype": dtype}
        given |= {"window": window, "causal": self.causal, "device": q.device}
        matrix = relative_bias(found, q.shape[2], k.shape[2], **given)
        matrix = matrix if matrix.dim() == 4 else matrix[None]
        shape = *q.shape[:3], k.shape[2]
        mask = qk_checks.check_attn_mask(type(self).__name__, attn_mask, shape, q.device)
        if mask is not None and mask.dtype == torch.bool:
            matrix = matrix.masked_fill(~mask, float("-inf"))
        elif mask is not None:
            matrix = matrix + mask.to(dtype)
        return matrix

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, **options: Unpack[AttentionOptions]
    ) -> Tensor:
        """Attention with this bias, without a matrix of scores.

        Args:
            q: ``(B, H, Q, D)``.
            k: ``(B, Hk, K, D)`` with ``H`` a multiple of ``Hk`` and ``K`` at least ``Q``.
            v: ``(B, Hk, K, Dv)``.
            **options: ``scale``, ``query_offset``, ``document_ids``, ``window``, ``attn_mask``
                and ``dropout_p``, as in :func:`posenc.attention.biased_attention`.

        Returns:
            ``(B, H, Q, Dv)`` in the dtype of ``q``.
        """
        who = type(self).__name__
        check_options(who, options)
        scale = options["scale"] = self._check(q, k, options.get("scale"))
        found = self._rows(q, k, scale, options)
        return attend(who, q, k, v, found, causal=self.causal, **options)[0]

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, **options: Unpack[AttentionOptions]
    ) -> Tensor:
        """The same as calling the module: :meth:`forward`."""
        return self(q, k, v, **options)  # type: ignore[no-any-return]

    def _rows(self, q: Tensor, k: Tensor, scale: float, options: AttentionOptions) -> RowBias:
        raise NotImplementedError

    def _check(self, q: Tensor, k: Tensor, scale: float | None) -> float:
        """The scale, if queries and keys are for this module."""
        who = type(self).__name__
        qk_checks.check_qk(who, q, k)
        qk_checks.check_lengths(who, q.shape[2], k.shape[2])
        hint = f"Build {who} for heads of {q.shape[3]} channels."
        checks.equal(who, "head_dim", q.shape[3], self.head_dim, hint)
        scale = (self._terms * self.head_dim) ** -0.5 if scale is None else scale
        return qk_checks.check_scale(who, scale, q)
