"""Rotary position embedding (RoPE) of queries and keys, and that of each layer of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posenc import configs
from posenc._contract import checks
from posenc.functional import rotary
from posenc.functional._positions import offset_by_position
from posenc.functional.rotary import check_heads, native_rows, swap_heads
from posenc.functional.serving import (
    CacheOptions,
    as_batch,
    as_given,
    cache_rows,
    check_write,
    try_native_cache,
)
from posenc.nn._module import with_offset
from posenc.nn._rotary import (
    RotatedKeys,
    check_axes,
    check_inv_freq,
    check_scaling,
    check_width,
)
from posenc.numerics.axes import Axes
from posenc.numerics.frequencies import Spectrum
from posenc.numerics.scaling import Rule
from posenc.ops import Spec, TableRows
from posenc.ops.rotation.rotation import rotate_op, rotate_qk_in_place_op, rotate_qk_op
from posenc.ops.rotation.spec import TOKENS_FIRST, WIDTH


class RoPE(RotatedKeys):
    """Rotate queries and keys of ``(B, H, L, D)``, by tables shared between equal modules.

    Args:
        head_dim: Channels ``D`` of a head, even.
        max_seq_len: Positions are ``0 .. max_seq_len - 1``. None for no limit: the tables then
            grow as longer sequences come.
        base: Raising it slows every pair but the first.
        interleaved: Pairs are ``(0, 1), (2, 3), ...`` if true, ``(0, D/2), (1, D/2 + 1), ...``
            if false, as most checkpoints on the Hugging Face hub have them.
        interleaved_out: Pairs of the result, if they are to differ (DeepSeek-V3).
        rotary_dim: Channels of each head that are rotated, even; all if None.
        last: Rotate the last ``rotary_dim`` channels instead of the first.
        scaling: A rule of `posenc.scaling`, for sequences longer than those trained on; or the
            dict that a config publishes as ``rope_scaling`` or ``rope_parameters``.
        axes: An arrangement of `posenc.axes`, for positions with several coordinates.
        inv_freq: The rate of each pair in radians per position, instead of those of ``base``; with
            ``Axial(A)`` those of one coordinate, which all share. Kept as a tuple of floats.
        seq_dim: The dimension of the tokens: -2, or 1 for tensors of ``(B, L, H, D)``.

    Examples:
        >>> import torch
        >>> rope = RoPE(head_dim=64)
        >>> q, k = torch.randn(2, 8, 16, 64), torch.randn(2, 2, 16, 64)
        >>> rotated_q, rotated_k = rope.apply(q, k, offset=100)
        >>> rotated_q.shape, rotated_k.shape
        (torch.Size([2, 8, 16, 64]), torch.Size([2, 2, 16, 64]))

    References:
        Su et al., *RoFormer*, 2021.
    """

    def __init__(
        self,
        head_dim: int,
        max_seq_len: int | None = 2048,
        base: float = 10_000.0,
        *,
        interleaved: bool = True,
        interleaved_out: bool | None = None,
        rotary_dim: int | None = None,
        last: bool = False,
        scaling: Rule | Mapping[str, Any] | str | None = None,
        axes: Axes | None = None,
        inv_freq: Sequence[float] | Tensor | None = None,
        seq_dim: int = -2,
    ) -> None:
        super().__init__()
        who = type(self).__name__
        self.head_dim = checks.even(who, "head_dim", head_dim)
        self.max_seq_len = checks.optional(checks.integer, who, "max_seq_len", max_seq_len)
        self.base = checks.base(who, base)
        self.interleaved = checks.boolean(who, "interleaved", interleaved)
        out = checks.optional(checks.boolean, who, "interleaved_out", interleaved_out)
        self.interleaved_out = out
        self.rotary_dim = checks.optional(checks.even, who, "rotary_dim", rotary_dim)
        self.last = checks.boolean(who, "last", last)
        self.scaling = check_scaling(who, scaling, self.base)
        self.axes = check_axes(who, axes)
        self.seq_dim = rotary.check_seq_dim(who, seq_dim)
        width = check_width(who, self.head_dim, self.rotary_dim, axes)
        self.inv_freq = check_inv_freq(who, inv_freq, self.base, width, axes)
        first_channel = self.head_dim - width if last else 0
        self._spec = Spec(interleaved, interleaved if out is None else out, first_channel)
        self._layout = self._spec.bits() + WIDTH * head_dim
        self._layout += TOKENS_FIRST if self.seq_dim in (1, -3) else 0
        # Calls with more than a table and rows: other angles.
        changes = self.scaling is not None and self.scaling.trained_length() is not None
        self._is_special = changes or axes is not None
        # Rotated keys are in the layout of the output.
        self._set_angles(
            Spectrum(width, self.base, self.scaling, axes, self.inv_freq),
            self.max_seq_len,
            self.head_dim,
            self._spec._replace(interleaved=self._spec.interleaved_out),
        )

    @classmethod
    def from_config(
        cls,
        config: dict[str, Any] | str | Path | Any,
        *,
        layer_type: str | None = None,
        **keywords: Any,
    ) -> RoPE:
        """The rotation of a model, from its Hugging Face config.

        A key that is not understood, that the named rule does not use, or that contradicts another,
        is an error that names it; null, and factors of one, change nothing. `posenc explain
        config.json` shows the key that each value was read from.

        Args:
            config: A dict, a transformers config, the path of a ``config.json`` or its folder; or a
                transformer of diffusers, or its config, for the rotation of its images. Images
                need ``position_ids``, which the config of a vision model does not hold: `posenc
                explain` prints those of DINOv3. Or a model's name on the hub, ``"org/name"`` or
                ``"org/name@revision"``, of which only the config is downloaded (``pip install
                'posenc[hub]'``).
            layer_type: ``"sliding_attention"``, for example, if the model's layers rotate
                differently.
            **keywords: Arguments of the constructor, which override the config.

        Returns:
            A module without a ``max_seq_len``, unless one is given.

        Examples:
            >>> config = {"hidden_size": 4096, "num_attention_heads": 32, "rope_theta": 5e5}
            >>> rope = RoPE.from_config(config)
            >>> rope.head_dim, rope.base
            (128, 500000.0)
        """
        recipe = configs.read(config, layer_type=layer_type, base=keywords.get("base"))
        return cls(**{"max_seq_len": None, **recipe.arguments(), **keywords})

    def apply(
        self,
        q: Any,
        k: Any = None,
        offset: int | Tensor = 0,
        *,
        position_ids: Tensor | None = None,
        seq_len: int | Tensor | None = None,
    ) -> Any:
        """Rotate queries and keys; the same as calling the module."""
        if k is None and callable(q):
            # nn.Module.apply of a parent module calls this with a function.
            return super().apply(q)
        return self(q, k, offset=offset, position_ids=position_ids, seq_len=seq_len)

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
        """Rotate queries and keys.

        Args:
            q: Queries ``(B, H, L, D)``.
            k: Keys ``(B, H', L, D)``; the head count may differ from that of ``q``.
            offset: Position of the first token, which is the number of cached tokens; an int, or
                an integer tensor ``(B,)`` with one for each sequence. It may come without its name,
                except a tensor that could be positions, because there are as many tokens.
            position_ids: Integers of shape ``(L,)`` or ``(B, L)``, instead of ``offset``; with
                several axes ``(L,)``, ``(A, L)`` or ``(A, B, L)``, which may be negative. ``Axial``
                needs them. Floating positions may be fractional or negative.
            seq_len: Length of the sequence, cached tokens included, for a rule that depends on
                it; an int, or an integer tensor ``(B,)``. If None, the last position plus one.

        Returns:
            New tensors with the shapes and dtypes of ``q`` and ``k``.
        """
        if given:
            # Decoding passes an int at every call: skip the checks.
            if len(given) == 1 and type(given[0]) is type(offset) is int and not offset:
                offset = given[0]
            else:
                offset = offset_by_position(type(self).__name__, given, offset, q, self.seq_dim)
        arguments = self._native_arguments(q, k, offset, position_ids, seq_len)
        if arguments is not None:
            rotated = rotate_qk_op.try_native(q, k, *arguments)
            if rotated is not None:
                return rotated  # type: ignore[no-any-return]
        who = type(self).__name__
        a, b = self._rotate(who, "qk", [q, k], offset, position_ids, seq_len)
        return a, b

    @with_offset
    def forward_(
        self,
        q: Tensor,
        k: Tensor,
        *given: int | Tensor,
        offset: int | Tensor = 0,
        position_ids: Tensor | None = None,
        seq_len: int | Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys in place, and return them; arguments as :meth:`forward`.

        Examples:
            >>> import torch
            >>> rope, q, k = RoPE(8), torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8)
            >>> expected = rope(q, k, offset=5)
            >>> _ = rope.forward_(q, k, offset=5)
            >>> torch.equal(q, expected[0])
            True
        """
        if given:
            who = f"{type(self).__name__}.forward_"
            offset = offset_by_position(who, given, offset, q, self.seq_dim)
        arguments = self._native_arguments(q, k, offset, position_ids, seq_len)
        if arguments is None or not rotate_qk_in_place_op.try_native(q, k, *arguments):
            where = offset, position_ids, seq_len
            self._rotate(f"{type(self).__name__}.forward_", "qk", [q, k], *where, in_place=True)
        return q, k

    @with_offset
    def rotate_queries_with_cached_keys(
        self,
        q: Tensor,
        k: Tensor,
        *given: int | Tensor,
        offset: int | Tensor = 0,
        position_ids: Tensor | None = None,
        seq_len: int | Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Rotate all keys of a cache that holds them unrotated, and queries as its last tokens.

        ``offset``, ``position_ids`` and ``seq_len`` are those of the keys. A cache of rotated keys
        needs no more than :meth:`forward` of the new queries and keys.

        Examples:
            >>> import torch
            >>> rope, q, k = RoPE(8), torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8)
            >>> last, keys = rope.rotate_queries_with_cached_keys(q[:, :, 5:], k)
            >>> torch.equal(last, rope(q, k)[0][:, :, 5:])
            True
        """
        who, seq_dim = f"{type(self).__name__}.rotate_queries_with_cached_keys", self.seq_dim
        if given:
            offset = offset_by_position(who, given, offset, k, seq_dim)
        check_heads(who, "q", [q], self.head_dim, seq_dim)
        check_heads(who, "k", [k], self.head_dim, seq_dim)
        as_many = k.narrow(seq_dim, 0, min(q.shape[seq_dim], k.shape[seq_dim]))
        check_heads(who, "qk", [q, as_many], self.head_dim, seq_dim)
        q, k = swap_heads([q, k], seq_dim)
        ahead, limit, spec = k.shape[2] - q.shape[2], self._angles.limit, self._spec

        def run(cos: Tensor, sin: Tensor, rows: TableRows) -> list[Tensor]:
            last = TableRows(rows.start + ahead)
            if rows.positions is not None:
                ids = rows.positions
                last = TableRows(0, ids + ahead if rows.is_sequential() else ids[:, ahead:])
            queries = rotary.rotate_rows(who, limit, [q], cos, sin, last, spec)
            return queries + rotary.rotate_rows(who, limit, [k], cos, sin, rows, spec)

        ys = self._by_tables(who, [k, q], offset, position_ids, seq_len, run)
        a, b = swap_heads(ys, seq_dim)
        return a, b

    @with_offset
    def rotate_and_cache(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        *given: int | Tensor,
        offset: int | Tensor = 0,
        position_ids: Tensor | None = None,
        seq_len: int | Tensor | None = None,
        q_weight: Tensor | None = None,
        k_weight: Tensor | None = None,
        eps: float = 1e-6,
        zero_centered: bool = False,
        k_scale: Tensor | float | None = None,
        v_scale: Tensor | float | None = None,
        k_scale_cache: Tensor | None = None,
        v_scale_cache: Tensor | None = None,
        cache_layout: str = "NHD",
    ) -> Tensor:
        """Rotate queries into a new tensor, and keys, with values, into a cache.

        Arguments are those of :func:`posenc.functional.rotate_and_cache`, with ``offset``,
        ``position_ids`` and ``seq_len`` as in :meth:`forward`. Tokens ``(T, H, D)`` need
        ``position_ids``, and for a rule that depends on the length ``seq_len``.

        Examples:
            >>> import torch
            >>> rope, (q, k, v) = RoPE(8), torch.randn(3, 1, 2, 4, 8)
            >>> k_cache, v_cache = torch.zeros(2, 3, 16, 2, 8)  # 3 pages of 16 tokens
            >>> slot_mapping = torch.tensor([[20, 21, 22, 23]])
            >>> _ = rope.rotate_and_cache(q, k, v, k_cache, v_cache, slot_mapping, 2)
            >>> torch.equal(k_cache[1, 4:8].transpose(0, 1), rope.rotate(k, 2)[0])
            True
        """
        options = CacheOptions(
            q_weight,
            k_weight,
            eps,
            zero_centered,
            k_scale,
            v_scale,
            k_scale_cache,
            v_scale_cache,
            cache_layout,
        )
        who, caches = f"{type(self).__name__}.rotate_and_cache", (k_cache, v_cache)
        if given:
            offset = offset_by_position(who, given, offset, q, self.seq_dim)
        arguments = self._native_arguments(q, k, offset, position_ids, seq_len)
        # Tokens of several sequences need positions.
        if arguments is not None and (position_ids is not None or q.dim() == 4):
            rotated = try_native_cache((q, k, v), arguments, caches, slot_mapping, options)
            if rotated is not None:
                return rotated
        (q, k, v), seq_dim, as_tokens = as_batch(who, q, k, v, self.seq_dim)
        if as_tokens and position_ids is None:
            rule = "tokens (T, H, D) need position_ids, because they may be of several sequences"
            checks.fail(who, rule, None, "Pass the position of each token in its sequence, (T,).")
        check_heads(who, "qk", [q, k], self.head_dim, seq_dim)
        q, k, v = swap_heads([q, k, v], seq_dim)
        write = check_write(who, (q, k, v), caches, slot_mapping, as_tokens, options)

        def run(cos: Tensor, sin: Tensor, rows: TableRows) -> Tensor:
            return cache_rows(who, self._angles.limit, write, cos, sin, rows, self._spec)

        rotated = self._by_tables(who, [q], offset, position_ids, seq_len, run)
        return as_given(rotated, seq_dim, as_tokens)

    @with_offset
    def rotate(
        self,
        x: Tensor,
        *given: int | Tensor,
        offset: int | Tensor = 0,
        position_ids: Tensor | None = None,
        seq_len: int | Tensor | None = None,
    ) -> Tensor:
        """Rotate one tensor; arguments as :meth:`forward`."""
        if given:
            who = f"{type(self).__name__}.rotate"
            offset = offset_by_position(who, given, offset, x, self.seq_dim)
        arguments = self._native_arguments(x, x, offset, position_ids, seq_len)
        if arguments is not None:
            rotated = rotate_op.try_native(x, *arguments)
            if rotated is not None:
                return rotated  # type: ignore[no-any-return]
        who = f"{type(self).__name__}.rotate"
        return self._rotate(who, "x", [x], offset, position_ids, seq_len)[0]

    @with_offset
    def unrotate(
        self,
        x: Tensor,
        *given: int | Tensor,
        offset: int | Tensor = 0,
        position_ids: Tensor | None = None,
        seq_len: int | Tensor | None = None,
    ) -> Tensor:
        """Undo :meth:`rotate`, the gain of a rule included; arguments as :meth:`forward`.

        Examples:
            >>> import torch
            >>> rope, k = RoPE(8), torch.randn(1, 1, 4, 8)
            >>> torch.allclose(rope.unrotate(rope.rotate(k, 7), 7), k, atol=1e-6)
            True
        """
        who = f"{type(self).__name__}.unrotate"
        if given:
            offset = offset_by_position(who, given, offset, x, self.seq_dim)
        return self._rotate(who, "x", [x], offset, position_ids, seq_len, inverse=True)[0]

    def _native_arguments(
        self, q: Any, k: Any, offset: Any, position_ids: Any, seq_len: Any
    ) -> tuple[Any, ...] | None:
        """What an op takes besides its tensors, if it may take this call as it is, or None."""
        if self._is_special or seq_len is not None or not isinstance(q, Tensor):
            return None
        if torch.compiler.is_compiling():
            return None
        # Decoding passes an int at every call: skip a function.
        if type(offset) is not int or position_ids is not None:
            rows = native_rows(q, offset, position_ids, self.seq_dim)
            if rows is None:
                return None
            position_ids, offset = rows
        tables = self._tables.existing(q, position_ids is not None)
        if tables is None:
            return None
        cos, sin = tables
        may_grow = self._tables.length is None and torch.is_grad_enabled()
        if may_grow and (q.requires_grad or (isinstance(k, Tensor) and k.requires_grad)):
            # As by_tables does: only the rows of this call may be saved.
            end = offset + q.shape[self.seq_dim] if q.dim() == 4 else 0
            if position_ids is not None or not 0 < end <= cos.shape[0]:
                return None
            cos, sin = cos[:end], sin[:end]
        return cos, sin, position_ids, offset, self._layout

    def _rotate(
        self,
        who: str,
        names: str,
        xs: list[Tensor],
        offset: int | Tensor,
        position_ids: Tensor | None = None,
        seq_len: int | Tensor | None = None,
        *,
        inverse: bool = False,
        in_place: bool = False,
    ) -> list[Tensor]:
        check_heads(who, names, xs, self.head_dim, self.seq_dim)
        xs = swap_heads(xs, self.seq_dim)
        spec, limit = self._spec.transpose() if inverse else self._spec, self._angles.limit

        def run(cos: Tensor, sin: Tensor, rows: TableRows) -> list[Tensor]:
            return rotary.rotate_rows(who, limit, xs, cos, sin, rows, spec, in_place=in_place)

        ys = self._by_tables(who, xs, offset, position_ids, seq_len, run, inverse=inverse)
        return swap_heads(ys, self.seq_dim)


def rope_layers(config: dict[str, Any] | str | Path | Any, **keywords: Any) -> list[RoPE | None]:
    """The rotation of each layer of a model, from its config; None for layers that do not rotate.

    Llama 4 and SmolLM3 rotate in all but every fourth layer, Cohere 2 and EXAONE 4 only in layers
    with a sliding window, and Gemma 3 at another base in these. Layers of linear attention
    (MiniMax, Qwen3-Next), convolutions and recurrences do not rotate. Layers that rotate alike
    share a module.

    Args:
        config: As in :meth:`posenc.RoPE.from_config`; it must name the number of layers. Their
            types, if rotations differ by them, are its ``layer_types``, or those that transformers
            fills in for the model type.
        **keywords: Arguments of :class:`posenc.RoPE`, which override the config.

    Returns:
        One for each layer, without a ``max_seq_len`` unless one is given.

    Examples:
        >>> config = {"model_type": "smollm3", "head_dim": 64, "num_hidden_layers": 8}
        >>> ropes = rope_layers(config)
        >>> [i for i, rope in enumerate(ropes) if rope is None]
        [3, 7]
    """
    layers = configs.read_layers(config, base=keywords.get("base"))
    ropes = {
        recipe: None
        if recipe is None
        else RoPE(**{"max_seq_len": None, **recipe.arguments(), **keywords})
        for recipe in dict.fromkeys(layers)
    }
    return [ropes[recipe] for recipe in layers]
