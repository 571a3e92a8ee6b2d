"""T5's bias: a learned number for each bucket of distances."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from posenc import configs
from posenc._contract import checks
from posenc.attention.biases import DistanceTable
from posenc.functional.t5 import check_buckets, t5_buckets
from posenc.nn._bias import RelativeBias
from posenc.nn._tables import SharedTables, TableModule, Tensors

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
        num_heads: Heads ``H``.
        num_buckets: Buckets, half of them for later keys unless causal.
        max_distance: The distance from which all are in the last bucket.
        causal: Whether a query sees only keys up to its own: True for a decoder, False for an
            encoder.
        scale: The factor of the scores unless a call names another; one over the root of the
            width if None. T5, mT5 and UMT5 have 1.0.
        dtype: The dtype of the parameter, torch's default if None. The bias is made in float32.

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
        how = self.num_buckets, self.max_distance, self.causal
        self._tables = SharedTables(_bucket_table, how, 1, torch.int64)
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
            config: A dict, the path of a ``config.json`` or of a model's folder, or a config
                object of transformers.
            causal: True for the decoder, False for the encoder.
            **keywords: Arguments of the constructor, which override the config.

        Examples:
            >>> T5Bias.from_config({"model_type": "t5", "num_heads": 6}, causal=True)
            T5Bias(num_heads=6, causal=True, scale=1)
        """
        found = configs.read_buckets(config)
        names = ("num_heads", "num_buckets", "max_distance")
        given = {name: getattr(found, name) for name in names} | {"scale": 1.0} | keywords
        return cls(causal=causal, **given)

    def _as_bias(
        self, keys: int, dtype: torch.dtype, ids: Tensor | None, device: torch.device
    ) -> DistanceTable:
        like = self.weight.detach()
        (buckets,) = self._tables.read(like, torch.int64) or self._tables.at(like)
        # The gradient of indexing may depend on the order of threads.
        values = nn.functional.embedding(buckets, self.weight.to(dtype)).T
        return DistanceTable(values, 0 if self.causal else self.max_distance)
