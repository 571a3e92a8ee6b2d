"""Biases that are products with a vector for each distance: Shaw, Transformer-XL, DeBERTa, CoPE."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from posenc import configs
from posenc._contract import checks
from posenc._contract.tracing import without_autocast
from posenc.nn._bias import ProductBias, check_num_heads
from posenc.nn._module import Linear
from posenc.nn._tables import SharedTables, TableModule, Tensors
from posenc.numerics.frequencies import Spectrum
from posenc.numerics.tables import sinusoid
from posenc.ops.attention.biases import CopeLevels, Terms
from posenc.ops.attention.biases.vectors import relative_terms

if TYPE_CHECKING:
    from typing_extensions import Self


class RelativeKeys(ProductBias):
    r"""Add the product of the query with a learned vector for each distance, clipped.

    .. math:: \text{bias}_{ij} = s\, q_i \cdot a_{\text{clip}(j - i)}, \qquad
              -m \le \text{clip}(j - i) \le m'

    The paper has vectors that are added to the values too; they are not here, and its section 4.3
    found no loss without them. On CUDA the attention's kernel computes the products.

    Args:
        head_dim: Channels ``D`` of a head.
        max_distance: :math:`m`; earlier keys share the vector of this distance.
        causal: Whether a query sees only keys up to its own. Otherwise later keys have vectors of
            their own.
        max_later: :math:`m'` of later keys, ``max_distance`` if None; not if causal.
        num_heads: Heads, if each has vectors of its own, as in Music Transformer; None if they
            share them.
        dtype: The dtype of the parameter, torch's default if None.

    Attributes:
        weight: Parameter of shape ``(max_distance + 1 + max_later, head_dim)``, or
            ``(..., num_heads, head_dim)``, the farthest earlier key first; zero at the start. If
            causal, the vector of the query's own key is the last.

    Examples:
        >>> bias = RelativeKeys(head_dim=64, max_distance=16)
        >>> q, k, v = torch.randn(3, 1, 8, 512, 64).unbind()
        >>> bias.attention(q, k, v).shape
        torch.Size([1, 8, 512, 64])

    References:
        Shaw et al., *Self-Attention with Relative Position Representations*, 2018, section 3.2.
    """

    def __init__(
        self,
        head_dim: int,
        *,
        max_distance: int,
        causal: bool = True,
        max_later: int | None = None,
        num_heads: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(head_dim, causal=causal, dtype=dtype)
        who = type(self).__name__
        self.max_distance = checks.integer(who, "max_distance", max_distance, least=0)
        if max_later is not None:
            max_later = checks.integer(who, "max_later", max_later, least=0)
            if causal:
                rule = "max_later must be None if causal, because no later key is seen"
                checks.fail(who, rule, max_later, "Pass causal=False.")
        self.max_later = max_later
        self.num_heads = checks.optional(checks.integer, who, "num_heads", num_heads)
        heads = () if self.num_heads is None else (self.num_heads,)
        rows = self.max_distance + 1 + self._later
        self.weight = nn.Parameter(torch.empty(rows, *heads, self.head_dim, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to zero."""
        nn.init.zeros_(self.weight)

    @classmethod
    def from_config(cls, config: dict[str, Any] | str | Path | Any, **keywords: Any) -> Self:
        """The vectors of the Hugging Face config of a w2v-BERT 2.0, SeamlessM4T v2 or SpeechT5.

        SeamlessM4T and SpeechT5 have them in the encoder of speech. SpeechT5's weight,
        ``pe_k.weight``, begins with the farthest later key: load ``weight.flip(0)``.

        Args:
            config: A dict, the path of a ``config.json`` or of a model's folder, a model's name on
                the hub, or a config object of transformers.
            **keywords: Arguments of the constructor, which override the config.

        Examples:
            >>> config = {"model_type": "wav2vec2-bert", "hidden_size": 8, "num_attention_heads": 2}
            >>> RelativeKeys.from_config(config).weight.shape
            torch.Size([73, 4])
        """
        found = configs.read_bias(config, configs.Keys)
        names = ("head_dim", "max_distance", "max_later", "causal")
        return cls(**{name: getattr(found, name) for name in names} | keywords)

    @property
    def _later(self) -> int:
        if self.causal:
            return 0
        return self.max_distance if self.max_later is None else self.max_later

    def _terms(self, q: Tensor, k: Tensor) -> Terms:
        def rows(distance: Tensor) -> Tensor:
            return self.max_distance - distance.clamp(-self._later, self.max_distance)

        return relative_terms(
            q,
            k,
            rows,
            for_queries=self.weight,
            reach=(-self._later, self.max_distance),
        )


