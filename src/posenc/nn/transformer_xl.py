"""Transformer-XL's terms: products with the projected sinusoid of the distance."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from posenc._contract import checks
from posenc._contract.tracing import without_autocast
from posenc.attention.biased import AttentionOptions
from posenc.attention.biases import RowBias, for_each_query_head
from posenc.attention.terms import relative_terms
from posenc.nn._bias import check_heads
from posenc.nn._module import Linear
from posenc.nn._product import ProductBias
from posenc.nn._tables import SharedTables, TableModule, Tensors
from posenc.numerics.frequencies import Spectrum
from posenc.numerics.tables import sinusoid


def _encodings(
    positions: Tensor, dtype: torch.dtype, spectrum: Spectrum, concatenated: bool, causal: bool
) -> Tensors:
    """The encodings of distances, and of as many later keys unless ``causal``."""
    signs = (1,) if causal else (1, -1)
    how: Any = {"concatenated": concatenated}
    return tuple(sinusoid(positions * sign, spectrum, dtype, **how) for sign in signs)


class TransformerXLBias(TableModule, ProductBias):
    r"""Add the products of the query, and of two learned vectors, with key and distance.

    .. math:: \text{score}_{ij} = s\,\big((q_i + u) \cdot k_j + (q_i + v) \cdot W r_{i - j}\big)

    for the sinusoid :math:`r` of the distance, exact up to one rounding. :math:`u` and :math:`v`
    are for each head. This is the attention of Transformer-XL and XLNet, and of Conformers.

    Args:
        num_heads: Heads ``H``, of ``E / H`` channels.
        embed_dim: Channels ``E`` of the sinusoid and of the model, even and a multiple of
            ``num_heads``.
        causal: Whether a query sees only keys up to its own.
        max_distance: The distance from which all have one sinusoid (``clamp_len``); None for none.
        base: The base of the sinusoid's frequencies.
        concatenated: Whether all sines come before all cosines, as in Transformer-XL and XLNet;
            False, where they alternate, as in Conformers.
        dtype: The dtype of the parameters, torch's default if None. The bias is made in float32.

    Attributes:
        linear_pos: :math:`W`, a linear layer from ``E`` to ``E`` without a bias.
        pos_bias_u: :math:`u`, a Parameter of shape ``(num_heads, head_dim)``; zero at the start.
        pos_bias_v: :math:`v`, in the same way.

    Examples:
        >>> bias = TransformerXLBias(embed_dim=512, num_heads=8)
        >>> q, k, v = torch.randn(3, 1, 8, 512, 64).unbind()
        >>> bias.attention(q, k, v).shape
        torch.Size([1, 8, 512, 64])

    References:
        Dai et al., *Transformer-XL: Attentive Language Models Beyond a Fixed-Length Context*,
        2019, section 3.3.
    """

    def __init__(
        self,
        num_heads: int,
        *,
        embed_dim: int,
        causal: bool = True,
        max_distance: int | None = None,
        base: float = 10_000.0,
        concatenated: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        who = type(self).__name__
        self.embed_dim = checks.even(who, "embed_dim", embed_dim)
        self.num_heads = checks.integer(who, "num_heads", num_heads)
        if self.embed_dim % self.num_heads:
            rule = f"embed_dim must be a multiple of num_heads={num_heads}"
            checks.fail(who, rule, embed_dim, "Pass head_dim * num_heads.")
        self.head_dim = self.embed_dim // self.num_heads
        self.causal = checks.boolean(who, "causal", causal)
        self.max_distance = checks.optional(checks.integer, who, "max_distance", max_distance)
        self.base = checks.base(who, base)
        self.concatenated = checks.boolean(who, "concatenated", concatenated)
        self.dtype = checks.optional(checks.float_dtype, who, "dtype", dtype)
        self.linear_pos = Linear(self.embed_dim, self.embed_dim, bias=False, dtype=dtype)
        shape = self.num_heads, self.head_dim
        self.pos_bias_u = nn.Parameter(torch.empty(shape, dtype=dtype))
        self.pos_bias_v = nn.Parameter(torch.empty(shape, dtype=dtype))
        how = Spectrum(self.embed_dim, self.base), self.concatenated, self.causal
        self._tables = SharedTables(_encodings, how, None, torch.float32)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the projection as :class:`torch.nn.Linear` does; set both vectors to zero."""
        self.linear_pos.reset_parameters()
        nn.init.zeros_(self.pos_bias_u)
        nn.init.zeros_(self.pos_bias_v)

    def vectors(self, k_len: int, *, dtype: torch.dtype = torch.float32) -> Tensor:
        r""":math:`W r` of each distance between ``k_len`` keys, ``(R, H, D)``, later keys first.

        If causal, they begin with distance zero.
        """
        keys = checks.integer(type(self).__name__, "k_len", k_len, least=0)
        least, most = self._ends(keys)
        like = torch.empty(0, device=self.pos_bias_u.device)
        found = self._tables.read(like, dtype, most + 1)
        if found is None:
            spectrum, concatenated, _ = self._tables.parameters
            distance = torch.arange(least, most + 1, device=like.device)
            (r,) = _encodings(distance, dtype, spectrum, concatenated, True)
        elif self.causal:
            r = found[0][: most + 1]
        else:
            r = torch.cat((found[1][1 : most + 1].flip(0), found[0][: most + 1]))
        return self.linear_pos(r).unflatten(-1, (self.num_heads, self.head_dim))  # type: ignore[no-any-return]

    def _ends(self, keys: int) -> tuple[int, int]:
        """The first and the last distance."""
        most = max(keys - 1, 0)
        most = most if self.max_distance is None else min(most, self.max_distance)
        return 0 if self.causal else -most, most

    def _rows(self, q: Tensor, k: Tensor, scale: float, options: AttentionOptions) -> RowBias:
        heads, keys = q.shape[1], k.shape[2]
        check_heads(type(self).__name__, q, self.num_heads)
        wide = torch.promote_types(q.dtype, torch.float32)
        least, most = self._ends(keys)
        with without_autocast(q):
            shifted = q.to(wide) + self.pos_bias_v.to(q.device, wide)[:, None]
            u = self.pos_bias_u.to(q.device, wide)[:, None]
            with_u = q.to(wide) + u
        terms = relative_terms(
            shifted,
            k,
            lambda distance: distance.clamp(least, most) - least,
            for_queries=self.vectors(keys, dtype=wide),
            scale=scale,
            query_offset=options.get("query_offset"),
            reach=(least, most),
        )
        assert terms.terms is not None

        def rows(own: Tensor, index: Tensor) -> Tensor:
            some = for_each_query_head(k.index_select(2, index).to(wide), heads)
            with without_autocast(q):
                return terms.rows(own, index) + u @ some.mT * scale

        return RowBias(rows, terms.terms._replace(q=with_u))
