"""Rotary position embedding (RoPE)."""

from __future__ import annotations

import torch
from torch import Tensor

from posenc import kernels
from posenc._contract import checks
from posenc._contract.memory import apart, check_writable
from posenc.kernels import RowOutOfRange, Rows, Turn
from posenc.numerics.frequencies import Spectrum
from posenc.numerics.tables import cos_sin

# What a caller's own table is called in an error.
_ROWS = "the rows of cos"


def rotary_pos_embedding(
    input_: Tensor,
    position_ids: Tensor | None = None,
    interleaved: bool = True,
    *,
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
    if position_ids is None:
        at = torch.arange(input_.shape[-2], device=input_.device)
    else:
        at = checks.position_ids(who, position_ids, input_.shape, input_.device)
        checks.extent(who, at)
        if at.dim() == 2 and at.shape[0] == 1:
            # One row of positions serves every sequence.
            at = at[0]
    cos, sin = cos_sin(at, spectrum)
    return turn_one(who, _ROWS, input_, cos, sin, Rows(), Turn(interleaved, interleaved))


def rotate(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    offset: int | Tensor = 0,
    position_ids: Tensor | None = None,
    interleaved: bool = True,
    interleaved_out: bool | None = None,
    last: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by tables of your own.

    For tables from another source: learned frequencies, a scaling rule of yours, another
    library's cache. Gradients reach ``q``, ``k``, ``cos`` and ``sin``.

    Args:
        q: Queries ``(B, H, L, D)``.
        k: Keys ``(B, H', L, D)``.
        cos: ``(T, P)``, or ``(B, T, P)`` for tables of each sequence's own. ``2P`` channels of
            the ``D`` are rotated.
        sin: As ``cos``.
        offset: Table row of the first token, or an integer tensor ``(B,)`` of them.
        position_ids: Table row of each token, ``(L,)`` or ``(B, L)``, instead of ``offset``.
        interleaved: Pairs are ``(2i, 2i + 1)`` if true, ``(i, P + i)`` if false.
        interleaved_out: Pairs of the result, if they are to differ (DeepSeek's checkpoints are
            interleaved and come out in halves).
        last: Rotate the last ``2P`` channels instead of the first.

    Returns:
        New tensors like ``q`` and ``k``; channels that are not rotated are copied.

    Examples:
        >>> x = torch.tensor([1.0, 0.0, 5.0]).view(1, 1, 1, 3)
        >>> quarter = torch.tensor([[0.0]]), torch.tensor([[1.0]])
        >>> rotate(x, x, *quarter)[0].flatten()
        tensor([0., 1., 5.])
    """
    rows, turn = _arguments(
        "rotate", (q, k), cos, sin, offset, position_ids, interleaved, interleaved_out, last
    )
    cos, sin = cos.resolve_neg(), sin.resolve_neg()
    a, b = turn_all("rotate", _ROWS, [q, k], cos, sin, rows, turn)
    return a, b


def rotate_(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    offset: int | Tensor = 0,
    position_ids: Tensor | None = None,
    interleaved: bool = True,
    interleaved_out: bool | None = None,
    last: bool = False,
) -> Tensor:
    """Rotate ``x`` of ``(B, H, L, D)`` in place, and return it; arguments as :func:`rotate`.

    One pass without a new tensor where nothing is recorded for a gradient; where something is,
    autograd sees the write as it sees torch's own.

    Examples:
        >>> x = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2)
        >>> rotate_(x, torch.tensor([[0.0]]), torch.tensor([[1.0]])) is x
        True
        >>> x.flatten()
        tensor([0., 1.])
    """
    rows, turn = _arguments(
        "rotate_", (x,), cos, sin, offset, position_ids, interleaved, interleaved_out, last
    )
    _turn_in_place("rotate_", [x], cos, sin, rows, turn)
    return x


def rotate_qk_(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    offset: int | Tensor = 0,
    position_ids: Tensor | None = None,
    interleaved: bool = True,
    interleaved_out: bool | None = None,
    last: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys in place, in one pass, and return them; arguments as :func:`rotate`.

    Examples:
        >>> q, k = torch.eye(2).view(2, 1, 1, 1, 2)
        >>> turned = rotate_qk_(q, k, torch.tensor([[0.0]]), torch.tensor([[1.0]]))
        >>> q.flatten(), k.flatten()
        (tensor([0., 1.]), tensor([-1.,  0.]))
    """
    rows, turn = _arguments(
        "rotate_qk_", (q, k), cos, sin, offset, position_ids, interleaved, interleaved_out, last
    )
    _turn_in_place("rotate_qk_", [q, k], cos, sin, rows, turn)
    return q, k


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    eps: float = 1e-6,
    zero_centered: bool = False,
    offset: int | Tensor = 0,
    position_ids: Tensor | None = None,
    interleaved: bool = True,
    interleaved_out: bool | None = None,
    last: bool = False,
) -> tuple[Tensor, Tensor]:
    r"""RMSNorm of queries and keys, then rotation: in one kernel on CUDA, and in C on the CPU.

    .. math:: x \mapsto R_\phi \left( \frac{x}{\sqrt{\text{mean}(x^2) + \epsilon}} \odot w \right)

    As Qwen3, Gemma 3 and OLMo 2 normalise before they rotate. Computed one precision up and
    rounded once; gradients reach ``q``, ``k`` and the weights.

    Args:
        q: Queries ``(B, H, L, D)``.
        k: Keys ``(B, H', L, D)``.
        q_weight: ``(D,)`` for a norm of each head, ``(H * D,)`` for one over all heads of a
            token (OLMo 2).
        k_weight: ``(D,)`` or ``(H' * D,)``.
        cos: ``(T, P)`` or ``(B, T, P)``, as in :func:`rotate`.
        sin: As ``cos``.
        eps: Added to the mean square.
        zero_centered: Multiply by ``1 + weight`` (Gemma).
        offset: As in :func:`rotate`, and so are the arguments after it.
        position_ids: Table row of each token, instead of ``offset``.
        interleaved: Pairs are ``(2i, 2i + 1)`` if true, ``(i, P + i)`` if false.
        interleaved_out: Pairs of the result, if they are to differ.
        last: Rotate the last ``2P`` channels instead of the first.

    Returns:
        New tensors like ``q`` and ``k``.

    Examples:
        >>> x = torch.tensor([3.0, 4.0]).view(1, 1, 1, 2)
        >>> still = torch.ones(1, 1), torch.zeros(1, 1)
        >>> qk_norm_rope(x, x, torch.ones(2), torch.ones(2), *still)[0].flatten()
        tensor([0.8485, 1.1314])

    References:
        Henry et al., *Query-Key Normalization for Transformers*, 2020.
    """
    who = "qk_norm_rope"
    rows, turn = _arguments(
        who, (q, k), cos, sin, offset, position_ids, interleaved, interleaved_out, last
    )
    cos, sin = cos.resolve_neg(), sin.resolve_neg()
    eps = checks.positive_float(who, "eps", eps)
    shift = 1.0 if checks.boolean(who, "zero_centered", zero_centered) else 0.0
    turned = []
    for name, x, weight in (("q_weight", q, q_weight), ("k_weight", k, k_weight)):
        checks.float_tensor(who, name, weight)
        heads, width = x.shape[1], x.shape[3]
        # One by one: a compiler that leaves sizes open looks for none in a tuple.
        if weight.dim() != 1 or (weight.shape[0] != width and weight.shape[0] != heads * width):
            rule = f"{name} must have shape ({width},) or ({heads * width},)"
            got = f"shape {tuple(weight.shape)}"
            raise ValueError(checks.message(who, rule, got, "One weight serves one channel."))
        if weight.device != x.device:
            rule, got = f"{name} must be on the device of q and k", f"{weight.device}"
            raise ValueError(checks.message(who, rule, got, f"Move it to {x.device}."))
        norm = kernels.Norm(eps, shift, weight.shape[0] != width)
        try:
            turned.append(kernels.norm_rotate(x, weight, cos, sin, rows, turn, norm))
        except RowOutOfRange as error:
            checks.position(who, error.row, _ROWS, cos.shape[-2])
            raise
    return turned[0], turned[1]


def _turn_in_place(
    who: str, xs: list[Tensor], cos: Tensor, sin: Tensor, rows: Rows, turn: Turn
) -> None:
    check_writable(who, xs, recorded_by=(cos, sin))
    read = (cos, sin) if rows.positions is None else (cos, sin, rows.positions)
    cos, sin, *positions = apart(xs, *read)
    rows = Rows(rows.start, *positions)
    try:
        kernels.rotate_(xs, cos.resolve_neg(), sin.resolve_neg(), rows, turn)
    except RowOutOfRange as error:
        checks.position(who, error.row, _ROWS, cos.shape[-2])
        raise


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
        way_out = "Only the head counts may differ; of (B, L, H, D), pass x.transpose(1, 2)."
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
    turn: Turn,
) -> list[Tensor]:
    """Rotate ``xs`` of ``(B, H, L, D)``; a row that the tables lack is a user's error."""
    assert cos.dim() == 2 or cos.shape[0] == xs[0].shape[0], "a table for each sequence"
    try:
        return kernels.rotate(xs, cos, sin, rows, turn)
    except RowOutOfRange as error:
        checks.position(who, error.row, limit_name, cos.shape[-2])
        raise


