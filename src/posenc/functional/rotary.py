"""Rotary position embedding (RoPE)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from posenc import ops
from posenc._contract import checks
from posenc._contract.overlap import check_writable
from posenc._contract.position_checks import UNLIMITED, Limit
from posenc._contract.tracing import device_assert, in_transform, is_readable
from posenc.functional._positions import positions_of, rows_of, run_kernel
from posenc.numerics.frequencies import Spectrum
from posenc.numerics.tables import cos_sin
from posenc.ops import Spec, TableRows
from posenc.ops.rotation.rotation import (
    rotate_in_place_op,
    rotate_op,
    rotate_qk_in_place_op,
    rotate_qk_op,
)
from posenc.ops.rotation.spec import INTERLEAVED, INTERLEAVED_OUT, ROTATE_LAST, TOKENS_FIRST


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

    The rotation is computed in the next wider dtype and rounded once: the error of each output is
    hardly more than half an ulp, up to position 2**31.

    Args:
        input_: Floating tensor of shape ``(..., L, D)`` with even ``D``.
        position_ids: Integers of shape ``(L,)`` or ``(1, L)``, or ``(B, L)`` with ``B`` the first
            axis of ``input_``. None means ``0 .. L-1``.
        interleaved: As in :class:`posenc.RoPE`.
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
    rows = rows_of(who, input_, offset, position_ids)
    cos, sin = cos_sin(positions_of(who, input_, rows), spectrum)
    xs, spec = [with_heads(input_)], Spec(interleaved, interleaved)
    (rotated,) = rotate_rows(who, UNLIMITED, xs, cos, sin, TableRows(), spec)
    return without_heads(rotated, input_)


def rotate(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    offset: int | Tensor = 0,
    position_ids: Tensor | None = None,
    seq_dim: int = -2,
    interleaved: bool = True,
    interleaved_out: bool | None = None,
    last: bool = False,
) -> Tensor:
    """Rotate ``x`` by tables of your own.

    They may come from learned frequencies, a scaling rule of yours, or another library's cache.
    Gradients reach ``x``, ``cos`` and ``sin``.

    Args:
        x: ``(B, H, L, D)``.
        cos: ``(T, P)``, or ``(B, T, P)`` with a table for each sequence; ``2P`` channels of the
            ``D`` are rotated. Hugging Face's ``(T, D)``, with each column twice, is
            accepted if all of ``D`` is rotated.
        sin: As ``cos``.
        offset: Table row of the first token, or an integer tensor ``(B,)``.
        position_ids: Table row of each token, ``(L,)`` or ``(B, L)``, instead of ``offset``.
        seq_dim: The dimension of ``x`` for tokens: -2, or 1 for ``(B, L, H, D)``.
        interleaved: Pairs are ``(2i, 2i + 1)`` if true, ``(i, P + i)`` if false.
        interleaved_out: Pairs of the result, if they differ (DeepSeek-V3).
        last: Rotate the last ``2P`` channels instead of the first.

    Returns:
        A new tensor like ``x``; channels that are not rotated are copied.

    Examples:
        >>> x = torch.tensor([1.0, 0.0, 5.0]).view(1, 1, 1, 3)
        >>> rotate(x, torch.tensor([[0.0]]), torch.tensor([[1.0]])).flatten()
        tensor([0., 1., 5.])
    """
    arguments = native_arguments(
        x, cos, sin, offset, position_ids, seq_dim, interleaved, interleaved_out, last
    )
    if arguments is not None:
        rotated = rotate_op.try_native(x, *arguments)
        if rotated is not None:
            return rotated  # type: ignore[no-any-return]
    options = offset, position_ids, seq_dim, interleaved, interleaved_out, last
    return _rotate("rotate", "x", [x], cos, sin, *options)[0]


def rotate_qk(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    offset: int | Tensor = 0,
    position_ids: Tensor | None = None,
    seq_dim: int = -2,
    interleaved: bool = True,
    interleaved_out: bool | None = None,
    last: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rotate queries ``(B, H, L, D)`` and keys ``(B, H', L, D)`` in one pass; see :func:`rotate`.

    Examples:
        >>> q, k = torch.eye(2).view(2, 1, 1, 1, 2)
        >>> q, k = rotate_qk(q, k, torch.tensor([[0.0]]), torch.tensor([[1.0]]))
        >>> q.flatten(), k.flatten()
        (tensor([0., 1.]), tensor([-1.,  0.]))
    """
    arguments = native_arguments(
        q, cos, sin, offset, position_ids, seq_dim, interleaved, interleaved_out, last
    )
    if arguments is not None:
        rotated = rotate_qk_op.try_native(q, k, *arguments)
        if rotated is not None:
            return rotated  # type: ignore[no-any-return]
    options = offset, position_ids, seq_dim, interleaved, interleaved_out, last
    a, b = _rotate("rotate_qk", "qk", [q, k], cos, sin, *options)
    return a, b


