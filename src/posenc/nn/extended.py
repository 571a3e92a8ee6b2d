"""Relative positions that fold far distances into the trained ones: Self-Extend and Dual Chunk."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from posenc._contract import checks, qk_checks
from posenc._contract.tracing import is_exporting
from posenc.functional.biased import attend_ranges
from posenc.nn._module import ReadOnlyArguments, called
from posenc.nn.rope import RoPE
from posenc.numerics.spans import document_ends, gather_rows


class Part(NamedTuple):
    """Positions of all tokens as queries and as keys, and the keys that each sees as a query.

    Each is int64 ``[1 or B, K]``, and counts from the beginning of the token's document.
    """

    queries: Tensor
    keys: Tensor
    first: Tensor
    last: Tensor


class ExtendedRoPE(ReadOnlyArguments):
    """Causal attention in parts, each a rotation at positions of its own over a range of keys.

    The parts are put together by their log-sum-exps, so every pair of tokens has one relative
    position, and no matrix is made. Subclasses say which parts.
    """

    _children = ("rope",)
    rope: RoPE

    def __init__(self, rope: RoPE) -> None:
        super().__init__()
        who = type(self).__name__
        if not isinstance(rope, RoPE):
            hint = "Pass RoPE.from_config(config), for example."
            checks.fail(who, "rope must be a RoPE", checks.describe(rope), hint, TypeError)
        rule = rope.scaling
        if rule is not None and rule.trained_length() is not None:
            needs = "the scaling of rope must not depend on the length of the sequence"
            hint = "Pass rope.replace(scaling=None), or scaling=rope.scaling.at(length)."
            checks.fail(who, needs, type(rule).__name__, hint)
        for name, wanted in (("axes", None), ("seq_dim", -2)):
            if getattr(rope, name) != wanted:
                needs = f"{name} of rope must be {wanted}"
                hint = f"Pass rope.replace({name}={wanted})."
                checks.fail(who, needs, getattr(rope, name), hint)
        self.rope = rope

    def extra_repr(self) -> str:
        """The arguments, without the rotation, which is shown below them."""
        names = [name for name in self._arguments if name != "rope"]
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)

    def _parts(self, at: Tensor, keys: int) -> Iterator[Part]:
        """The parts of sequences of ``keys`` tokens at positions ``at``, ``[1 or B, K]``.

        In the first of them, every token sees itself. A part that ``keys`` are too few for is left
        out. An exported program keeps all parts, because it takes other lengths.
        """
        raise NotImplementedError

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        query_offset: int | Tensor | None = None,
        document_ids: Tensor | None = None,
        backend: str | None = None,
    ) -> Tensor:
        """Causal attention with these positions; queries and keys are rotated here.

        A cache holds keys before their rotation: at decode, all of them are rotated again. Parts
        are rounded to the dtype of ``q`` before they are added up, in at least float32. Gradients
        reach ``q``, ``k`` and ``v``. Keywords are those of
        :func:`posenc.attention.biased_attention`.

        Args:
            q: Queries ``(B, H, Q, D)``, not rotated.
            k: Keys ``(B, Hk, K, D)``, those in the cache included, not rotated.
            v: Values ``(B, Hk, K, Dv)``.
            scale: The factor of scores.
            query_offset: Key index of the first query.
            document_ids: Ids ``(K,)`` or ``(B, K)``. Positions count from the first token of a
                document, so left padding moves none.
            backend: The implementation; None chooses.

        Returns:
            ``(B, H, Q, Dv)`` in the dtype of ``q``.
        """
        who = type(self).__name__
        qk_checks.check_qkv(who, q, k, v)
        keys = k.shape[2]
        checks.equal(who, "channels of q", q.shape[3], self.rope.head_dim, "Pass rope's heads.")
        scale = qk_checks.check_scale(who, scale, q)
        start = qk_checks.check_query_offset(who, query_offset, q.shape[2], keys, q.device)
        ids = qk_checks.check_key_ids(who, "document_ids", document_ids, keys, q.device)
        qk_checks.check_batches(who, q.shape[0], query_offset=start, document_ids=ids)
        begin, positions = _documents(ids, keys, q.device)
        first_query = start.reshape(-1, 1) if isinstance(start, Tensor) else start
        query_index = torch.arange(q.shape[2], device=q.device)[None] + first_query
        results, rotated, rotated_at = [], k, None
        for part in self._parts(positions, keys):
            first, last = begin + part.first, begin + part.last
            if ids is not None:
                padding = torch.atleast_2d(ids) < 0
                first, last = first.masked_fill(padding, keys), last.masked_fill(padding, -1)
            if part.keys is not rotated_at:
                rotated, rotated_at = self._rotated(k, part.keys), part.keys
            at = gather_rows(part.queries, query_index.clamp(0, keys - 1))
            out = attend_ranges(
                who,
                self._rotated(q, at),
                rotated,
                v,
                first.contiguous(),
                last.contiguous(),
                start=start,
                scale=scale,
                backend=backend,
            )
            results.append(out)
        return _merge(results, q.dtype)

    # What Python says of a wrong argument names no private class.
    forward.__qualname__ = "forward"
    attention = called(forward)

    def _rotated(self, x: Tensor, at: Tensor) -> Tensor:
        return self.rope.rotate(x, position_ids=at[0] if len(at) == 1 else at)

    def distances(self, q_len: int, k_len: int | None = None) -> Tensor:
        """The relative position of every query and key, to look at.

        Args:
            q_len: Queries ``Q``, the last of the sequence.
            k_len: Keys ``K``, at least ``Q``; ``Q`` if None.

        Returns:
            int64 ``(Q, K)``; -1 for later keys, which a query does not see.
        """
        queries, keys = qk_checks.check_lengths(type(self).__name__, q_len, k_len)
        index = torch.arange(keys)
        distances = torch.full((queries, keys), -1)
        for part in self._parts(index[None], keys):
            q_at, first, last = (x[0, keys - queries :, None] for x in (part[0], *part[2:]))
            seen = (index >= first) & (index <= last)
            distances = torch.where(seen, q_at - part.keys[0], distances)
        return distances


def _documents(ids: Tensor | None, keys: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The first key of each key's document, and the position of the key in it, ``[1 or B, K]``."""
    index = torch.arange(keys, device=device)[None]
    if ids is None:
        return torch.zeros_like(index), index
    begin = torch.atleast_2d(document_ends(ids)[0])  # type: ignore[index]
    return begin, index - begin


