"""Polar coordinate position embedding (PoPE) of queries and keys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posenc import ops
from posenc._contract import checks, qk_checks
from posenc.functional import rotary
from posenc.functional._positions import offset_by_position, run_kernel
from posenc.functional.biased import attend
from posenc.nn._module import KeepsFloat32, with_offset
from posenc.nn._rotary import RotatedKeys, check_axes, check_scaling
from posenc.numerics.axes import Axes
from posenc.numerics.frequencies import Spectrum
from posenc.numerics.scaling import Rule
from posenc.numerics.tables import widest
from posenc.ops import Spec, TableRows


class PoPE(KeepsFloat32, RotatedKeys):
    r"""Queries and keys in polar coordinates: the content is the length, the position the angle.

    .. math::
        q_c &\mapsto \mu(q_c)\,(\cos p\theta_c,\; \sin p\theta_c), \qquad
        \mu(x) = \ln(1 + e^x), \quad \theta_c = b^{-c/D} \\
        k_c &\mapsto \mu(k_c)\,(\cos(p\theta_c + \delta_c),\; \sin(p\theta_c + \delta_c))

    so that the score of a query at :math:`t` and a key at :math:`s` is

    .. math:: \textstyle\sum_c \mu(q_c)\,\mu(k_c)\,\cos((s - t)\,\theta_c + \delta_c)

    Every channel has an angle of its own, so a head of ``D`` channels becomes one of ``2 D``: all
    cosines, then all sines. Angles are exact as in :class:`posenc.RoPE`; the result is rounded
    once, within 0.503 ulp at the magnitude of :math:`\mu`.

    Args:
        head_dim: Channels ``D`` of a head, as the projections give them.
        num_kv_heads: Key heads, which have a row of ``delta`` each; None for no ``delta``.
        max_seq_len: Positions are ``0 .. max_seq_len - 1``. None for no limit.
        base: :math:`b`.
        init: ``"zero"``, or ``"uniform"`` for angles drawn from the whole turn.
        scaling: A rule of `posenc.scaling`, which scales the ``D`` rates.
        axes: An arrangement of `posenc.axes`, for positions with several coordinates: the channels
            of the head are its pairs, so ``Sections`` add up to ``D``.
        seq_dim: The dimension of the tokens: -2, or 1 for tensors of ``(B, L, H, D)``.

    Attributes:
        delta: Parameter ``(num_kv_heads, head_dim)``, or None. It is limited to :math:`[-2\pi, 0]`
            where it is used; a number outside gets no gradient. It stays float32 when the model is
            cast to half precision. FSDP2 shards such a model with this module as a unit of its own,
            which has no MixedPrecisionPolicy.

    Examples:
        >>> pope = PoPE(head_dim=64, num_kv_heads=2)
        >>> q, k = torch.randn(1, 8, 16, 64), torch.randn(1, 2, 16, 64)
        >>> polar_q, polar_k = pope(q, k, offset=100)
        >>> polar_q.shape, polar_k.shape
        (torch.Size([1, 8, 16, 128]), torch.Size([1, 2, 16, 128]))

    References:
        Gopalakrishnan, Csordás, Schmidhuber and Mozer, *Decoupling the "What" and "Where" With
        Polar Coordinate Positional Embeddings*, 2025.
    """

    delta: Tensor | None

    def __init__(
        self,
        head_dim: int,
        *,
        num_kv_heads: int | None,
        max_seq_len: int | None = 2048,
        base: float = 10_000.0,
        init: str = "zero",
        scaling: Rule | Mapping[str, Any] | str | None = None,
        axes: Axes | None = None,
        seq_dim: int = -2,
    ) -> None:
        super().__init__()
        who = type(self).__name__
        self.head_dim = checks.integer(who, "head_dim", head_dim)
        self.num_kv_heads = checks.optional(checks.integer, who, "num_kv_heads", num_kv_heads)
        self.max_seq_len = checks.optional(checks.integer, who, "max_seq_len", max_seq_len)
        self.base = checks.base(who, base)
        self.init = checks.choice(who, "init", init, ("zero", "uniform"))
        self.scaling = check_scaling(who, scaling, self.base)
        self.axes = check_axes(who, axes)
        self.seq_dim = rotary.check_seq_dim(who, seq_dim)
        # The pairs of a rotation of 2 D channels have the D rates of PoPE.
        width = 2 * self.head_dim
        if axes is not None:
            axes.check(who, width)
        spectrum = Spectrum(width, self.base, self.scaling, axes)
        self._set_angles(spectrum, self.max_seq_len, width, Spec(False, False))
        delta = None
        if self.num_kv_heads is not None:
            delta = nn.Parameter(torch.empty(self.num_kv_heads, self.head_dim, dtype=torch.float32))
        self.register_parameter("delta", delta)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set ``delta`` as ``init`` says."""
        if self.delta is None or self.delta.is_meta:
            return
        with torch.no_grad():
            if self.init == "zero":
                self.delta.zero_()
            else:
                self.delta.uniform_(-math.tau, 0.0)

    @property
    def scale(self) -> float:
        """The factor of scores, one over the root of ``head_dim``: pass it to SDPA.

        SDPA's own would be that of ``2 D`` channels.
        """
        return self.head_dim**-0.5  # type: ignore[no-any-return]

    @with_offset
    def forward(
        self,
        q: Tensor,
        k: Tensor,
        *given: int | Tensor,
        offset: int | Tensor = 0,
        position_ids: Tensor | None = None,
        seq_len: int | Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys of ``2 D`` channels; arguments as :meth:`posenc.RoPE.forward`.

        Cache the keys, and attend to all cached ones.

        Returns:
            New tensors ``(B, H, L, 2 D)`` and ``(B, num_kv_heads, L, 2 D)``, in the dtypes of ``q``
            and ``k``.
        """
        who, limit = type(self).__name__, self._angles.limit
        if given:
            offset = offset_by_position(who, given, offset, q, self.seq_dim)
        rotary.check_heads(who, "qk", [q, k], self.head_dim, self.seq_dim)
        q, k = rotary.swap_heads([q, k], self.seq_dim)
        if self.num_kv_heads is not None and k.shape[1] != self.num_kv_heads:
            rule = f"k must have {self.num_kv_heads} heads, one for each row of delta"
            hint = f"Build {who} with the number of key heads, or pass seq_dim=1."
            checks.fail(who, rule, k.shape[1], hint)
        delta, learned = self.delta, () if self.delta is None else (self.delta,)
        if delta is not None:
            if delta.device != k.device:
                rule = f"k must be on the device of delta, {delta.device}"
                checks.fail(who, rule, k.device, f"Move {who} with .to(k.device).")
            # In float32, the lower end would not be a whole turn.
            delta = delta.to(widest(delta.device))
            # The ends get a gradient, as numbers between them. That of clamp differs by torch.
            limited = delta.detach().clamp(-math.tau, 0.0)
            delta = torch.where(delta == limited, delta, limited)

        def run(cos: Tensor, sin: Tensor, rows: TableRows) -> list[Tensor]:
            both = ((q, None), (k, delta))
            return [run_kernel(who, limit, ops.polar, *x, cos, sin, rows) for x in both]

        ys = self._by_tables(who, [q, k], offset, position_ids, seq_len, run, *learned)
        a, b = rotary.swap_heads(ys, self.seq_dim)
        return a, b

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = True,
        query_offset: int | Tensor | None = None,
        document_ids: Tensor | None = None,
        window: int | tuple[int, int] | None = None,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        scale: float | None = None,
        position_ids: Tensor | None = None,
        seq_len: int | Tensor | None = None,
    ) -> Tensor:
        """Attention with PoPE, of queries and keys as the projections give them.

        Every key is encoded again. To cache encoded keys, call the module, and then
        :func:`posenc.attention.biased_attention` with :attr:`scale`. The other arguments are those
        of that function; positions go on from document to document, which changes no score.

        Args:
            q: ``(B, H, Q, D)``; ``(B, Q, H, D)`` if ``seq_dim`` is 1, and so are the others.
            k: ``(B, num_kv_heads, K, D)`` with ``K`` at least ``Q``.
            v: ``(B, num_kv_heads, K, Dv)``.
            scale: The factor of scores; :attr:`scale` if None.
            position_ids: Of the keys, as in :meth:`forward`; a query has that of its own key.
            seq_len: As in :meth:`forward`.

        Returns:
            ``(B, H, Q, Dv)`` in the dtype of ``q``.

        Examples:
            >>> pope, (q, k, v) = PoPE(8, num_kv_heads=2), torch.randn(3, 1, 2, 5, 8)
            >>> pope.attention(q, k, v).shape
            torch.Size([1, 2, 5, 8])
        """
        who = f"{type(self).__name__}.attention"
        factor = self.scale if scale is None else checks.positive_float(who, "scale", scale)
        checks.boolean(who, "causal", causal)
        drop = checks.probability(who, "dropout_p", dropout_p)
        q, k, v = rotary.swap_heads([q, k, v], self.seq_dim)
        qk_checks.check_qkv(who, q, k, v)
        scores, query_index = (*q.shape[:3], k.shape[2]), None
        if scores[2] != scores[3]:
            # The module encodes queries and keys of the same tokens: put the queries among them.
            queries, keys = qk_checks.check_lengths(who, *scores[2:])
            start = qk_checks.check_query_offset(who, query_offset, queries, keys, q.device)
            qk_checks.check_batches(who, q.shape[0], query_offset=start)
            start = start.reshape(-1, 1, 1, 1) if isinstance(start, Tensor) else start
            query_index = start + torch.arange(queries, device=q.device)[:, None]
            query_index = query_index.expand(*q.shape[:3], 1)
            among = q.new_zeros((*scores[:2], keys, q.shape[3]))
            q = among.scatter(2, query_index.expand(*q.shape), q)
        polar = self(
            *rotary.swap_heads([q, k], self.seq_dim), position_ids=position_ids, seq_len=seq_len
        )
        q, k = rotary.swap_heads(list(polar), self.seq_dim)
        if query_index is not None:
            q = q.gather(2, query_index.expand(*query_index.shape[:3], q.shape[3]))
        mask = qk_checks.check_attn_mask(who, attn_mask, scores, q.device)
        placed = any(x is not None for x in (query_index, query_offset, document_ids, window))
        if placed or (mask is not None and mask.dtype not in (torch.bool, q.dtype)):
            options: Any = {"causal": causal, "scale": factor, "dropout_p": drop, "window": window}
            options |= {"query_offset": query_offset, "document_ids": document_ids}
            out, _ = attend(who, q, k, v, None, attn_mask=mask, **options)
            return rotary.swap_heads([out], self.seq_dim)[0]
        if mask is not None and causal:
            # SDPA takes a mask or is_causal, not both.
            earlier = torch.ones(scores[2:], dtype=torch.bool, device=q.device).tril()
            mask = torch.where(earlier, mask, False if mask.dtype is torch.bool else float("-inf"))
        # SDPA's kernels want one width; otherwise it makes the matrix of scores.
        width = v.shape[-1]
        v = F.pad(v, (0, max(q.shape[-1] - width, 0)))
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            mask,
            drop,
            is_causal=causal and mask is None,
            scale=factor,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return rotary.swap_heads([out[..., :width]], self.seq_dim)[0]