def _encodings(
    positions: Tensor, dtype: torch.dtype, spectrum: Spectrum, concatenated: bool
) -> Tensors:
    """The encodings of distances to earlier keys."""
    return (sinusoid(positions, spectrum, dtype, concatenated=concatenated),)


class TransformerXLBias(TableModule, ProductBias):
    r"""Add the products of the query, and of two learned vectors, with key and distance.

    .. math:: \text{score}_{ij} = s\,\big((q_i + u) \cdot k_j + (q_i + v) \cdot W r_{i - j}\big)

    for the sinusoid :math:`r` of the distance, exact up to one rounding. :math:`u` and :math:`v`
    are for each head. This is the attention of Transformer-XL and XLNet, and of Conformers.

    Args:
        num_heads: Query heads ``H``, of ``E / H`` channels.
        embed_dim: Channels ``E`` of the sinusoid and of the model, even and a multiple of
            ``num_heads``.
        causal: Whether a query sees only keys up to its own.
        max_distance: The distance from which all have one sinusoid (``clamp_len``); None for none.
        base: The base of the sinusoid's frequencies.
        concatenated: Whether all sines come before all cosines, as in Transformer-XL and XLNet;
            False, where they alternate, as in Conformers.
        dtype: The dtype of the parameters, torch's default if None.

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
        who = type(self).__name__
        heads, width = checks.integer(who, "num_heads", num_heads), embed_dim
        if checks.even(who, "embed_dim", width) % heads:
            rule = f"embed_dim must be a multiple of num_heads={heads}"
            checks.fail(who, rule, width, "Pass head_dim * num_heads.")
        super().__init__(width // heads, causal=causal, dtype=dtype)
        self.num_heads, self.embed_dim = heads, width
        self.max_distance = checks.optional(checks.integer, who, "max_distance", max_distance)
        self.base = checks.base(who, base)
        self.concatenated = checks.boolean(who, "concatenated", concatenated)
        self.linear_pos = Linear(self.embed_dim, self.embed_dim, bias=False, dtype=dtype)
        shape = self.num_heads, self.head_dim
        self.pos_bias_u = nn.Parameter(torch.empty(shape, dtype=dtype))
        self.pos_bias_v = nn.Parameter(torch.empty(shape, dtype=dtype))
        parameters = Spectrum(self.embed_dim, self.base), self.concatenated
        self._tables = SharedTables(_encodings, parameters, None, torch.float32)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the projection as :class:`torch.nn.Linear` does; set both vectors to zero."""
        self.linear_pos.reset_parameters()
        nn.init.zeros_(self.pos_bias_u)
        nn.init.zeros_(self.pos_bias_v)

    @classmethod
    def from_config(cls, config: dict[str, Any] | str | Path | Any, **keywords: Any) -> Self:
        """The terms of the Hugging Face config of an XLNet, Transformer-XL or Conformer.

        Conformers are those of wav2vec 2.0, w2v-BERT, SeamlessM4T (its encoder of speech),
        FastSpeech 2 (its encoder) and Parakeet.

        Args:
            config: A dict, the path of a ``config.json`` or of a model's folder, a model's name on
                the hub, or a config object of transformers.
            **keywords: Arguments of the constructor, which override the config.

        Examples:
            >>> config = {"model_type": "xlnet", "d_model": 8, "n_head": 2}
            >>> bias = TransformerXLBias.from_config(config)
            >>> bias.embed_dim, bias.causal
            (8, False)
        """
        found = configs.read_bias(config, configs.Sinusoids)
        names = ("num_heads", "embed_dim", "causal", "max_distance", "concatenated")
        return cls(**{name: getattr(found, name) for name in names} | keywords)

    def vectors(self, k_len: int, *, dtype: torch.dtype = torch.float32) -> Tensor:
        r""":math:`W r` of each distance between ``k_len`` keys, ``(R, H, D)``, later keys first.

        If causal, they begin with distance zero.
        """
        keys = checks.integer(type(self).__name__, "k_len", k_len, least=0)
        least, most = self._ends(keys)
        distance = torch.arange(least, most + 1, device=self.pos_bias_u.device)
        tables = self._tables.read(distance, dtype, most + 1)
        (r,) = tables or self._tables.at(torch.arange(most + 1, device=distance.device), dtype)
        r = r[distance.abs()]
        if not self.causal:
            # Sines have the other sign at a later key, and cosines do not.
            channel = torch.arange(self.embed_dim, device=r.device)
            sines = channel < self.embed_dim // 2 if self.concatenated else channel % 2 == 0
            r = torch.where((distance < 0)[:, None] & sines, -r, r)
        return self.linear_pos(r).unflatten(-1, (self.num_heads, self.head_dim))  # type: ignore[no-any-return]

    def _ends(self, keys: int) -> tuple[int, int]:
        """The first and the last distance."""
        most = max(keys - 1, 0)
        most = most if self.max_distance is None else min(most, self.max_distance)
        return 0 if self.causal else -most, most

    def _terms(self, q: Tensor, k: Tensor) -> Terms:
        check_num_heads(type(self).__name__, q, self.num_heads)
        wide = torch.promote_types(q.dtype, torch.float32)
        least, most = self._ends(k.shape[2])
        with without_autocast(q):
            shifted = q.to(wide) + self.pos_bias_v.to(q.device, wide)[:, None]
        products = relative_terms(
            shifted,
            k,
            lambda distance: distance.clamp(least, most) - least,
            for_queries=self.vectors(k.shape[2], dtype=wide),
            reach=(least, most),
        )
        return products._replace(shift=self.pos_bias_u.to(q.device, wide))


