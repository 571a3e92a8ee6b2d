"""Rotary position embedding (RoPE)."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

import torch
from torch import Tensor

from posenc import kernels
from posenc._contract import checks
from posenc._contract.overlap import check_writable, copy_if_overlapping
from posenc._contract.tracing import in_transform, is_readable
from posenc.kernels import RowOutOfRange, Rows, Spec
from posenc.numerics.frequencies import Spectrum
from posenc.numerics.tables import cos_sin

if TYPE_CHECKING:
    from typing_extensions import Unpack

# What a caller's own table is called in an error.
ROWS = "the rows of cos"


def rotary_pos_embedding(
    input_: Tensor,
    position_ids: Tensor | None = None,
    interleaved: bool = True,
    *,
    offset: int | Tensor = 0,
    base: float = 10_000.0,
) -> Tensor:
    r"""Rotate each channel pair of ``input_`` by its position.

    .. math:: (a, b) \mapsto (a \cos\phi - b \sin\phi,\; a \sin\phi + b \cos\phi),
              \qquad \phi = p\,\theta_i,\; \theta_i = \text{base}^{-2i/D}

    Angles are exact, the rotation is computed one precision up from the input's and rounded
    once: each output is within a hair of half an ulp, at any position.

    Args:
        input_: Floating tensor of shape ``(..., L, D)`` with even ``D``.
        position_ids: Integers of shape ``(L,)`` or ``(1, L)``, or ``(B, L)`` with ``B`` the first
            axis of ``input_``. None means ``0 .. L-1``.
        interleaved: Pairs are ``(0, 1), (2, 3), ...`` if true, ``(0, D/2), (1, D/2 + 1), ...``
            if false.
        offset: Position of the first token, or an integer tensor ``(B,)`` of them, instead of
            ``position_ids``.
        base: Raising it slows every pair but the first.

    Returns:
        A new tensor with the shape and dtype of ``input_``.

    Examples:
        >>> rotary_pos_embedding(torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
        tensor([[1.0000, 0.0000],
                [0.5403, 0.8415]])

    References:
        Su et al., *RoFormer*, 2021, section 3.4.2.
    """
    who = "rotary_pos_embedding"
    width = check_rotary_input(who, "input_", input_)
    checks.boolean(who, "interleaved", interleaved)
    spectrum = Spectrum(width, checks.base(who, base))
    rows = rows_of(who, input_, offset, position_ids, "", None)
    at = rows.as_index(input_.shape[-2], input_.device)
    checks.check_ids(who, at)
    # One row of positions serves every sequence.
    at = at[0] if at.shape[0] == 1 else at
    cos, sin = cos_sin(at, spectrum)
    return turn_one(who, ROWS, input_, cos, sin, Rows(), Spec(interleaved, interleaved))


class RotateOptions(TypedDict, total=False):
    """The keywords of :func:`rotate` and its siblings."""

    offset: int | Tensor
    position_ids: Tensor | None
    seq_dim: int
    interleaved: bool
    interleaved_out: bool | None
    last: bool


def rotate(x: Tensor, cos: Tensor, sin: Tensor, **options: Unpack[RotateOptions]) -> Tensor:
    """Rotate ``x`` by tables of your own.

    For tables from another source: learned frequencies, a scaling rule of yours, another
    library's cache. Gradients reach ``x``, ``cos`` and ``sin``.

    Args:
        x: ``(B, H, L, D)``.
        cos: ``(T, P)``, or ``(B, T, P)`` for tables of each sequence's own. ``2P`` channels of
            the ``D`` are rotated. Tables ``(T, D)`` that hold the number of each pair twice, as
            Hugging Face makes them, are accepted if both are the same.
        sin: As ``cos``.
        **options: ``offset``: table row of the first token (0), or an integer tensor ``(B,)``;
            ``position_ids``: table row of each token, ``(L,)`` or ``(B, L)``, instead;
            ``seq_dim``: which dimension of ``x`` are the tokens: -2, or 1 for ``(B, L, H, D)``;
            ``interleaved``: pairs are ``(2i, 2i + 1)`` if true (the default), ``(i, P + i)`` if
            false; ``interleaved_out``: pairs of the result, if they are to differ (DeepSeek's
            checkpoints are interleaved and come out in halves); ``last``: rotate the last ``2P``
            channels instead of the first.

    Returns:
        A new tensor like ``x``; channels that are not rotated are copied.

    Examples:
        >>> x = torch.tensor([1.0, 0.0, 5.0]).view(1, 1, 1, 3)
        >>> rotate(x, torch.tensor([[0.0]]), torch.tensor([[1.0]])).flatten()
        tensor([0., 1., 5.])
    """
    return _rotated("rotate", [x], cos, sin, **options)[0]


def rotate_qk(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **options: Unpack[RotateOptions]
) -> tuple[Tensor, Tensor]:
    """Rotate queries ``(B, H, L, D)`` and keys ``(B, H', L, D)`` in one pass; see :func:`rotate`.

    Examples:
        >>> q, k = torch.eye(2).view(2, 1, 1, 1, 2)
        >>> q, k = rotate_qk(q, k, torch.tensor([[0.0]]), torch.tensor([[1.0]]))
        >>> q.flatten(), k.flatten()
        (tensor([0., 1.]), tensor([-1.,  0.]))
    """
    a, b = _rotated("rotate_qk", [q, k], cos, sin, **options)
    return a, b


def rotate_(x: Tensor, cos: Tensor, sin: Tensor, **options: Unpack[RotateOptions]) -> Tensor:
    """Rotate ``x`` in place, and return it; arguments as :func:`rotate`.

    One pass without a new tensor where nothing is recorded for a gradient; where something is,
    autograd sees the write as it sees torch's own.

    Examples:
        >>> x = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2)
        >>> rotate_(x, torch.tensor([[0.0]]), torch.tensor([[1.0]])) is x
        True
        >>> x.flatten()
        tensor([0., 1.])
    """
    xs, cos, sin, rows, spec = arguments("rotate_", [x], cos, sin, **options)
    rotate_in_place("rotate_", ROWS, xs, cos, sin, rows, spec)
    return x


def rotate_qk_(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **options: Unpack[RotateOptions]
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys in place, in one pass, and return them; see :func:`rotate_qk`.

    Examples:
        >>> q, k = torch.eye(2).view(2, 1, 1, 1, 2)
        >>> rotated = rotate_qk_(q, k, torch.tensor([[0.0]]), torch.tensor([[1.0]]))
        >>> q.flatten(), k.flatten()
        (tensor([0., 1.]), tensor([-1.,  0.]))
    """
    xs, cos, sin, rows, spec = arguments("rotate_qk_", [q, k], cos, sin, **options)
    rotate_in_place("rotate_qk_", ROWS, xs, cos, sin, rows, spec)
    return q, k


def _rotated(
    who: str, xs: list[Tensor], cos: Tensor, sin: Tensor, **options: Unpack[RotateOptions]
) -> list[Tensor]:
    xs, cos, sin, rows, spec = arguments(who, xs, cos, sin, **options)
    ys = turn_all(who, ROWS, xs, cos.resolve_neg(), sin.resolve_neg(), rows, spec)
    swapped = tokens_first(who, options.get("seq_dim", -2))
    return [y.transpose(1, 2) for y in ys] if swapped else ys


def rotate_in_place(
    who: str,
    limit_name: str,
    xs: list[Tensor],
    cos: Tensor,
    sin: Tensor,
    rows: Rows,
    spec: Spec,
) -> None:
    """Rotate ``xs`` of ``(B, H, L, D)`` where they are; a refused call writes nothing."""
    check_writable(who, xs, recorded_by=(cos, sin))
    read = (cos, sin) if rows.positions is None else (cos, sin, rows.positions)
    cos, sin, *positions = copy_if_overlapping(xs, *read)
    rows = Rows(rows.start, *positions)
    try:
        kernels.rotate_(xs, cos.resolve_neg(), sin.resolve_neg(), rows, spec)
    except RowOutOfRange as error:
        checks.check_position(who, error.row, limit_name, cos.shape[-2])
        raise


def tokens_first(who: str, seq_dim: int) -> bool:
    """Whether tensors are ``(B, L, H, D)``; refuse what is neither that nor ``(B, H, L, D)``."""
    if seq_dim in (-2, 2):
        return False
    if seq_dim not in (1, -3):
        rule = "seq_dim must be -2 for (B, H, L, D), or 1 for (B, L, H, D)"
        raise ValueError(checks.message(who, rule, seq_dim, "Transpose the tensor first."))
    return True


def halved(who: str, name: str, table: Tensor, interleaved: bool) -> Tensor:
    """A table ``(..., 2P)`` that holds the number of each pair twice, with one: ``(..., P)``."""
    first, second = (table[..., ::2], table[..., 1::2]) if interleaved else table.chunk(2, -1)
    problem = f"{who}: both numbers of a pair must be the same in {name}."
    if is_readable(table):
        if not torch.equal(first, second):
            raise ValueError(f"{problem}\n  Pass {name} of shape (T, P), or another `interleaved`.")
    elif not in_transform(table):
        torch._assert_async((first == second).all(), problem)
    return first


def check_rotary_input(who: str, name: str, x: Tensor) -> int:
    """``D``; refuse what cannot be rotated: not floating, not ``(..., L, D)``, or ``D`` odd."""
    checks.float_tensor(who, name, x)
    if x.dim() < 2:
        rule = f"{name} must have shape (..., L, D)"
        got = f"shape {tuple(x.shape)}"
        raise ValueError(checks.message(who, rule, got, f"A single token is {name}[None]."))
    return checks.even(who, f"the last dimension of {name}", x.shape[-1])


def check_queries_and_keys(who: str, q: Tensor, k: Tensor) -> None:
    """Refuse q and k that do not belong together."""
    (batch, _, length, width), (k_batch, _, k_length, k_width) = q.shape, k.shape
    fits = batch == k_batch and length == k_length and width == k_width
    if not fits or q.device != k.device:
        rule = "q and k must agree in batch, length, head_dim and device"
        got = f"{tuple(q.shape)} on {q.device} and {tuple(k.shape)} on {k.device}"
        way_out = "Only the head counts may differ; for (B, L, H, D) pass seq_dim=1."
        if length < k_length and batch == k_batch and width == k_width:
            way_out = "Rotate new keys alone, with the offset of the new queries, and cache them."
        raise ValueError(checks.message(who, rule, got, way_out))


def turn_all(
    who: str,
    limit_name: str,
    xs: list[Tensor],
    cos: Tensor,
    sin: Tensor,
    rows: Rows,
    spec: Spec,
) -> list[Tensor]:
    """Rotate ``xs`` of ``(B, H, L, D)``; a row that the tables lack is a user's error."""
    assert cos.dim() == 2 or cos.shape[0] == xs[0].shape[0], "a table for each sequence"
    try:
        return kernels.rotate(xs, cos, sin, rows, spec)
    except RowOutOfRange as error:
        checks.check_position(who, error.row, limit_name, cos.shape[-2])
        raise


def turn_one(
    who: str, limit_name: str, x: Tensor, cos: Tensor, sin: Tensor, rows: Rows, spec: Spec
) -> Tensor:
    """Rotate ``x`` of ``(..., L, D)``; positions and 3-D tables belong to its first axis."""
    if x.dim() == 4:
        return turn_all(who, limit_name, [x], cos, sin, rows, spec)[0]
    if x.dim() == 2:
        four = x[None, None]
    elif x.dim() == 3:
        four = x.unsqueeze(1)
    else:
        four = x.flatten(1, -3)
    (y,) = turn_all(who, limit_name, [four], cos, sin, rows, spec)
    return y.view(x.shape) if x.dim() < 4 else y.unflatten(1, x.shape[1:-2])


def rows_of(
    who: str,
    x: Tensor,
    offset: int | Tensor,
    position_ids: Tensor | None,
    limit_name: str,
    limit: int | None,
) -> Rows:
    """Table rows from what a user may say: an offset, one for each sequence, or positions."""
    if position_ids is None:
        if isinstance(offset, Tensor):
            return Rows(0, checks.offsets(who, offset, x.shape, x.device)[:, None])
        if isinstance(offset, (list, tuple)):
            rule = "offset must be an int, or an integer tensor of shape (B,)"
            got, way_out = checks.describe(offset), "Pass torch.tensor(offset)."
            raise TypeError(checks.message(who, rule, got, way_out))
        return Rows(checks.integer(who, "offset", offset, least=0))
    checks.exclusive_offset(who, offset)
    ids = checks.position_ids(who, position_ids, x.shape, x.device, limit_name, limit)
    return Rows(0, ids if ids.dim() == 2 else ids[None])


def arguments(
    who: str,
    xs: list[Tensor],
    cos: Tensor,
    sin: Tensor,
    *,
    offset: int | Tensor = 0,
    position_ids: Tensor | None = None,
    seq_dim: int = -2,
    interleaved: bool = True,
    interleaved_out: bool | None = None,
    last: bool = False,
) -> tuple[list[Tensor], Tensor, Tensor, Rows, Spec]:
    """What the kernels take: ``xs`` as ``(B, H, L, D)``, tables ``(..., T, P)``, rows and pairs."""
    swapped = tokens_first(who, seq_dim)
    for name, x in zip(("q", "k") if len(xs) == 2 else ("x",), xs, strict=True):
        checks.float_tensor(who, name, x)
        checks.rank(who, name, x, (4,), "(B, L, H, D)" if swapped else "(B, H, L, D)")
    if swapped:
        xs = [x.transpose(1, 2) for x in xs]
    if len(xs) == 2:
        check_queries_and_keys(who, *xs)
    for name, table in (("cos", cos), ("sin", sin)):
        if table is None:
            rule = f"{name} must be a torch.Tensor"
            way_out = "A RoPE that grows has none at first: pass rope.tables(position_ids)."
            raise TypeError(checks.message(who, rule, None, way_out))
        checks.float_tensor(who, name, table)
        checks.rank(who, name, table, (2, 3), "(T, P) or (B, T, P)")
    batch, _, length, width = xs[0].shape
    checks.boolean(who, "interleaved", interleaved)
    if cos.shape != sin.shape or cos.device != xs[0].device or sin.device != xs[0].device:
        rule = f"cos and sin must have one shape, on {xs[0].device}"
        got = f"{tuple(cos.shape)} on {cos.device} and {tuple(sin.shape)} on {sin.device}"
        raise ValueError(checks.message(who, rule, got, "Build both from the same angles."))
    if width < 2 * cos.shape[-1] <= 2 * width and cos.shape[-1] % 2 == 0:
        # Too wide for one number to a pair.
        cos, sin = halved(who, "cos", cos, interleaved), halved(who, "sin", sin, interleaved)
    pairs = cos.shape[-1]
    if pairs == 0 or 2 * pairs > width or (cos.dim() == 3 and cos.shape[0] != batch):
        rule = f"cos must have shape (T, P) or ({batch}, T, P) with 1 <= P <= {width // 2}"
        got, way_out = f"shape {tuple(cos.shape)}", "Give one column to each pair of channels."
        raise ValueError(checks.message(who, rule, got, way_out))
    rows = rows_of(who, xs[0], offset, position_ids, ROWS, cos.shape[-2])
    if rows.positions is None:
        checks.check_range(who, rows.start, length, ROWS, cos.shape[-2])
    if interleaved_out is None:
        interleaved_out = interleaved
    checks.boolean(who, "interleaved_out", interleaved_out)
    column = width - 2 * pairs if checks.boolean(who, "last", last) else 0
    return xs, cos, sin, rows, Spec(interleaved, interleaved_out, column)
