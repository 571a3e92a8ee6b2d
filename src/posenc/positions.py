"""Compute `position_ids`: of caches, packed or padded batches, images, ranks and M-RoPE."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from posenc._contract import checks, position_checks
from posenc._contract.tracing import device_assert, is_readable
from posenc.numerics.tables import widest

__all__ = [
    "context_parallel",
    "from_cu_seqlens",
    "from_left_padding",
    "from_offset",
    "grid",
    "mrope",
    "normalized_grid",
]
__dir__ = __all__.copy


def from_offset(
    length: int, offset: int | Tensor = 0, *, device: torch.device | str | None = None
) -> Tensor:
    """Consecutive positions from ``offset`` on.

    Args:
        length: Tokens ``L``.
        offset: The first position, or an integer tensor ``(B,)`` with one for each sequence.
        device: The device of the result; if None, that of a tensor ``offset``.

    Returns:
        int64 of shape ``(L,)``, or ``(B, L)``.

    Examples:
        >>> from_offset(3, 5)
        tensor([5, 6, 7])
        >>> from_offset(3, torch.tensor([0, 4]))
        tensor([[0, 1, 2],
                [4, 5, 6]])
    """
    who = "from_offset"
    count = checks.integer(who, "length", length, least=0)
    if not isinstance(offset, Tensor):
        start = position_checks.first_position(who, offset)
        return torch.arange(start, start + count, device=device)
    where = torch.device(device or offset.device)
    first = position_checks.index_tensor(who, "offset", offset, ((offset.numel(),),), where)
    position_checks.check_ids(who, first)
    return first[:, None] + torch.arange(count, device=first.device)


def from_cu_seqlens(cu_seqlens: Tensor, total: int | None = None) -> Tensor:
    """Positions of sequences packed one after the other: each counts from zero.

    Args:
        cu_seqlens: Cumulative lengths, integers ``(N + 1,)``, the first zero, as in flash-attn.
        total: Tokens ``L``. If None, it is the last of ``cu_seqlens``; reading that synchronises
            the device and breaks a compiled graph. Tokens past the last end, as in padded buffers,
            continue the last sequence.

    Returns:
        int64 of shape ``(L,)``.

    Examples:
        >>> from_cu_seqlens(torch.tensor([0, 3, 3, 5]))
        tensor([0, 1, 2, 0, 1])
        >>> from_cu_seqlens(torch.tensor([0, 3, 5]), total=7)
        tensor([0, 1, 2, 0, 1, 2, 3])
    """
    who = "from_cu_seqlens"
    starts = _check_cu_seqlens(who, cu_seqlens)
    readable = total is None or is_readable(starts)
    if total is None:
        total = max([0, *starts.tolist()])
    total = checks.integer(who, "total", total, least=0)
    rule = "cu_seqlens must begin with 0, never decrease, and end at total or before"
    fits = (starts[:1] == 0).any() & (starts.diff() >= 0).all() & (starts <= total).all()
    if not readable:
        device_assert(fits, f"{who}: {rule}.")
    elif not fits:
        got = f"{checks.describe(starts.tolist())} and total={total}"
        checks.fail(who, rule, got, "Pass F.pad(lengths.cumsum(0), (1, 0)) and the token count.")
    token = torch.arange(total, device=starts.device)
    return token - starts[_owners(starts, token)]


def _check_cu_seqlens(who: str, cu_seqlens: Any) -> Tensor:
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in checks.INT_DTYPES:
        rule, got = "cu_seqlens must be an integer tensor", checks.describe(cu_seqlens)
        checks.fail(who, rule, got, "Pass torch.tensor(cu_seqlens).", TypeError)
    checks.rank(who, "cu_seqlens", cu_seqlens, (1,), "(N + 1,)")
    return cu_seqlens.to(torch.int64)


def _owners(starts: Tensor, token: Tensor) -> Tensor:
    """The sequence of each token: the last that begins at or before it; an empty one has none."""
    begins = starts[:-1] if len(starts) > 1 else starts
    return torch.searchsorted(begins, token, right=True) - 1


def from_left_padding(mask: Tensor) -> Tensor:
    """Positions of a batch padded on the left: each sequence counts from its first real token.

    Args:
        mask: ``(B, L)``, true or 1 for real tokens, as Hugging Face's ``attention_mask``.

    Returns:
        int64 of shape ``(B, L)``. Padding on the left has position 0, padding on the right the
        position of the last token.

    Examples:
        >>> from_left_padding(torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]))
        tensor([[0, 0, 0, 1],
                [0, 1, 2, 3]])
    """
    who = "from_left_padding"
    if not isinstance(mask, Tensor) or (mask.dtype not in (*checks.INT_DTYPES, torch.bool)):
        rule = "mask must be a bool or integer tensor"
        checks.fail(who, rule, checks.describe(mask), "Pass mask.bool().", TypeError)
    checks.rank(who, "mask", mask, (2,), "(B, L)")
    return ((mask != 0).cumsum(1) - 1).clamp(min=0)


def grid(
    *sizes: int,
    start: int | Sequence[int] = 0,
    prefix: int = 0,
    device: torch.device | str | None = None,
) -> Tensor:
    """Coordinates of the cells of a grid in row-major order, as patches are flattened.

    Args:
        *sizes: Cells along each axis: height and width, or frames, height and width.
        start: The coordinates of the first cell, which may be negative; an int for all axes.
        prefix: Tokens before the cells, such as a class token and registers. All their coordinates
            are zero, so they are not rotated.
        device: The device of the result.

    Returns:
        int64 of shape ``(A, prefix + L)``, where ``L`` is the product of ``sizes``.

    Examples:
        >>> grid(2, 3)
        tensor([[0, 0, 0, 1, 1, 1],
                [0, 1, 2, 0, 1, 2]])
        >>> grid(2, 3, start=(1, -2), prefix=1)
        tensor([[ 0,  1,  1,  1,  2,  2,  2],
                [ 0, -2, -1,  0, -2, -1,  0]])
    """
    who, counts = "grid", _sizes("grid", sizes)
    starts = list(start) if isinstance(start, (list, tuple)) else [start] * len(counts)
    if len(starts) != len(counts):
        rule = f"start must be one int, or one for each of the {len(counts)} axes"
        checks.fail(who, rule, start, "Pass (0, 0), for example.")
    least = -checks.MAX_POSITION
    firsts = [checks.integer(who, "start", first, least=least) for first in starts]
    pairs = zip(firsts, counts, strict=True)
    return _cells(who, [torch.arange(a, a + n, device=device) for a, n in pairs], prefix)


def normalized_grid(
    *sizes: int,
    normalize: str = "separate",
    align_corners: bool = False,
    prefix: int = 0,
    shift: float | None = None,
    jitter: float | None = None,
    rescale: float | None = None,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    r"""Coordinates of the cells of a grid between -1 and 1, whatever its resolution.

    .. math:: p_i = \frac{2i + 1}{n} - 1 \qquad \text{or} \qquad
        p_i = \frac{2i}{n - 1} - 1, \qquad i = 0, \dots, n - 1

    They are rounded once to float64. In training, DINOv3 augments them, once for the whole batch:
    it adds a uniform number to each axis, then multiplies each axis, then both, by log-uniform
    ones. These are drawn as its code draws them, in float32: shift, jitter, then rescale.

    Args:
        *sizes: Cells along each axis: height and width of an image in patches.
        normalize: :math:`n` of an axis: its own size (``"separate"``), or that of the longest
            (``"max"``) or shortest axis (``"min"``), so that cells are square.
        align_corners: False for the first formula: the edges of the image are at -1 and 1, as in
            DINOv3. True for the second: the centres of its first and last cell are, as in timm's
            and rotary-embedding-torch's tables for pixels.
        prefix: Tokens before the cells, such as a class token and registers. All their coordinates
            are zero, so they are not rotated.
        shift: Add a number from -shift to shift to each axis.
        jitter: Multiply each axis by a number from 1 / jitter to jitter.
        rescale: Multiply all axes by one number from 1 / rescale to rescale.
        generator: The source of these numbers.
        device: The device of the result.

    Returns:
        float64 of shape ``(A, prefix + L)``.

    Examples:
        >>> normalized_grid(2, 2, prefix=1)
        tensor([[ 0.0000, -0.5000, -0.5000,  0.5000,  0.5000],
                [ 0.0000, -0.5000,  0.5000, -0.5000,  0.5000]], dtype=torch.float64)

    References:
        Siméoni et al., *DINOv3*, 2025, section 3.2, and the authors' code.
    """
    who, counts = "normalized_grid", _sizes("normalized_grid", sizes)
    checks.choice(who, "normalize", normalize, ("separate", "max", "min"))
    corners = int(checks.boolean(who, "align_corners", align_corners))
    where = torch.device("cpu" if device is None else device)
    wide, lines = widest(where), []
    for count in counts:
        size = {"separate": count, "max": max(counts), "min": min(counts)}[normalize] - corners
        # Twice the distance from the middle, a whole number, is rounded once by the quotient.
        twice = (2 * torch.arange(count, device=where) + (1 - corners - size)).to(wide)
        # A lone cell is at -1 if corners are aligned, as in torch.linspace.
        lines.append(twice / size if size else twice - 1)

    def draw(bound: float | None, number: int) -> Tensor:
        if bound is None:
            return torch.zeros(number, dtype=wide, device=where)
        drawn = torch.empty(number, dtype=torch.float32, device=where)
        return drawn.uniform_(-bound, bound, generator=generator).to(wide)

    moved = draw(checks.optional(checks.positive_float, who, "shift", shift), len(counts))
    logs = draw(_log(who, "jitter", jitter), len(counts)) + draw(_log(who, "rescale", rescale), 1)
    changes = zip(lines, moved, logs.exp(), strict=True)
    return _cells(who, [(line + by) * factor for line, by, factor in changes], prefix)


def _log(who: str, name: str, factor: float | None) -> float | None:
    if factor is None:
        return None
    if checks.positive_float(who, name, factor) < 1:
        checks.fail(who, f"{name} must be at least 1", factor, "Pass 2.0 for half to double.")
    return math.log(factor)


def _sizes(who: str, sizes: tuple[int, ...]) -> list[int]:
    if not sizes:
        checks.fail(who, "sizes must be one or more ints", "none", f"Call {who}(height, width).")
    if isinstance(sizes[0], (tuple, list)):
        hint = f"Call {who}(*sizes)."
        checks.fail(
            who, "sizes must be ints, one by one", checks.describe(sizes[0]), hint, TypeError
        )
    return [checks.integer(who, "sizes", size, least=0) for size in sizes]


def _cells(who: str, lines: list[Tensor], prefix: int) -> Tensor:
    """Row-major cells of the coordinates along each axis, after ``prefix`` tokens at zero."""
    cells = torch.stack(torch.meshgrid(*lines, indexing="ij")).flatten(1)
    tokens = checks.integer(who, "prefix", prefix, least=0)
    return torch.cat((cells.new_zeros(len(cells), tokens), cells), dim=1) if tokens else cells


def context_parallel(
    length: int,
    rank: int,
    world_size: int,
    *,
    zigzag: bool = False,
    cu_seqlens: Tensor | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Positions of the tokens that one rank holds when a sequence is split over several.

    Args:
        length: Tokens of the whole sequence, a multiple of ``world_size`` (of twice that if
            zig-zag and there are several ranks).
        rank: From 0 to ``world_size - 1``.
        world_size: How many ranks share the sequence.
        zigzag: If false, each rank holds one run of tokens. If true, the sequence is cut into
            ``2 * world_size`` pieces, and rank ``r`` holds the ``r``-th piece from either end,
            which balances the cost of causal attention.
        cu_seqlens: If ``length`` tokens are several sequences, packed one after the other, and
            each is split by itself (``thd`` in Megatron and TransformerEngine): their cumulative
            lengths, integers ``(N + 1,)``, from 0 to ``length``. Each must be such a multiple, so
            it includes the padding. Positions are those in their sequences.
        device: The device of the result; if None, that of ``cu_seqlens``.

    Returns:
        int64 of shape ``(length / world_size,)``.

    Examples:
        >>> context_parallel(8, rank=0, world_size=2)
        tensor([0, 1, 2, 3])
        >>> context_parallel(8, rank=0, world_size=2, zigzag=True)
        tensor([0, 1, 6, 7])
        >>> packed = torch.tensor([0, 4, 12])  # 4 tokens, then 8
        >>> context_parallel(12, rank=0, world_size=2, zigzag=True, cu_seqlens=packed)
        tensor([0, 3, 0, 1, 6, 7])
    """
    who = "context_parallel"
    count = checks.integer(who, "length", length, least=0)
    ranks = checks.integer(who, "world_size", world_size)
    which = checks.integer(who, "rank", rank, least=0)
    if which >= ranks:
        checks.fail(who, f"rank must be below world_size={ranks}", which, "Count ranks from zero.")
    # One rank holds the whole sequence in order.
    halves = checks.boolean(who, "zigzag", zigzag) and ranks > 1
    pieces = 2 * ranks if halves else ranks
    if count % pieces:
        checks.fail(who, f"length must be a multiple of {pieces}", count, "Pad the sequence.")
    if cu_seqlens is None:
        place = torch.arange(count // ranks, device=device)
        held: int | Tensor = count // ranks
    else:
        starts = _check_cu_seqlens(who, cu_seqlens)
        rule = f"cu_seqlens must go from 0 to length={count} by multiples of {pieces}"
        ends = (starts[:1] == 0).any() & (starts[-1:] == count).any()
        fits = ends & (starts.diff() >= 0).all() & (starts % pieces == 0).all()
        if not is_readable(starts):
            device_assert(fits, f"{who}: {rule}.")
        elif not fits:
            hint = "Pad each sequence, and pass the cumulative padded lengths."
            checks.fail(who, rule, checks.describe(starts.tolist()), hint)
        starts = starts.to(device) // ranks
        token = torch.arange(count // ranks, device=starts.device)
        owner = _owners(starts, token)
        place, held = token - starts[owner], starts.diff()[owner]
    # This rank's tokens of a sequence are one run of it, or one from either end.
    if not halves:
        return which * held + place
    piece = held // 2
    is_first = place < piece
    return place + piece * torch.where(is_first, which, pieces - 2 - which)


def mrope(
    spans: Sequence[int | tuple[int, int, int] | tuple[int, int, int, float]],
    *,
    start: int = 0,
    after: str = "largest",
) -> Tensor:
    """Time, height and width of each token of a text with images and videos in it.

    A token of text has three equal coordinates. In a span of patches, frames, rows and columns are
    each counted from the first position of the span.

    Args:
        spans: In order: an int for a run of text tokens, ``(frames, rows, columns)`` for a span
            of patches, counted after any merging. ``(frames, rows, columns, step)`` for a video
            whose frames are ``step`` apart in time: ``tokens_per_second * second_per_grid_ts`` of
            Qwen2.5-VL. Times are float32 products, rounded down, as in transformers.
        start: The first position.
        after: Where the tokens after a span of patches begin: one past the largest of its three
            coordinates (``"largest"``), as in the paper, vLLM and transformers 4; or one past the
            largest row or column, whatever its time (``"space"``), as in transformers 5. They
            differ if a video has more frames than rows and columns, or a ``step`` above 1.

    Returns:
        int64 of shape ``(3, L)``. A reply continues at the largest number in it plus one.

    Examples:
        >>> mrope([2, (1, 2, 2), 1])
        tensor([[0, 1, 2, 2, 2, 2, 4],
                [0, 1, 2, 2, 3, 3, 4],
                [0, 1, 2, 3, 2, 3, 4]])
        >>> mrope([1, (3, 1, 2, 2.5), 1])
        tensor([[0, 1, 1, 3, 3, 6, 6, 7],
                [0, 1, 1, 1, 1, 1, 1, 7],
                [0, 1, 2, 1, 2, 1, 2, 7]])
        >>> mrope([1, (3, 1, 2, 2.5), 1], after="space")[:, -1]
        tensor([3, 3, 3])

    References:
        Wang et al., *Qwen2-VL*, 2024, section 2.1; Bai et al., *Qwen2.5-VL*, 2025, section 2.1.
    """
    who = "mrope"
    following = checks.integer(who, "start", start, least=0)
    checks.choice(who, "after", after, ("largest", "space"))
    parts = []
    for span in spans:
        if not isinstance(span, (tuple, list)):
            tokens = checks.integer(who, "spans", span, least=0)
            parts.append(from_offset(tokens, following).expand(3, tokens))
            following += tokens
            continue
        if len(span) not in (3, 4):
            rule = "a span of patches must be (frames, rows, columns), or these and a step"
            checks.fail(who, rule, span, "Pass 1 frame for an image.")
        frames, rows, columns = _sizes(who, tuple(span[:3]))
        times = torch.arange(frames)
        if len(span) == 4:
            times = _times(who, times, span[3])
        if frames and rows and columns:
            lines = [times, torch.arange(rows), torch.arange(columns)]
            parts.append(_cells(who, lines, 0) + following)
            last = int(times[-1]) + 1 if after == "largest" else 0
            following += max(last, rows, columns)
    return torch.cat(parts, dim=1) if parts else torch.empty((3, 0), dtype=torch.int64)


def _times(who: str, frames: Tensor, step: float) -> Tensor:
    """Frames that are ``step`` apart, at whole positions."""
    apart = torch.tensor(checks.positive_float(who, "step", step), dtype=torch.float32)
    times = frames.to(torch.float32) * apart
    if len(frames) and not times[-1] <= checks.MAX_POSITION:
        rule = "the time of the last frame must be at most 2**31"
        checks.fail(who, rule, f"{times[-1]:g}", "Pass a smaller step.")
    return times.to(torch.int64)
