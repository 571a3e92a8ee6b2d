"""The tensors of a paged cache: made, copied by pages, and their keys shifted."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from posenc._contract import checks
from posenc.kernels import LARGEST, Store
from posenc.kernels.reference_cache import store

Shift: TypeAlias = Callable[[Tensor, int], Tensor]


class Memory:
    """Keys, values and scales of all layers; see `PagedCache`."""

    def __init__(
        self,
        who: str,
        shape: tuple[int, int, int, int],
        widths: tuple[int, int],
        *,
        dtype: torch.dtype,
        scales: bool,
        cache_layout: str,
        joined: bool,
        device: torch.device | str | None,
    ) -> None:
        if dtype not in checks.FLOAT_DTYPES and dtype not in LARGEST:
            rule = "dtype must be that of a model, float8_e4m3fn, float8_e5m2 or int8"
            checks.fail(who, rule, dtype, "Pass torch.bfloat16, say.", TypeError)
        if checks.boolean(who, "scales", scales) and dtype not in LARGEST:
            way_out = "Leave scales out: such rows are stored as they are."
            checks.fail(who, "scales need a dtype of 8 bits", dtype, way_out)
        if cache_layout not in ("NHD", "HND"):
            way_out = "NHD is (pages, page, heads, D), and HND is (pages, heads, page, D)."
            checks.fail(who, 'cache_layout must be "NHD" or "HND"', repr(cache_layout), way_out)
        self._nhd = cache_layout == "NHD"
        layers, pages, page, heads = shape
        rows = (page, heads) if self._nhd else (heads, page)

        # Zeros, because NaN would pass through a mask: its weight is zero, and 0 * NaN is NaN.
        def zeros(*width: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(layers, pages, *rows, *width, dtype=dtype, device=device)

        k_width, v_width = widths
        self.kv = zeros(v_width + k_width) if checks.boolean(who, "joined", joined) else None
        self.k = zeros(k_width) if self.kv is None else self.kv[..., v_width:]
        self.v = zeros(v_width) if self.kv is None else self.kv[..., :v_width]
        self.k_scales = zeros(dtype=torch.float32) if scales else None
        self.v_scales = zeros(dtype=torch.float32) if scales else None

    def copy(self, old: list[int], new: list[int], tokens: int | None = None) -> None:
        """Copy the first ``tokens``, or all, of the pages ``old`` of all layers to ``new``."""
        if old:
            for x in self._all():
                x[:, new, :tokens] = x[:, old, :tokens]

    @torch.no_grad()
    def shift(self, who: str, slots: Tensor, by: int, shift: Shift) -> None:
        """Replace keys by ``shift(keys, by)``; if that fails for the first layer, none is."""
        all_scales = [None] * len(self.k) if self.k_scales is None else self._heads(self.k_scales)
        slots = slots.unsqueeze(0)
        for k, scales in zip(self._heads(self.k), all_scales, strict=True):
            at = slots // k.shape[2], slice(None), slots % k.shape[2]
            keys = _bytes(k)[at].transpose(1, 2)  # [1, H, T, D]
            if k.dtype in LARGEST:
                keys = keys.view(k.dtype).float()
            if scales is not None:
                keys = keys * scales[at].transpose(1, 2).unsqueeze(-1)
            moved = shift(keys, by)
            if moved.shape != keys.shape or moved.dtype != keys.dtype:
                rule, got = f"shift must return {checks.describe(keys)}", checks.describe(moved)
                checks.fail(who, rule, got, "Pass rope.shift, say.")
            store(Store(k, None, scales), moved, slots, ...)

    def _all(self) -> list[Tensor]:
        """All memory, ``[layers, pages, page, heads]`` and channels."""
        memory = [self.k, self.v] if self.kv is None else [self.kv]
        found = [x for x in (*memory, self.k_scales, self.v_scales) if x is not None]
        return [self._tokens(_bytes(x)) for x in found]

    def _tokens(self, x: Tensor) -> Tensor:
        """``x`` with tokens before heads."""
        return x if self._nhd else x.transpose(2, 3)

    def _heads(self, x: Tensor) -> Tensor:
        """``x`` with heads before tokens."""
        return x.transpose(2, 3) if self._nhd else x


def _bytes(x: Tensor) -> Tensor:
    # Not every device can index float8.
    return x.view(torch.uint8) if x.dtype in LARGEST else x