def _bucket_table(positions: Tensor, dtype: torch.dtype, buckets: int, most: int) -> Tensors:
    """The buckets of the distances up to ``2 most``, either way; the farthest are all clipped."""
    # On the CPU for every device, and in float32 as published, whatever torch's default: the
    # ceiling of another logarithm may differ.
    distance = torch.arange(-2 * most, 2 * most + 1, device="cpu")
    middle = buckets // 2
    far = distance.abs().clamp(min=middle).to(torch.float32)
    log = (far / middle).log() / far.new_tensor((most - 1) / middle).log()
    large = (log * (middle - 1)).ceil().long() + middle
    bucket = torch.where(distance.abs() <= middle, distance, large * distance.sign())
    return (bucket.to(positions.device),)


class DeBERTaBias(TableModule, ProductBias):
    r"""Add the products of query and key with learned vectors for each distance.

    .. math::
        \text{score}_{ij} = \frac{1}{\sqrt{3D}}
        \big(q_i \cdot k_j + q_i \cdot K_{\delta(i - j)} + k_j \cdot Q_{\delta(i - j)}\big)

    with :math:`\delta` clipped, or also in buckets that widen with the logarithm, as in DeBERTa v2
    and v3. **The scale is for three terms**: :meth:`attention` has it unless the call names
    another. On CUDA the attention's kernel computes the products.

    Args:
        num_heads: Query heads ``H``.
        head_dim: Channels ``D`` of a head.
        max_relative_positions: Distances are from minus this to one less than this; with buckets,
            the distance at which these end.
        position_buckets: Buckets of earlier keys, and of later ones, even; None for none (-1 in
            configs).
        causal: Whether a query sees only keys up to its own: False for DeBERTa itself.
        dtype: The dtype of the parameters, torch's default if None.

    Attributes:
        pos_key: :math:`K`, a Parameter of shape ``(R, num_heads, head_dim)``, later keys first,
            ``R`` is ``2 * position_buckets``, or ``2 * max_relative_positions``; zero at the start.
        pos_query: :math:`Q`, in the same way.

    Examples:
        >>> bias = DeBERTaBias(num_heads=12, head_dim=64, position_buckets=256, causal=False)
        >>> q, k, v = torch.randn(3, 1, 12, 512, 64).unbind()
        >>> bias.attention(q, k, v).shape
        torch.Size([1, 12, 512, 64])

    References:
        He et al., *DeBERTa: Decoding-enhanced BERT with Disentangled Attention*, 2021, section 3.1;
        He et al., *DeBERTaV3*, 2023.
    """

    def __init__(
        self,
        num_heads: int,
        *,
        head_dim: int,
        max_relative_positions: int = 512,
        position_buckets: int | None = None,
        causal: bool,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(head_dim, causal=causal, dtype=dtype)
        who = type(self).__name__
        self.num_heads = checks.integer(who, "num_heads", num_heads)
        name = "max_relative_positions"
        self.max_relative_positions = checks.integer(who, name, max_relative_positions)
        self._span, self._tables = self.max_relative_positions, None
        if position_buckets is not None:
            span = checks.integer(who, "position_buckets", position_buckets, least=2)
            if span % 2:
                rule = "position_buckets must be even, because half of them are single distances"
                checks.fail(who, rule, span, f"Pass {span + 1}.")
            if not self.max_relative_positions - 1 > span // 2:
                rule = f"max_relative_positions must be above {span // 2 + 1}, to need buckets"
                got = self.max_relative_positions
                checks.fail(who, rule, got, "Pass position_buckets=None.")
            self._span = position_buckets = span
            parameters = span, self.max_relative_positions
            self._tables = SharedTables(_bucket_table, parameters, 1, torch.int64)
        self.position_buckets = position_buckets
        shape = 2 * self._span, self.num_heads, self.head_dim
        self.pos_key = nn.Parameter(torch.empty(shape, dtype=dtype))
        self.pos_query = nn.Parameter(torch.empty(shape, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set both to zero."""
        nn.init.zeros_(self.pos_key)
        nn.init.zeros_(self.pos_query)

    @classmethod
    def from_config(cls, config: dict[str, Any] | str | Path | Any, **keywords: Any) -> Self:
        """The vectors of the Hugging Face config of a DeBERTa, v1 to v3.

        Args:
            config: A dict, the path of a ``config.json`` or of a model's folder, a model's name on
                the hub, or a config object of transformers.
            **keywords: Arguments of the constructor, which override the config.

        Examples:
            >>> config = {"model_type": "deberta-v2", "hidden_size": 8, "num_attention_heads": 2}
            >>> config |= {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
            >>> DeBERTaBias.from_config({**config, "position_buckets": 256}).pos_key.shape
            torch.Size([512, 2, 4])
        """
        found = configs.read_bias(config, configs.Disentangled)
        names = ("num_heads", "head_dim", "max_relative_positions", "position_buckets", "causal")
        return cls(**{name: getattr(found, name) for name in names} | keywords)

    def distance_rows(self, distance: Tensor) -> Tensor:
        """The row of the vectors for each distance ``i - j``, an int64 tensor, as the rows are."""
        if self._tables is not None:
            like = torch.empty(0, device=distance.device)
            (buckets,) = self._tables.read(like, torch.int64) or self._tables.at(like)
            far = 2 * self.max_relative_positions
            distance = buckets[distance.clamp(-far, far) + far]
        return (distance + self._span).clamp(0, 2 * self._span - 1)

    def _terms(self, q: Tensor, k: Tensor) -> Terms:
        check_num_heads(type(self).__name__, q, self.num_heads)
        far = self.max_relative_positions
        return relative_terms(
            q,
            k,
            self.distance_rows,
            for_queries=self.pos_key,
            for_keys=self.pos_query,
            reach=(-far, far),
        )

    def _default_scale(self) -> float:
        return (3 * self.head_dim) ** -0.5  # type: ignore[no-any-return]


class CoPE(ProductBias):
    r"""Add the product of the query with the embedding of a position that gates count.

    .. math::
        p_{ij} = \min\Big(\sum_{l=j}^{i} \sigma(s\, q_i \cdot k_l),\ P - 1\Big), \qquad
        \text{bias}_{ij} = q_i \cdot e[p_{ij}]

    for :math:`P` whole positions; between two of them :math:`q_i \cdot e` is interpolated. The
    gates are those of the scaled scores with ``attn_mask``, as in the authors' code: a key that the
    mask hides is not counted. Attention is causal. On CUDA it is one kernel for up to 256
    positions; elsewhere, and with a mask, it goes a few queries at a time.

    Args:
        head_dim: Channels ``D`` of a head.
        max_pos: Positions :math:`P`.
        dtype: The dtype of the parameter, torch's default if None.

    Attributes:
        pos_emb: Parameter of shape ``(1, head_dim, max_pos)``, shared by the heads; zero at the
            start.

    Examples:
        >>> cope = CoPE(head_dim=64, max_pos=32)
        >>> q, k, v = torch.randn(3, 1, 8, 100, 64).unbind()
        >>> cope.attention(q, k, v).shape
        torch.Size([1, 8, 100, 64])

    References:
        Golovneva et al., *Contextual Position Encoding: Learning to Count What's Important*, 2024.
    """

    def __init__(self, head_dim: int, *, max_pos: int, dtype: torch.dtype | None = None) -> None:
        super().__init__(head_dim, causal=True, dtype=dtype)
        self.max_pos = checks.integer(type(self).__name__, "max_pos", max_pos)
        self.pos_emb = nn.Parameter(torch.empty(1, self.head_dim, self.max_pos, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the embeddings to zero."""
        nn.init.zeros_(self.pos_emb)

    def _terms(self, q: Tensor, k: Tensor) -> Terms:
        wide = torch.promote_types(q.dtype, torch.float32)
        with without_autocast(q):
            return CopeLevels(q, k, q.to(wide) @ self.pos_emb.to(wide))
