"""Biases that are a number for each head and distance: T5, learned, KERPLE, Sandwich and FIRE."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from posenc import configs
from posenc._contract import checks
from posenc._contract.tracing import is_exporting, is_readable, without_autocast
from posenc.functional.distance_biases import check_buckets, t5_buckets
from posenc.nn._bias import RelativeBias
from posenc.nn._module import Linear, load_scalars
from posenc.nn._tables import SharedTables, TableModule, Tensors
from posenc.numerics.frequencies import Spectrum
from posenc.numerics.tables import angles, float64_device, round_once, widest
from posenc.ops.attention.biases import DistanceTable, FireNetwork
from posenc.ops.attention.biases.fire import network_rows

if TYPE_CHECKING:
    from typing_extensions import Self


def _bucket_table(
    positions: Tensor, dtype: torch.dtype, num_buckets: int, max_distance: int, causal: bool
) -> Tensors:
    """The buckets of all distances up to ``max_distance``; they have no positions."""
    # On the CPU for every device: the floor of another logarithm may differ.
    first = 0 if causal else -max_distance
    distance = torch.arange(first, max_distance + 1, device="cpu")
    buckets = t5_buckets(distance, num_buckets, max_distance, causal=causal)
    return (buckets.to(positions.device),)


class T5Bias(TableModule, RelativeBias):
    r"""Add a learned number for each head and bucket of distances.

    .. math:: \text{bias}_{h,i,j} = w_{\text{bucket}(i - j),\,h}

    :func:`posenc.functional.t5_buckets` gives the buckets. This is the bias of T5, mT5 and UMT5.
    **T5 does not scale scores**: :meth:`from_config` makes a module of ``scale=1.0``.

    Args:
        num_heads: Query heads ``H``.
        num_buckets: Buckets, half of them for later keys unless causal.
        max_distance: The distance from which all are in the last bucket.
        causal: Whether a query sees only keys up to its own: True for a decoder, False for an
            encoder.
        scale: The factor of the scores unless a call names another; one over the root of the
            width if None. T5, mT5 and UMT5 have 1.0.
        dtype: The dtype of the parameter, torch's default if None.

    Attributes:
        weight: Parameter of shape ``(num_buckets, num_heads)``, zero at the start. A T5 checkpoint
            has it as ``relative_attention_bias.weight``, of the first layer only.

    Examples:
        >>> bias = T5Bias(num_heads=8, causal=False)
        >>> q, k, v = torch.randn(3, 1, 8, 512, 64).unbind()
        >>> bias.attention(q, k, v).shape
        torch.Size([1, 8, 512, 64])
        >>> bias.table(512).shape  # distances -128 to 128
        torch.Size([8, 257])

    References:
        Raffel et al., *Exploring the Limits of Transfer Learning*, 2020, section 2.1.
    """

    def __init__(
        self,
        num_heads: int,
        *,
        num_buckets: int = 32,
        max_distance: int = 128,
        causal: bool,
        scale: float | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_heads, causal=causal, dtype=dtype)
        self.scale = checks.optional(checks.positive_float, type(self).__name__, "scale", scale)
        check_buckets(type(self).__name__, num_buckets, max_distance, causal=causal)
        self.num_buckets, self.max_distance = num_buckets, max_distance
        parameters = self.num_buckets, self.max_distance, self.causal
        self._tables = SharedTables(_bucket_table, parameters, 1, torch.int64)
        self.weight = nn.Parameter(torch.empty(num_buckets, self.num_heads, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to zero."""
        nn.init.zeros_(self.weight)

    @classmethod
    def from_config(
        cls, config: dict[str, Any] | str | Path | Any, *, causal: bool, **keywords: Any
    ) -> Self:
        """The bias that the Hugging Face config of a T5, mT5 or UMT5 describes.

        Its scores are not scaled. MPNet's are: pass ``scale=None``.

        Args:
            config: A dict, the path of a ``config.json`` or of a model's folder, a model's name on
                the hub, or a config object of transformers.
            causal: True for the decoder, False for the encoder.
            **keywords: Arguments of the constructor, which override the config.

        Examples:
            >>> T5Bias.from_config({"model_type": "t5", "num_heads": 6}, causal=True)
            T5Bias(num_heads=6, causal=True, scale=1)
        """
        buckets = configs.read_bias(config, configs.Buckets)
        names = ("num_heads", "num_buckets", "max_distance")
        arguments = {name: getattr(buckets, name) for name in names} | {"scale": 1.0} | keywords
        return cls(causal=causal, **arguments)

    def _default_scale(self) -> float | None:
        scale: float | None = self.scale
        return scale

    def _as_bias(self, keys: int, dtype: torch.dtype, device: torch.device) -> DistanceTable:
        like = self.weight.detach()
        (buckets,) = self._tables.read(like, torch.int64) or self._tables.at(like)
        # The gradient of indexing may depend on the order of threads.
        values = nn.functional.embedding(buckets, self.weight.to(dtype)).T
        return DistanceTable(values, 0 if self.causal else self.max_distance)


