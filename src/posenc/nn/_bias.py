"""The base of the modules with a relative bias."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from posenc import kernels
from posenc._contract import checks, qk_checks
from posenc.attention.biased import attend, check_options
from posenc.attention.biases import Bias, DistanceTable, relative_bias
from posenc.attention.mods import relative_score_mod
from posenc.nn._module import ReadOnlyArguments

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from posenc.attention.biased import AttentionOptions
    from posenc.attention.mods import ModOptions, ScoreMod


def check_heads(who: str, q: Tensor, heads: int) -> None:
    """Refuse queries of other heads than those of a bias."""
    if q.shape[1] != heads:
        rule = f"q must have {heads} heads, one for each of the bias"
        hint = f"Build {who} with that num_heads, or transpose to (B, heads, tokens, D)."
        checks.fail(who, rule, q.shape[1], hint)


class RelativeBias(ReadOnlyArguments):
    """A bias that follows from a few numbers, which ``_as_bias`` of a subclass makes."""

    num_heads: int
    causal: bool
    dtype: torch.dtype | None

    def __init__(self, num_heads: int, *, causal: bool, dtype: torch.dtype | None) -> None:
        super().__init__()
        who = type(self).__name__
        self.num_heads = checks.integer(who, "num_heads", num_heads)
        self.causal = checks.boolean(who, "causal", causal)
        self.dtype = checks.optional(checks.float_dtype, who, "dtype", dtype)

    def as_bias(
        self,
        k_len: int,
        *,
        dtype: torch.dtype = torch.float32,
        document_ids: Tensor | None = None,
    ) -> Bias:
        """The bias for ``k_len`` keys as :func:`posenc.attention.biased_attention` takes it.

        Args:
            k_len: Keys ``K``.
            dtype: The dtype of the numbers.
            document_ids: As in :meth:`attention`, for a bias that depends on where a document
                begins.
        """
        keys = checks.integer(type(self).__name__, "k_len", k_len, least=0)
        return self._as_bias(keys, dtype, document_ids, self._device())

    def _as_bias(
        self, keys: int, dtype: torch.dtype, ids: Tensor | None, device: torch.device
    ) -> Bias:
        raise NotImplementedError

    def table(self, k_len: int, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """The bias of each head and distance, ``(H, R)``, gradients included.

        Column ``d`` is for the key ``d`` before the query. If the module is not causal, the
        columns begin with later keys, and distance zero is in the middle. The numbers at either
        end are those of all farther distances.
        """
        who = type(self).__name__
        keys = checks.integer(who, "k_len", k_len, least=0)
        found = self.as_bias(keys, dtype=checks.float_dtype(who, "dtype", dtype))
        if isinstance(found, DistanceTable):
            return found.values
        rule = "the bias must be a function of the distance alone"
        hint = "Call bias() for the whole matrix, or attention()."
        checks.fail(who, rule, type(found).__name__, hint)

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

        Args:
            q_len: Queries ``Q``.
            k_len: Keys ``K``, at least ``Q``; ``Q`` if None.
            query_offset: Key index of the first query, ``K - Q`` if None: an int, or an integer
                tensor ``()`` or ``(B,)``.
            document_ids: Ids ``(K,)`` or ``(B, K)``. A run of equal ids is a document, and a query
                sees only its own.
            window: As in :func:`posenc.attention.biased_attention`.
            dtype: A floating dtype for the result.

        Returns:
            Tensor of shape ``(H, Q, K)``, or ``(B, H, Q, K)`` if an argument has a batch axis;
            ``-inf`` for keys that are not seen.
        """
        queries, keys = qk_checks.check_lengths(type(self).__name__, q_len, k_len)
        wide = torch.promote_types(dtype, torch.float32)
        found = self.as_bias(keys, dtype=wide, document_ids=document_ids)
        given: Any = {"query_offset": query_offset, "document_ids": document_ids, "dtype": dtype}
        given |= {"window": window, "causal": self.causal, "device": self._device()}
        return relative_bias(found, queries, keys, **given)

    def score_mod(self, q_len: int, k_len: int, **options: Unpack[ModOptions]) -> ScoreMod:
        """A score_mod for ``flex_attention``: :func:`posenc.attention.relative_score_mod`."""
        found = self.as_bias(k_len, document_ids=options.get("document_ids"))
        return relative_score_mod(found, q_len, k_len, causal=self.causal, **options)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, **options: Unpack[AttentionOptions]
    ) -> Tensor:
        """Attention with this bias, without a matrix of scores.

        Args:
            q: ``(B, H, Q, D)``.
            k: ``(B, Hk, K, D)`` with ``H`` a multiple of ``Hk`` and ``K`` at least ``Q``.
            v: ``(B, Hk, K, Dv)``.
            **options: ``scale``, ``query_offset``, ``document_ids``, ``window``, ``attn_mask``,
                ``dropout_p``, ``prune`` and ``backend``, as in
                :func:`posenc.attention.biased_attention`.

        Returns:
            ``(B, H, Q, Dv)`` in the dtype of ``q``.
        """
        who = type(self).__name__
        check_options(who, options)
        qk_checks.check_qkv(who, q, k, v)
        check_heads(who, q, self.num_heads)
        if options.get("scale") is None:
            # T5's is an argument of the module; None is one over the root of the width.
            options["scale"] = getattr(self, "scale", None)
        wide = torch.promote_types(q.dtype, torch.float32)
        # Offloaded weights are on the meta device until the layer that has them is called.
        device = self._device()
        device = q.device if device.type == "meta" else device
        found = self._as_bias(k.shape[2], wide, options.get("document_ids"), device)
        return attend(who, q, k, v, found, causal=self.causal, **options)[0]

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, **options: Unpack[AttentionOptions]
    ) -> Tensor:
        """The same as calling the module: :meth:`forward`."""
        return self(q, k, v, **options)  # type: ignore[no-any-return]

    def add_bias(self, scores: Tensor) -> Tensor:
        """Scores ``(..., H, Q, K)``, whose last query is at the last key, plus the bias."""
        who = type(self).__name__
        checks.float_tensor(who, "scores", scores)
        if scores.dim() < 3 or scores.shape[-3] != self.num_heads:
            rule = f"scores must have shape (..., {self.num_heads}, Q, K)"
            got = f"shape {tuple(scores.shape)}"
            checks.fail(who, rule, got, "Put the heads third from last.")
        wide = torch.promote_types(scores.dtype, torch.float32)
        return kernels.add(scores, self.bias(*scores.shape[-2:], dtype=wide).to(scores.device))

    def _device(self) -> torch.device:
        return next(self.parameters()).device

    def _distances(self, keys: int, device: torch.device) -> tuple[Tensor, int]:
        """All distances between ``keys`` keys, int64 ``[R]``, and the column of distance zero."""
        most = max(keys, 1)
        if self.causal:
            return torch.arange(most, device=device), 0
        return torch.arange(1 - most, most, device=device), most - 1