def _merge(results: list[tuple[Tensor, Tensor]], dtype: torch.dtype) -> Tensor:
    """The outputs of all parts, weighted by their log-sum-exps."""
    if len(results) == 1:
        return results[0][0]
    outs, sums = zip(*results, strict=True)
    # Only padding sees nothing in the first part; with minus infinity its weights would be NaN.
    first = sums[0].masked_fill(sums[0] == float("-inf"), 0.0)
    weights = torch.stack((first, *sums[1:])).softmax(0)[..., None]
    total = sum(w * out.to(w.dtype) for w, out in zip(weights, outs, strict=True))
    assert isinstance(total, Tensor)
    return total.to(dtype)


class SelfExtend(ExtendedRoPE):
    r"""Positions of Self-Extend: exact for near keys, in groups for far ones.

    .. math:: r_{ij} = \begin{cases} i - j & i - j < w \\
              \lfloor i/G \rfloor - \lfloor j/G \rfloor + w - \lfloor w/G \rfloor &
              \text{otherwise} \end{cases}

    A model that was trained on :math:`L` tokens reads :math:`(L - w)\,G + w` of them without
    training. For sequences of up to ``window`` tokens the output is that of plain RoPE.

    Args:
        rope: The model's rotation.
        group: :math:`G`, the tokens that share a position far from the query.
        window: :math:`w`, the keys of each query, itself included, with exact positions.

    Examples:
        >>> extend = SelfExtend(RoPE(64, max_seq_len=None), group=2, window=4)
        >>> extend.distances(8)[-1]
        tensor([5, 5, 4, 4, 3, 2, 1, 0])
        >>> q, k, v = torch.randn(3, 1, 8, 100, 64).unbind()
        >>> extend.attention(q, k, v).shape
        torch.Size([1, 8, 100, 64])

    References:
        Jin et al., *LLM Maybe LongLM: Self-Extend LLM Context Window Without Tuning*, 2024.
    """

    def __init__(self, rope: RoPE, *, group: int, window: int) -> None:
        super().__init__(rope)
        who = type(self).__name__
        self.group = checks.integer(who, "group", group)
        self.window = checks.integer(who, "window", window)

    def _parts(self, at: Tensor, keys: int) -> Iterator[Part]:
        group, window = self.group, self.window
        yield Part(at, at, (at - (window - 1)).clamp(min=0), at)
        if is_exporting() or keys > window:
            grouped = at // group
            shift = window - window // group
            zero = torch.zeros_like(at)
            yield Part(grouped + shift, grouped, zero, (at - window).clamp(min=-1))


class DualChunk(ExtendedRoPE):
    r"""Positions of Dual Chunk Attention: keys count modulo the chunk, queries by the chunk apart.

    .. math:: r_{ij} = -\,(j \bmod s) + \begin{cases}
              i \bmod s & \text{in one chunk} \\
              \min(s + i \bmod s,\; s + w - 1) & \text{in the chunk before} \\
              s + w - 1 & \text{in chunks before that} \end{cases}

    No relative position reaches :math:`s + w`, so choose :math:`s + w` up to the length that the
    model was trained on. Keys keep their positions, so they are rotated once for all three parts.

    Args:
        rope: The model's rotation.
        chunk: :math:`s`, the tokens of a chunk.
        window: :math:`w`: how many tokens before a query keep exact distances when they are in
            the previous chunk; at most ``chunk``.

    Examples:
        >>> extend = DualChunk(RoPE(64, max_seq_len=None), chunk=4, window=2)
        >>> extend.distances(12)[-2]
        tensor([ 5,  4,  3,  2,  5,  4,  3,  2,  2,  1,  0, -1])

    References:
        An et al., *Training-Free Long-Context Scaling of Large Language Models*, 2024, section 3.
    """

    def __init__(self, rope: RoPE, *, chunk: int, window: int) -> None:
        super().__init__(rope)
        who = type(self).__name__
        self.chunk = checks.integer(who, "chunk", chunk)
        self.window = checks.integer(who, "window", window)
        if self.window > self.chunk:
            rule = f"window must be at most chunk={self.chunk}"
            checks.fail(who, rule, window, "Pass a smaller window, or a larger chunk.")

    def _parts(self, at: Tensor, keys: int) -> Iterator[Part]:
        chunk, far = self.chunk, self.chunk + self.window - 1
        within = at % chunk
        # Where the chunk of each query begins, and the one before.
        now = at - within
        before = (now - chunk).clamp(min=0)
        yield Part(within, within, now, at)
        if is_exporting() or keys > chunk:
            yield Part((within + chunk).clamp(max=far), within, before, now - 1)
        if is_exporting() or keys > 2 * chunk:
            yield Part(torch.full_like(at, far), within, torch.zeros_like(at), before - 1)
