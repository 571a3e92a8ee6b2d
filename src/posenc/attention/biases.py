"""The biases that attention takes: a few numbers from which every score's bias follows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from posenc._contract import checks, qk_checks
from posenc._contract.tracing import is_exporting
from posenc.numerics.spans import Spans, Window, document_ends, spans


class Slopes(NamedTuple):
    r"""A line for each head: :math:`-m\,|i - j|` for query :math:`i` and key :math:`j`.

    Attributes:
        values: :math:`m`, ``(H,)`` or ``(B, H)``.
    """

    values: Tensor


class DistanceTable(NamedTuple):
    r"""A number for each head and distance: :math:`t_{i - j + z}`, clipped at both ends.

    Attributes:
        values: :math:`t`, ``(H, R)``. A distance past either end has the number at that end.
        zero: :math:`z`, the column of distance zero; earlier columns are for later keys.
    """

    values: Tensor
    zero: int = 0


class RunningSum(NamedTuple):
    r"""The difference of a running sum: :math:`c_i - c_j`.

    Attributes:
        values: :math:`c`, one number for each head and key, ``(H, K)`` or ``(B, H, K)``. Use
            float64: the difference of large sums loses bits.
    """

    values: Tensor


class Terms(NamedTuple):
    r"""What a kernel adds to the scores: products with vectors of distances, a network, levels.

    For the products see :func:`relative_terms`. The network is :math:`f_h(x)`, with one hidden
    layer and ReLU, of :math:`x = \ln(c\,|i - j| + 1) / \ln(c \max(L, i) + 1)`, where :math:`i`
    counts from the beginning of the query's document. Levels are those of :class:`~posenc.CoPE`,
    and exclude both.

    Attributes:
        q: Queries for the products with keys, if they are not those of the attention.
        p: Queries for those with the vectors ``for_queries``.
        m: Keys for those with ``for_keys``.
        rows: The rows of the vectors for distances.
        for_queries: ``(R, H D or D)``, or None.
        for_keys: In the same way.
        least: Distances below this have the row of this one.
        most: Distances above this have the row of this one.
        network: ``(2 + 2 U + (1 + U) H,)``: :math:`c` and :math:`L`, of which the absolute values
            count, if they are not below 1e-15; the ``U`` hidden units for :math:`x = 0`, and for 1,
            before ReLU; and the output of each head with no unit, and with each unit at 1.
        levels: ``(B, H, Q, P)``, the bias of queries at each whole position.
    """

    q: Tensor | None = None
    p: Tensor | None = None
    m: Tensor | None = None
    rows: Callable[[Tensor], Tensor] | None = None
    for_queries: Tensor | None = None
    for_keys: Tensor | None = None
    least: int = 0
    most: int = 0
    network: Tensor | None = None
    levels: Tensor | None = None


class RowBias(NamedTuple):
    """Any other bias, computed for a few queries at a time.

    Attributes:
        rows: A function of the queries' key indices, int64 ``[1 or B, n]``, and of key indices,
            ``[k]``, that returns the bias, ``[1 or B, H, n, k]``. Both are consecutive; keys that
            none of the queries see may be left out. It is called again in the backward pass, and
            must then return the same.
        terms: The same for a kernel, if there is one; :func:`relative_terms` sets it.
    """

    rows: Callable[[Tensor, Tensor], Tensor]
    terms: Terms | None = None


Bias: TypeAlias = Slopes | DistanceTable | RunningSum | RowBias


# Bits of the argument `how` of the ops, after the index of the bias's kind.
KINDS = ("none", "slopes", "table", "sums")
CAUSAL, PRUNE, CHUNKED, TO_VALUES = 4, 8, 16, 32


class Call(NamedTuple):
    """The checked arguments of an attention, in addition to q, k and v.

    In a block of a longer sequence the queries' key indices are past the keys, or below zero; sums
    are then longer than the keys.
    """

    values: Tensor | None  # slopes [1 or B, H], table [H, R], or sums [1 or B, H, K or more]
    starts: Tensor | None  # key index of the first query, int64 [1 or B]; `start` if None
    first: Tensor | None  # first and last key of each key's document, int64 [1 or B, K]
    last: Tensor | None
    kind: str  # one of KINDS
    zero: int  # the table's column of distance zero
    start: int
    scale: float
    causal: bool
    # Whether far keys are left out. If false, `first` and `last` at a query's key may be the ends
    # of any range, as in `biased.attend_ranges`; if true, they are those of a document.
    prune: bool
    window: Window | None = None  # keys before a query's own that it sees, and keys after it
    chunked: bool = False  # whether Triton's kernels are left out
    to_values: bool = False  # whether the backward pass computes the gradient of `values`

    @classmethod
    def of(
        cls,
        bias: Bias | None,
        q: Tensor,
        *,
        start: int | Tensor,
        scale: float,
        causal: bool,
        prune: bool = False,
        first: Tensor | None = None,
        last: Tensor | None = None,
        window: Window | None = None,
    ) -> Call:
        """The call of checked arguments; that of a :class:`RowBias` has no values."""
        kind, values, zero = stored(None if isinstance(bias, RowBias) else bias, q.dtype)
        if values is not None and values.device != q.device:
            values = values.to(q.device)
        starts, begin = (start.reshape(-1), 0) if isinstance(start, Tensor) else (None, start)
        return cls(values, starts, first, last, kind, zero, begin, scale, causal, prune, window)

    @classmethod
    def from_arguments(cls, *arguments: Any) -> Call:
        """The call of the arguments of an op, unchecked."""
        values, starts, first, last, how, zero, start, scale, left, right = arguments
        window = None if left == right == -1 else (left, right)
        kind, causal, prune = KINDS[how & 3], bool(how & CAUSAL), bool(how & PRUNE)
        call = cls(values, starts, first, last, kind, zero, start, scale, causal, prune, window)
        return call._replace(chunked=bool(how & CHUNKED), to_values=bool(how & TO_VALUES))

    def arguments(self) -> tuple[Any, ...]:
        """The arguments of an op."""
        how = KINDS.index(self.kind) | CAUSAL * self.causal | PRUNE * self.prune
        how |= CHUNKED * self.chunked | TO_VALUES * self.to_values
        tensors = self.values, self.starts, self.first, self.last
        return *tensors, how, self.zero, self.start, self.scale, *(self.window or (-1, -1))

    def spans(self, queries: int, keys: int, device: torch.device) -> Spans:
        """The keys that each query sees."""
        offset = self.start if self.starts is None else self.starts
        ends = None if self.first is None or self.last is None else (self.first, self.last)
        how: Any = {"causal": self.causal, "window": self.window, "device": device}
        return spans(queries, keys, offset=offset, ends=ends, **how)


def check_bias(who: str, bias: object, heads: int | None, keys: int) -> None:
    """Refuse a bias that is not for these heads, of any number if None, and keys."""
    if bias is None or isinstance(bias, RowBias):
        return
    if not isinstance(bias, (Slopes, DistanceTable, RunningSum)):
        rule = "bias must be Slopes, DistanceTable, RunningSum, RowBias or None"
        hint = "Pass Slopes(slopes), or module.as_bias(k_len); a matrix is for attn_mask."
        checks.fail(who, rule, checks.describe(bias), hint, TypeError)
    values = bias.values
    if isinstance(bias, Slopes):
        qk_checks.check_slopes(who, values)
        if heads is not None and values.shape[-1] != heads:
            rule = f"q must have {values.shape[-1]} heads, one for each slope"
            checks.fail(who, rule, heads, "Pass the slopes of these heads.")
        return
    checks.float_tensor(who, "table" if isinstance(bias, DistanceTable) else "sums", values)
    shape = values.shape
    if isinstance(bias, DistanceTable):
        checks.integer(who, "zero", bias.zero, least=0)
        heads = shape[0] if heads is None and shape else heads
        if len(shape) != 2 or shape[0] != heads or bias.zero >= shape[1]:
            rule = f"table must have shape ({heads}, R), with R above zero={bias.zero}"
            hint = "Pass a row for each head, with a column for distance zero."
            checks.fail(who, rule, f"shape {tuple(shape)}", hint)
    else:
        heads = shape[-2] if heads is None and len(shape) > 1 else heads
        if len(shape) not in (2, 3) or shape[-2:] != (heads, keys):
            rule = f"sums must have shape ({heads}, {keys}) or (B, {heads}, {keys})"
            hint = "Pass one for each head and key, those in the cache included."
            checks.fail(who, rule, f"shape {tuple(shape)}", hint)


class Places(NamedTuple):
    """Where the queries are among the keys, and which keys they see, all checked."""

    queries: int
    keys: int
    causal: bool
    start: int | Tensor  # key index of the first query, [] or [B]
    ids: Tensor | None  # of the keys' documents, [K] or [B, K]
    window: Window | None
    device: torch.device | str
    batched: bool  # whether any argument has a batch axis

    def spans(self) -> Spans:
        """The keys that each query sees."""
        how: Any = {"causal": self.causal, "window": self.window, "device": self.device}
        ends = document_ends(self.ids)
        return spans(self.queries, self.keys, offset=self.start, ends=ends, **how)


def check_places(
    who: str,
    bias: object,
    q_len: int,
    k_len: int | None,
    causal: bool,
    query_offset: int | Tensor | None,
    document_ids: Tensor | None,
    window: int | tuple[int, int] | None,
    device: torch.device | str,
    batch: int | None = None,
    **others: Tensor | None,
) -> Places:
    """Check what attention, matrices and mods take alike.

    A checked bias and ``others`` must agree with the rest on the number of sequences, ``batch`` if
    that is known.
    """
    queries, keys = qk_checks.check_lengths(who, q_len, k_len)
    checks.boolean(who, "causal", causal)
    start = qk_checks.check_query_offset(who, query_offset, queries, keys, device)
    ids = qk_checks.check_key_ids(who, "document_ids", document_ids, keys, device)
    given: Any = {"query_offset": start, "document_ids": ids, **others}
    if isinstance(bias, Slopes):
        given["slopes"] = bias.values
    elif isinstance(bias, RunningSum) and bias.values.dim() == 3:
        given["sums"] = bias.values.flatten(1)
    batched = qk_checks.check_batches(who, batch, **given)
    sides = qk_checks.check_window(who, window)
    return Places(queries, keys, causal, start, ids, sides, device, batched)


def bias_rows(kind: str, values: Tensor | None, zero: int, own: Tensor, index: Tensor) -> Tensor:
    """The bias of queries at key indices ``own``, ``[1 or B, n]``, to keys at ``index``, ``[k]``.

    ``[1 or B, H, n, k]`` in the dtype of ``values``; nothing is hidden.
    """
    if values is None:
        return own.new_zeros((1, 1, 1, 1), dtype=torch.float32)
    distance = own[:, None, :, None] - index
    if kind == "slopes":
        return -values[..., None, None] * distance.abs()
    if kind == "table":
        return _table_rows(values, zero, own, index)
    heads, batch = values.shape[1], own.shape[0] if values.shape[0] == 1 else values.shape[0]
    at = own[:, None].expand(batch, heads, -1)
    sums = values.expand(batch, -1, -1)
    return sums.gather(2, at)[..., None] - sums[:, :, index][:, :, None]


def _table_rows(table: Tensor, zero: int, own: Tensor, index: Tensor) -> Tensor:
    """One line of numbers for all distances, and then a row of it for each query."""
    count, keys = own.shape[1], index.shape[0]
    if not count:
        return table.new_zeros((1, table.shape[0], 0, keys))
    line = own[:, -1:] - index[:1] - torch.arange(count + keys, device=own.device)
    # The gradient of indexing may depend on the order of threads.
    columns = (line + zero).clamp(0, table.shape[1] - 1)
    values = torch.nn.functional.embedding(columns, table.T).mT
    return skew(values[:, :, None].expand(-1, -1, count, -1), keys)


def skew(x: Tensor, width: int) -> Tensor:
    """Move row ``r`` of ``x``, ``[..., n, w]``, left by ``n - 1 - r``, and keep ``width`` columns.

    ``w`` is at least ``n + width``. Slices and views do it, so gradients are summed in one order.
    """
    n, w = x.shape[-2:]
    moved = x.flatten(-2)[..., n - 1 : n - 1 + n * (w - 1)]
    rows: Tensor = moved.unflatten(-1, (n, w - 1))
    return rows[..., :width]


def relative_bias(
    bias: Bias,
    q_len: int,
    k_len: int | None = None,
    *,
    causal: bool = True,
    query_offset: int | Tensor | None = None,
    document_ids: Tensor | None = None,
    window: int | tuple[int, int] | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """The whole matrix of a bias, to look at, or for an attention of your own.

    Args:
        bias: The bias.
        q_len: Queries ``Q``.
        k_len: Keys ``K``, at least ``Q``; ``Q`` if None.
        causal: Whether later keys get ``-inf``.
        query_offset: As in :func:`biased_attention`, and so are the next two.
        document_ids: Ids ``(K,)`` or ``(B, K)``.
        window: A sliding window.
        dtype: A floating dtype for the result.
        device: The device of a :class:`RowBias`; other biases are on that of their values.

    Returns:
        Tensor of shape ``(H, Q, K)``, or ``(B, H, Q, K)`` if an argument has a batch axis.

    Examples:
        >>> relative_bias(DistanceTable(torch.tensor([[0.0, -1.0, -3.0]])), 4)
        tensor([[[ 0., -inf, -inf, -inf],
                 [-1.,  0., -inf, -inf],
                 [-3., -1.,  0., -inf],
                 [-3., -3., -1.,  0.]]])
    """
    who = "relative_bias"
    checks.float_dtype(who, "dtype", dtype)
    if bias is None:
        rule = "bias must be Slopes, DistanceTable, RunningSum or RowBias"
        checks.fail(who, rule, None, "Pass Slopes(torch.zeros(heads)) for none.", TypeError)
    if not isinstance(bias, RowBias):
        check_bias(who, bias, None, q_len if k_len is None else k_len)
        device = bias.values.device
    given = q_len, k_len, causal, query_offset, document_ids, window, device or "cpu"
    places = check_places(who, bias, *given)
    seen = places.spans()
    index = torch.arange(places.keys, device=seen.own.device)
    if isinstance(bias, RowBias):
        matrix = bias.rows(seen.own, index)
    else:
        matrix = bias_rows(*stored(bias, dtype), seen.own, index)
    matrix = matrix.to(dtype).masked_fill(hidden_keys(seen, index), float("-inf"))
    return matrix if places.batched or len(matrix) > 1 else matrix[0]


def stored(bias: Bias | None, dtype: torch.dtype = torch.float32) -> tuple[str, Tensor | None, int]:
    """The fields `kind`, `values` and `zero` of a :class:`Call`, in at least float32.

    ``dtype`` is that of the scores: a slope times a distance is as precise as they are.
    """
    if bias is None:
        return "none", None, 0
    assert not isinstance(bias, RowBias)
    # A product with a distance, or a difference, has more bits than a half.
    wide = torch.promote_types(torch.promote_types(bias.values.dtype, dtype), torch.float32)
    values = bias.values.to(wide)
    if isinstance(bias, DistanceTable):
        return "table", values, bias.zero
    if isinstance(bias, Slopes):
        return "slopes", values if values.dim() == 2 else values[None], 0
    return "sums", values if values.dim() == 3 else values[None], 0


def hidden_keys(seen: Spans, index: Tensor) -> Tensor:
    """Whether a query does not see the keys at ``index``, ``[1 or B, 1, Q, k]``."""
    first, last = seen.first[:, None, :, None], seen.last[:, None, :, None]
    return (index < first) | (index > last)


def for_each_query_head(x: Tensor, heads: int) -> Tensor:
    """Keys or values of ``heads`` heads of queries, ``[B, H, K, D]``, that share those of ``x``."""
    shared = heads // x.shape[1]
    if not is_exporting():
        return x.repeat_interleave(shared, 1)
    # torch 2.11 takes two axes that become one for a constraint on the lengths.
    return x.index_select(1, torch.arange(heads, device=x.device) // shared)
