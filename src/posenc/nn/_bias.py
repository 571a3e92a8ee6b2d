"""The bases of the modules that are attention with a relative bias."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from posenc import ops
from posenc._contract import checks, qk_checks, sharding
from posenc.functional.biased import attend
from posenc.functional.mods import relative_score_mod
from posenc.nn._module import ReadOnlyArguments, called
from posenc.ops.attention.biases import (
    Bias,
    DistanceTable,
    Slopes,
    Terms,
    described,
    refuse_sharded,
)
from posenc.ops.attention.places import check_places
from posenc.ops.attention.rows import matrix_of, relative_bias

if TYPE_CHECKING:
    from posenc.functional.mods import ScoreMod


def check_num_heads(who: str, q: Tensor, heads: int) -> None:
    """Refuse queries with another number of heads than the bias has."""
    if q.shape[1] != heads:
        rule = f"q must have {heads} heads, one for each of the bias"
        hint = f"Transpose to (B, heads, tokens, D), or build {who} for the heads of the queries."
        checks.fail(who, rule, q.shape[1], hint)


class BiasedAttention(ReadOnlyArguments):
    """Attention with the bias that ``_bias_for`` of a subclass returns for queries and keys."""

    causal: bool

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        query_offset: int | Tensor | None = None,
        document_ids: Tensor | None = None,
        window: int | tuple[int, int] | None = None,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        prune: bool = True,
        backend: str | None = None,
    ) -> Tensor:
        """Attention with this bias, without a matrix of scores.

        Other arguments are those of :func:`posenc.attention.biased_attention`.

        Args:
            q: ``(B, H, Q, D)``.
            k: ``(B, Hk, K, D)`` with ``H`` a multiple of ``Hk`` and ``K`` at least ``Q``.
            v: ``(B, Hk, K, Dv)``.
            scale: The factor of scores, one over the root of ``D`` if None, unless the class has
                another.

        Returns:
            ``(B, H, Q, Dv)`` in the dtype of ``q``.
        """
        if scale is None:
            scale = self._default_scale()
        out, _ = attend(
            type(self).__name__,
            q,
            k,
            v,
            self._bias_for(q, k),
            causal=self.causal,
            scale=scale,
            query_offset=query_offset,
            document_ids=document_ids,
            window=window,
            attn_mask=attn_mask,
            dropout_p=dropout_p,
            prune=prune,
            backend=backend,
        )
        return out

    # What Python says of a wrong argument names no private class.
    forward.__qualname__ = "forward"
    attention = called(forward)

    def _default_scale(self) -> float | None:
        return None

    def _bias_for(self, q: Tensor, k: Tensor) -> Bias:
        raise NotImplementedError


class RelativeBias(BiasedAttention):
    """The base of the biases that follow from a few numbers, without queries and keys.

    It is the type of each of them: ALiBi, T5Bias, LearnedBias, KERPLE, Sandwich, FIRE and GridBias.

    Args:
        num_heads: Query heads ``H``.
        causal: Whether a query sees only keys up to its own.
        dtype: The dtype of the parameters, torch's default if None. The bias is computed in at
            least float32.
    """

    num_heads: int
    dtype: torch.dtype | None

    def __init__(self, num_heads: int, *, causal: bool, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        who = type(self).__name__
        self.num_heads = checks.integer(who, "num_heads", num_heads)
        self.causal = checks.boolean(who, "causal", causal)
        self.dtype = checks.optional(checks.float_dtype, who, "dtype", dtype)

    def as_bias(self, k_len: int, *, dtype: torch.dtype = torch.float32) -> Bias:
        """The bias for ``k_len`` keys as :func:`posenc.attention.biased_attention` takes it.

        Args:
            k_len: Keys ``K``.
            dtype: The dtype of the numbers.
        """
        who = type(self).__name__
        keys = checks.integer(who, "k_len", k_len, least=0)
        checks.float_dtype(who, "dtype", dtype)
        return self._as_bias(keys, dtype, self._device())

    def _as_bias(self, keys: int, dtype: torch.dtype, device: torch.device) -> Bias:
        """The bias from the parameters, differentiably; every subclass has its own."""
        raise NotImplementedError

    def _bias_for(self, q: Tensor, k: Tensor) -> Bias:
        who = type(self).__name__
        qk_checks.check_qk(who, q, k)
        check_num_heads(who, q, self.num_heads)
        wide = torch.promote_types(q.dtype, torch.float32)
        # Offloaded weights are on the meta device until the layer that has them is called.
        device = self._device()
        device = q.device if device.type == "meta" else device
        return self._as_bias(k.shape[2], wide, device)

    def table(self, k_len: int, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """The bias of each head and distance, ``(H, R)``, gradients included.

        Column ``d`` is for the key ``d`` before the query. If the module is not causal, the
        columns begin with later keys, and distance zero is in the middle. The numbers at either
        end are those of all farther distances.
        """
        bias = self.as_bias(k_len, dtype=dtype)
        if isinstance(bias, Slopes) and bias.values.dim() == 1:
            # The integers are negated, because a float zero would become -0.0.
            return bias.values[:, None] * -self._distances(k_len, bias.values.device)[0].abs()
        if isinstance(bias, DistanceTable):
            return bias.values
        rule = "the bias must be a function of the distance only"
        got = "slopes for each sequence" if isinstance(bias, Slopes) else described(bias)
        hint = "Call bias() for the whole matrix, or attention()."
        checks.fail(type(self).__name__, rule, got, hint)

    def bias(
        self,
        q_len: int,
        k_len: int | None = None,
        *,
        query_offset: int | Tensor | None = None,
        document_ids: Tensor | None = None,
        window: int | tuple[int, int] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """The whole matrix, to look at, or as ``attn_mask`` of SDPA.

        Arguments are those of :func:`posenc.attention.relative_bias`.

        Returns:
            Tensor of shape ``(H, Q, K)``, or ``(B, H, Q, K)`` if an argument has a batch axis;
            ``-inf`` for keys that are not seen.
        """
        who = type(self).__name__
        queries, keys = qk_checks.check_lengths(who, q_len, k_len)
        wide = torch.promote_types(checks.float_dtype(who, "dtype", dtype), torch.float32)
        return relative_bias(
            self.as_bias(keys, dtype=wide),
            queries,
            keys,
            causal=self.causal,
            query_offset=query_offset,
            document_ids=document_ids,
            window=window,
            dtype=dtype,
            device=self._device(),
        )

    def score_mod(
        self,
        q_len: int,
        k_len: int | None = None,
        *,
        query_offset: int | Tensor | None = None,
        document_ids: Tensor | None = None,
        window: int | tuple[int, int] | None = None,
        masked: bool = True,
        base: ScoreMod | None = None,
    ) -> ScoreMod:
        """A score_mod for ``flex_attention``: :func:`posenc.attention.relative_score_mod`."""
        return relative_score_mod(
            self.as_bias(q_len if k_len is None else k_len),
            q_len,
            k_len,
            causal=self.causal,
            query_offset=query_offset,
            document_ids=document_ids,
            window=window,
            masked=masked,
            base=base,
        )

    def add_bias(self, scores: Tensor) -> Tensor:
        """Scores ``(..., H, Q, K)``, whose last query is at the last key, plus the bias."""
        who = type(self).__name__
        checks.float_tensor(who, "scores", scores)
        checks.rank(who, "scores", scores, range(3, 9), "(..., H, Q, K)")
        wide = torch.promote_types(scores.dtype, torch.float32)
        bias = self.bias(*scores.shape[-2:], dtype=wide).to(scores.device)
        if scores.shape[-bias.dim() : -2] != bias.shape[:-2]:
            axes = ", ".join(map(str, ("...", *bias.shape[:-2])[bias.dim() - 3 :]))
            rule, got = f"scores must have shape ({axes}, Q, K)", f"shape {tuple(scores.shape)}"
            checks.fail(who, rule, got, "Put the heads third from last.")
        return ops.add(scores, bias)

    def _device(self) -> torch.device:
        return next(self.parameters()).device

    def _distances(self, keys: int, device: torch.device) -> tuple[Tensor, int]:
        """All distances between ``keys`` keys, int64 ``[R]``, and the column of distance zero."""
        most = max(keys, 1)
        if self.causal:
            return torch.arange(most, device=device), 0
        return torch.arange(1 - most, most, device=device), most - 1


class ProductBias(BiasedAttention):
    """A bias that follows from queries and keys, by ``_terms`` of a subclass."""

    head_dim: int
    dtype: torch.dtype | None

    def __init__(self, head_dim: int, *, causal: bool, dtype: torch.dtype | None) -> None:
        super().__init__()
        who = type(self).__name__
        self.head_dim = checks.integer(who, "head_dim", head_dim)
        self.causal = checks.boolean(who, "causal", causal)
        self.dtype = checks.optional(checks.float_dtype, who, "dtype", dtype)

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
        who, bias = type(self).__name__, self._bias_for(q, k)
        checks.float_dtype(who, "dtype", dtype)
        size = qk_checks.check_scale(who, self._default_scale() if scale is None else scale, q)
        places = check_places(
            who,
            bias,
            q.shape[2],
            k.shape[2],
            self.causal,
            query_offset,
            document_ids,
            window,
            q.device,
            q.shape[0],
        )
        shape = *q.shape[:3], k.shape[2]
        mask = qk_checks.check_attn_mask(who, attn_mask, shape, q.device)
        return matrix_of(bias, places, dtype, size, mask)

    def _default_scale(self) -> float:
        return self.head_dim**-0.5  # type: ignore[no-any-return]

    def _bias_for(self, q: Tensor, k: Tensor) -> Bias:
        who = type(self).__name__
        if sharding.is_sharded(q):
            refuse_sharded(who, who)
        qk_checks.check_qk(who, q, k)
        qk_checks.check_lengths(who, q.shape[2], k.shape[2])
        hint = f"Build {who} for heads of {q.shape[3]} channels."
        checks.equal(who, "head_dim", q.shape[3], self.head_dim, hint)
        return self._terms(q, k)

    def _terms(self, q: Tensor, k: Tensor) -> Terms:
        raise NotImplementedError