def rotate_(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    offset: int | Tensor = 0,
    position_ids: Tensor | None = None,
    seq_dim: int = -2,
    interleaved: bool = True,
    interleaved_out: bool | None = None,
    last: bool = False,
) -> Tensor:
    """Rotate ``x`` in place, and return it; arguments as :func:`rotate`.

    Without gradients, no new tensor is made; with them, autograd records an in-place operation.

    Examples:
        >>> x = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2)
        >>> rotate_(x, torch.tensor([[0.0]]), torch.tensor([[1.0]])) is x
        True
        >>> x.flatten()
        tensor([0., 1.])
    """
    arguments = native_arguments(
        x, cos, sin, offset, position_ids, seq_dim, interleaved, interleaved_out, last
    )
    if arguments is None or not rotate_in_place_op.try_native(x, *arguments):
        options = offset, position_ids, seq_dim, interleaved, interleaved_out, last
        _rotate("rotate_", "x", [x], cos, sin, *options, in_place=True)
    return x


def rotate_qk_(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    offset: int | Tensor = 0,
    position_ids: Tensor | None = None,
    seq_dim: int = -2,
    interleaved: bool = True,
    interleaved_out: bool | None = None,
    last: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys in place, in one pass, and return them; see :func:`rotate_qk`.

    Examples:
        >>> q, k = torch.eye(2).view(2, 1, 1, 1, 2)
        >>> rotated = rotate_qk_(q, k, torch.tensor([[0.0]]), torch.tensor([[1.0]]))
        >>> q.flatten(), k.flatten()
        (tensor([0., 1.]), tensor([-1.,  0.]))
    """
    arguments = native_arguments(
        q, cos, sin, offset, position_ids, seq_dim, interleaved, interleaved_out, last
    )
    if arguments is None or not rotate_qk_in_place_op.try_native(q, k, *arguments):
        options = offset, position_ids, seq_dim, interleaved, interleaved_out, last
        _rotate("rotate_qk_", "qk", [q, k], cos, sin, *options, in_place=True)
    return q, k


def native_rows(
    x: Any, offset: Any, position_ids: Any, seq_dim: int
) -> tuple[Tensor | None, int] | None:
    """The positions and the start of an op, if native code takes these as they are, or None.

    ``x`` is ``(B, H, L, D)``, or tokens ``(T, H, D)``. There must be a position for each token:
    from one for each sequence, which an offset is, native code counts on.
    """
    if position_ids is None:
        if type(offset) is int:
            return None, offset
        by_sequence = isinstance(offset, Tensor) and isinstance(x, Tensor) and x.dim() == 4
        if by_sequence and offset.shape == x.shape[:1] and offset.device == x.device:
            return offset[:, None], 0
        return None
    try:
        length = x.shape[seq_dim if len(x.shape) == 4 else 0]
        is_each = type(offset) is int and not offset and length == position_ids.shape[-1]
    except (AttributeError, IndexError):
        return None
    return (position_ids, 0) if is_each else None


def native_arguments(
    x: Any,
    cos: Any,
    sin: Any,
    offset: Any,
    position_ids: Any,
    seq_dim: Any,
    interleaved: Any,
    interleaved_out: Any,
    last: Any,
) -> tuple[Any, ...] | None:
    """Tables, rows and layout of an op, if native code takes these as they are, or None."""
    out = interleaved if interleaved_out is None else interleaved_out
    if not (type(interleaved) is type(out) is type(last) is bool and type(seq_dim) is int):
        return None
    # Decoding passes an int at every call: skip a function.
    if type(offset) is not int or position_ids is not None:
        rows = native_rows(x, offset, position_ids, seq_dim)
        if rows is None:
            return None
        position_ids, offset = rows
    layout = INTERLEAVED * interleaved + INTERLEAVED_OUT * out + ROTATE_LAST * last
    if seq_dim not in (-2, 2):
        if seq_dim not in (1, -3):
            return None
        layout += TOKENS_FIRST
    return cos, sin, position_ids, offset, layout


def _rotate(
    who: str,
    names: str,
    xs: list[Tensor],
    cos: Tensor,
    sin: Tensor,
    offset: int | Tensor,
    position_ids: Tensor | None,
    seq_dim: int,
    *layout: Any,
    in_place: bool = False,
) -> list[Tensor]:
    checked = check_arguments(who, names, xs, cos, sin, offset, position_ids, seq_dim, *layout)
    ys = rotate_rows(who, *checked, in_place=in_place)
    return swap_heads(ys, seq_dim)


def rotate_rows(
    who: str,
    limit: Limit,
    xs: list[Tensor],
    cos: Tensor,
    sin: Tensor,
    rows: TableRows,
    spec: Spec,
    *,
    in_place: bool = False,
) -> list[Tensor]:
    """Rotate ``xs`` of ``(B, H, L, D)``; errors for rows as in :func:`run_kernel`."""
    if not in_place:
        return run_kernel(who, limit, ops.rotate, xs, cos, sin, rows, spec)
    check_writable(who, xs)
    run_kernel(who, limit, ops.rotate_, xs, cos, sin, rows, spec)
    return xs


def with_heads(x: Tensor) -> Tensor:
    """``x`` of ``(..., L, D)`` as ``(B, H, L, D)``: all axes but the first are heads."""
    if x.dim() < 4:
        return x[None, None] if x.dim() == 2 else x.unsqueeze(1)
    return x if x.dim() == 4 else x.flatten(1, -3)


def without_heads(y: Tensor, x: Tensor) -> Tensor:
    """``y``, made from :func:`with_heads` of ``x``, in the shape of ``x``."""
    return y if x.dim() == 4 else y.reshape(x.shape)


def check_seq_dim(who: str, seq_dim: int) -> int:
    """``seq_dim`` if it is the third or the second dimension of four."""
    if type(seq_dim) is not int or seq_dim not in (-2, 2, 1, -3):
        rule = "seq_dim must be -2 for (B, H, L, D), or 1 for (B, L, H, D)"
        checks.fail(who, rule, seq_dim, "Transpose the tensor first.")
    return seq_dim


def swap_heads(xs: list[Tensor], seq_dim: int) -> list[Tensor]:
    """Swap heads and tokens if ``seq_dim`` is 1; calling this twice restores the order."""
    return [x.transpose(1, 2) for x in xs] if seq_dim in (1, -3) else xs


def check_rotary_input(who: str, name: str, x: Tensor) -> int:
    """``D`` of a floating tensor ``(..., L, D)``, which must be even."""
    checks.float_tensor(who, name, x)
    if x.dim() < 2:
        rule, got = f"{name} must have shape (..., L, D)", f"shape {tuple(x.shape)}"
        checks.fail(who, rule, got, f"Pass {name}[None] for a single token.")
    return checks.even(who, f"the last dimension of {name}", x.shape[-1])


def check_heads(
    who: str, names: str, xs: list[Tensor], head_dim: int | None = None, seq_dim: int = -2
) -> None:
    """Check that ``xs``, one tensor or q and k, are floating, ``(B, H, L, D)``, and agree."""
    q, k = xs[0], xs[-1]
    # One expression, because decoding by other angles than a table's evaluates it at every token.
    if (
        isinstance(q, Tensor)
        and isinstance(k, Tensor)
        and q.dtype in checks.FLOAT_DTYPES
        and k.dtype in checks.FLOAT_DTYPES
        and not (q.is_nested or k.is_nested)
        and len(a := q.shape) == len(b := k.shape) == 4
        and (a[3] == b[3] if head_dim is None else a[3] == head_dim == b[3])
        and a[0] == b[0]
        and a[seq_dim] == b[seq_dim]
        and q.device == k.device
    ):
        return
    for name, x in zip(names, xs, strict=True):
        axes = "(B, L, H, D)" if seq_dim in (1, -3) else "(B, H, L, D)"
        positions = isinstance(x, Tensor) and x.dtype in checks.INT_DTYPES and x.dim() < 4
        if name == "k" and (x is None or positions):
            hint = "Call rotate for one tensor, and pass positions as position_ids=."
            got = None if x is None else checks.describe(x)
            checks.fail(who, f"k must be keys {axes}", got, hint, TypeError)
        checks.float_tensor(who, name, x)
        checks.rank(who, name, x, (4,), axes)
        if head_dim is not None:
            hint = f"Build {who.partition('.')[0]} with that head_dim."
            checks.equal(who, f"head_dim of {name}", x.shape[3], head_dim, hint)
    rule = "q and k must agree in batch, length, head_dim and device"
    got = f"{tuple(q.shape)} on {q.device} and {tuple(k.shape)} on {k.device}"
    hint = "Only the head counts may differ; for (B, L, H, D) pass seq_dim=1."
    if seq_dim in (1, -3):
        hint = "Only the head counts may differ; seq_dim=1 is for (B, L, H, D)."
    if q.shape[0] == k.shape[0] and q.shape[seq_dim] < k.shape[seq_dim]:
        hint = "Rotate and cache only new keys; in cross-attention, rotate q and k each by itself."
    checks.fail(who, rule, got, hint)


def check_tables(who: str, cos: Tensor, sin: Tensor, x: Tensor, columns: str) -> Limit:
    """Refuse tables that do not fit ``x`` or each other; return the limit of positions by them."""
    for name, table in (("cos", cos), ("sin", sin)):
        checks.float_tensor(who, name, table)
        checks.rank(who, name, table, (2, 3), f"(T, {columns}) or (B, T, {columns})")
    if cos.shape != sin.shape or cos.device != x.device or sin.device != x.device:
        got = f"{tuple(cos.shape)} on {cos.device} and {tuple(sin.shape)} on {sin.device}"
        rule = f"cos and sin must have one shape, on {x.device}"
        checks.fail(who, rule, got, "Build both from the same angles.")
    hint = "Pass tables of more rows; for (B, L, H, D), pass seq_dim=1."
    return Limit(cos.shape[-2], "the rows of cos", hint)


def halved(who: str, name: str, table: Tensor, interleaved: bool) -> Tensor:
    """A table ``(..., P)`` from one ``(..., 2P)`` that has each column twice."""
    first, second = (table[..., ::2], table[..., 1::2]) if interleaved else table.chunk(2, -1)
    problem = f"{who}: both numbers of a pair must be the same in {name}."
    if is_readable(table):
        if not torch.equal(first, second):
            raise ValueError(f"{problem}\n  Pass {name} of shape (T, P), or another `interleaved`.")
    elif not in_transform(table):
        device_assert((first == second).all(), problem)
    return first


def check_arguments(
    who: str,
    names: str,
    xs: list[Tensor],
    cos: Tensor,
    sin: Tensor,
    offset: int | Tensor,
    position_ids: Tensor | None,
    seq_dim: int,
    interleaved: bool,
    interleaved_out: bool | None,
    last: bool,
) -> tuple[Limit, list[Tensor], Tensor, Tensor, TableRows, Spec]:
    """Check the arguments of :func:`rotate` and return those of :func:`rotate_rows`."""
    check_heads(who, names, xs, seq_dim=check_seq_dim(who, seq_dim))
    xs = swap_heads(xs, seq_dim)
    x, width = xs[0], xs[0].shape[3]
    limit = check_tables(who, cos, sin, x, "P")
    checks.boolean(who, "interleaved", interleaved)
    if width < 2 * cos.shape[-1] <= 2 * width and cos.shape[-1] % 2 == 0:
        # The tables have each column twice, as Hugging Face's do.
        cos, sin = halved(who, "cos", cos, interleaved), halved(who, "sin", sin, interleaved)
    pairs = cos.shape[-1]
    if pairs == 0 or 2 * pairs > width or (cos.dim() == 3 and cos.shape[0] != x.shape[0]):
        rule = f"cos must have shape (T, P) or ({x.shape[0]}, T, P) with 1 <= P <= {width // 2}"
        checks.fail(who, rule, f"shape {tuple(cos.shape)}", "Pass one column for each pair.")
    rows = rows_of(who, x, offset, position_ids, limit)
    out = checks.optional(checks.boolean, who, "interleaved_out", interleaved_out)
    out = interleaved if out is None else out
    first_channel = width - 2 * pairs if checks.boolean(who, "last", last) else 0
    spec = Spec(interleaved, out, first_channel)
    return limit, xs, cos.resolve_neg(), sin.resolve_neg(), rows, spec