def turn_one(
    who: str, limit_name: str, x: Tensor, cos: Tensor, sin: Tensor, rows: Rows, turn: Turn
) -> Tensor:
    """Rotate ``x`` of ``(..., L, D)``; positions and 3-D tables belong to its first axis."""
    if x.dim() == 4:
        return turn_all(who, limit_name, [x], cos, sin, rows, turn)[0]
    if x.dim() == 2:
        four = x[None, None]
    elif x.dim() == 3:
        four = x.unsqueeze(1)
    else:
        four = x.flatten(1, -3)
    (y,) = turn_all(who, limit_name, [four], cos, sin, rows, turn)
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


def _arguments(
    who: str,
    xs: tuple[Tensor, ...],
    cos: Tensor,
    sin: Tensor,
    offset: int | Tensor,
    position_ids: Tensor | None,
    interleaved: bool,
    interleaved_out: bool | None,
    last: bool,
) -> tuple[Rows, Turn]:
    for name, x in zip(("q", "k") if len(xs) == 2 else ("x",), xs, strict=True):
        checks.float_tensor(who, name, x)
        checks.rank(who, name, x, (4,), "(B, H, L, D)")
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
    pairs = cos.shape[-1]
    if cos.shape != sin.shape or cos.device != xs[0].device or sin.device != xs[0].device:
        rule = f"cos and sin must have one shape, on {xs[0].device}"
        got = f"{tuple(cos.shape)} on {cos.device} and {tuple(sin.shape)} on {sin.device}"
        raise ValueError(checks.message(who, rule, got, "Build both from the same angles."))
    if pairs == 0 or 2 * pairs > width or (cos.dim() == 3 and cos.shape[0] != batch):
        rule = f"cos must have shape (T, P) or ({batch}, T, P) with 1 <= P <= {width // 2}"
        got = f"shape {tuple(cos.shape)}"
        way_out = "One column serves a pair of channels."
        if pairs == width:
            way_out += " Of tables that hold each twice, pass cos[..., :P], or cos[..., ::2]."
        raise ValueError(checks.message(who, rule, got, way_out))
    rows = rows_of(who, xs[0], offset, position_ids, _ROWS, cos.shape[-2])
    if rows.positions is None:
        checks.sequence(who, rows.start, length, _ROWS, cos.shape[-2])
    checks.boolean(who, "interleaved", interleaved)
    if interleaved_out is None:
        interleaved_out = interleaved
    checks.boolean(who, "interleaved_out", interleaved_out)
    column = width - 2 * pairs if checks.boolean(who, "last", last) else 0
    return rows, Turn(interleaved, interleaved_out, column)