class LearnedBias(RelativeBias):
    r"""Add a learned number for each head and distance, clipped at ``max_distance``.

    .. math:: \text{bias}_{h,i,j} = w_{h,\,\text{clip}(i - j)}

    Args:
        num_heads: Query heads ``H``.
        max_distance: The last distance with a number of its own; farther keys share it.
        causal: Whether a query sees only keys up to its own. Otherwise later keys have numbers of
            their own, which come first.
        dtype: The dtype of the parameter, torch's default if None.

    Attributes:
        weight: Parameter of shape ``(num_heads, max_distance + 1)``, or
            ``(num_heads, 2 * max_distance + 1)`` if not causal; zero at the start.

    Examples:
        >>> bias = LearnedBias(num_heads=8, max_distance=100)
        >>> q, k, v = torch.randn(3, 1, 8, 512, 64).unbind()
        >>> bias.attention(q, k, v).shape
        torch.Size([1, 8, 512, 64])

    References:
        Shaw et al., *Self-Attention with Relative Position Representations*, 2018, for the clipped
        distance; Raffel et al., 2020, for numbers instead of vectors.
    """

    def __init__(
        self,
        num_heads: int,
        *,
        max_distance: int,
        causal: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_heads, causal=causal, dtype=dtype)
        who = type(self).__name__
        self.max_distance = checks.integer(who, "max_distance", max_distance, least=0)
        columns = (1 if causal else 2) * self.max_distance + 1
        self.weight = nn.Parameter(torch.empty(self.num_heads, columns, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to zero."""
        nn.init.zeros_(self.weight)

    def _as_bias(self, keys: int, dtype: torch.dtype, device: torch.device) -> DistanceTable:
        return DistanceTable(self.weight.to(dtype), 0 if self.causal else self.max_distance)


class KERPLE(RelativeBias):
    r"""Lower each score by a learned logarithm or power of the distance.

    .. math:: -r_1 \ln(1 + r_2\,|i - j|) \qquad\text{or}\qquad -r_1\,|i - j|^{r_2}

    with :math:`r_1, r_2 > 0` of each head, and :math:`r_2 \le 2` for the power. They stay there
    by construction, while the authors' code clips them: :math:`r = e^{\text{raw}}`, and
    :math:`r_2 = 2\sigma(\text{raw})` for the power. The bias is computed in float64.

    Args:
        num_heads: Query heads ``H``.
        kind: ``log`` or ``power``.
        causal: Whether a query sees only keys up to its own.
        dtype: The dtype of the parameters, torch's default if None.

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

    def _as_bias(self, keys: int, dtype: torch.dtype, device: torch.device) -> DistanceTable:
        distance, zero = self._distances(keys, device)
        r1, r2 = self.r1[:, None], self.r2[:, None]
        far = distance.abs().to(r1.dtype)
        if self.kind == "log":
            decay = (r2 * far).log1p()
        else:
            # The power of zero would have no second derivative.
            decay = torch.where(far > 0, (r2 * far.clamp(min=1).log()).exp(), 0.0)
        return DistanceTable((-r1 * decay).to(dtype), zero)


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
        num_heads: Query heads ``H``.
        dim: Channels ``d`` of the sinusoid, even, whatever the model's width.
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
        super().__init__(num_heads, causal=causal)
        self.dim = checks.even(type(self).__name__, "dim", dim)
        self._tables = SharedTables(_products, (self.dim,), None, torch.float64)

    def _as_bias(self, keys: int, dtype: torch.dtype, device: torch.device) -> DistanceTable:
        distance, zero = self._distances(keys, device)
        tables = self._tables.read(distance, torch.float64, max(keys, 1))
        (products,) = tables or self._tables.at(distance[zero:])
        ratio = torch.arange(1, self.num_heads + 1, device=products.device).to(products.dtype)
        values = products[distance.abs()] * (self.num_heads / (8 * ratio))[:, None]
        return DistanceTable(round_once(values, dtype), zero)

    def _device(self) -> torch.device:
        device: torch.device = self._tables.real_device
        return device


class FIRE(RelativeBias):
    r"""Add a learned function of the distance, measured against the query's position.

    .. math::
        \text{bias}_{h,i,j} = f_h\!\left(\frac{\psi(i - j)}{\psi(\max(L, i))}\right), \qquad
        \psi(x) = \ln(|c|\,x + 1)

    :math:`f` is a network with one hidden layer and ReLU, and :math:`i` counts from the beginning
    of the query's document. If no query is past :math:`L`, the bias is a table of distances;
    otherwise each query has a scale of its own. On CUDA the attention's kernel computes :math:`f`
    if ``hidden`` is at most 64.

    Args:
        num_heads: Query heads ``H``.
        hidden: Width of the hidden layer.
        causal: Whether a query sees only keys up to its own; otherwise the distance is absolute.
        init_c: :math:`c` at the start.
        threshold: :math:`L` at the start, below the trained length: up to it nothing is rescaled.
        learn_threshold: Whether :math:`L` is learned, as a factor. Then attention on a GPU
            uses no table, because reading :math:`L` would synchronise. With False it uses a table,
            which is faster, for up to ``threshold + 1`` keys.
        dtype: The dtype of the parameters, torch's default if None.

    Attributes:
        mlp: :math:`f`, from one number to ``num_heads``.
        c: Parameter of shape ``(1,)``; a checkpoint may have it as ``()``.
        L_multiplier: Parameter of shape ``(1,)`` if learned; :math:`L` is its absolute value times
            ``threshold``.

    Examples:
        >>> bias = FIRE(num_heads=8)
        >>> q, k, v = torch.randn(3, 1, 8, 700, 64).unbind()
        >>> bias.attention(q, k, v).shape
        torch.Size([1, 8, 700, 64])

    References:
        Li et al., *Functional Interpolation for Relative Positions Improves Long Context
        Transformers*, 2024, section 3.
    """

    def __init__(
        self,
        num_heads: int,
        *,
        hidden: int = 32,
        causal: bool = True,
        init_c: float = 0.1,
        threshold: float = 512.0,
        learn_threshold: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_heads, causal=causal, dtype=dtype)
        who = type(self).__name__
        self.hidden = checks.integer(who, "hidden", hidden)
        self.threshold = checks.positive_float(who, "threshold", threshold)
        self.learn_threshold = checks.boolean(who, "learn_threshold", learn_threshold)
        self.init_c = checks.positive_float(who, "init_c", init_c)
        self.mlp = nn.Sequential(
            Linear(1, self.hidden, dtype=dtype),
            nn.ReLU(),
            Linear(self.hidden, self.num_heads, dtype=dtype),
        )
        self.c = nn.Parameter(torch.empty(1, dtype=dtype))
        if learn_threshold:
            self.L_multiplier = nn.Parameter(torch.empty(1, dtype=dtype))
        self.register_load_state_dict_pre_hook(load_scalars)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the network as :class:`torch.nn.Linear` does, and set the other numbers."""
        for layer in (self.mlp[0], self.mlp[2]):
            layer.reset_parameters()  # type: ignore[operator]
        nn.init.constant_(self.c, self.init_c)
        if self.learn_threshold:
            nn.init.ones_(self.L_multiplier)

    def _as_bias(
        self, keys: int, dtype: torch.dtype, device: torch.device
    ) -> DistanceTable | FireNetwork:
        if self._is_table(keys):
            network = self._network(widest(device))
            distance, zero = self._distances(keys, device)
            with without_autocast(self.c):
                # No query is past the threshold, so that one at zero stands for all.
                values = network_rows(network, None, distance.new_zeros((1, 1)), distance)
            return DistanceTable(values[0, :, 0].to(dtype), zero)
        return self._network(dtype)

    def _network(self, dtype: torch.dtype) -> FireNetwork:
        like: Any = {"dtype": dtype, "device": self.c.device}
        with without_autocast(self.c):
            # By calls of the layers, which may have hooks.
            units = self.mlp[0](torch.arange(2, **like)[:, None])
            outputs = self.mlp[2](torch.eye(1 + self.hidden, **like)[:, 1:])
        return FireNetwork(*self._scales(dtype), units, outputs)

    def _is_table(self, keys: int) -> bool:
        if not self.learn_threshold:
            # An exported program takes other lengths, and does not see the test.
            return not is_exporting() and keys - 1 <= self.threshold
        factor = self.L_multiplier.detach()
        return is_readable(factor) and keys - 1 <= abs(factor.item()) * self.threshold

    def _scales(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """:math:`c` and :math:`L`, with their signs, ``(1,)`` each."""
        c = self.c.to(dtype)
        if self.learn_threshold:
            # In the wider dtype: half precision would round the product.
            return c, self.L_multiplier.to(dtype) * self.threshold
        return c, torch.full_like(c, self.threshold, requires_grad=False)
