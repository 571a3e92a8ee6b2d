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


class Call(NamedTuple):
    """The checked arguments of an attention, beside q, k and v; the inputs of its op.

    In a block of a longer sequence, see `biased.attend_block`, the queries' own indices are past
    the keys, or below zero; sums are then longer than the keys.
    """

    values: Tensor | None  # slopes [1 or B, H], table [H, R], or sums [1 or B, H, K or more]
    starts: Tensor | None  # key index of the first query, int64 [1 or B]; `start` if None
    first: Tensor | None  # first and last key of each key's document, int64 [1 or B, K]
    last: Tensor | None
    kind: str  # none, slopes, table or sums
    zero: int  # the table's column of distance zero
    start: int
    scale: float
    causal: bool
    # Whether far keys are left out. If false, `first` and `last` at a query's own key may be the
    # ends of any range, as in `biased.attend_ranges`; if true, they are those of a document.
    prune: bool
    window: Window | None = None  # keys before a query's own that it sees, and keys after it

    def spans(self, queries: int, keys: int, device: torch.device) -> Spans:
        """The keys that each query sees."""
        offset = self.start if self.starts is None else self.starts
        ends = None
        if self.first is not None and self.last is not None:
            ends = self.first, self.last
        how: Any = {"causal": self.causal, "window": self.window, "device": device}
        return spans(queries, keys, offset=offset, ends=ends, **how)


def check_bias(who: str, bias: object, heads: int, keys: int) -> None:
    """Refuse a bias that is not for these heads and keys."""
    if bias is None or isinstance(bias, RowBias):
        return
    if not isinstance(bias, (Slopes, DistanceTable, RunningSum)):
        rule = "bias must be Slopes, DistanceTable, RunningSum, RowBias or None"
        hint = "Wrap slopes as posenc.attention.Slopes(slopes), say."
        checks.fail(who, rule, checks.describe(bias), hint, TypeError)
    values = bias.values
    if isinstance(bias, Slopes):
        qk_checks.check_slopes(who, values)
        if values.shape[-1] != heads:
            rule = f"q must have {values.shape[-1]} heads, one for each slope"
            checks.fail(who, rule, heads, "Pass the slopes of these heads.")
        return
    name = "table" if isinstance(bias, DistanceTable) else "sums"
    checks.float_tensor(who, name, values)
    if isinstance(bias, DistanceTable):
        checks.integer(who, "zero", bias.zero, least=0)
        if values.dim() != 2 or values.shape[0] != heads or bias.zero >= values.shape[1]:
            rule = f"table must have shape ({heads}, R), with R above zero={bias.zero}"
            hint = "Pass a row for each head, with a column for distance zero."
            checks.fail(who, rule, f"shape {tuple(values.shape)}", hint)
    elif values.dim() not in (2, 3) or values.shape[-2:] != (heads, keys):
        rule = f"sums must have shape ({heads}, {keys}) or (B, {heads}, {keys})"
        hint = "Pass one for each head and key, those in the cache included."
        checks.fail(who, rule, f"shape {tuple(values.shape)}", hint)


def heads_of(bias: Slopes | DistanceTable | RunningSum) -> int:
    """The heads of a bias; any number if its shape is wrong, which :func:`check_bias` refuses."""
    shape = getattr(getattr(bias, "values", None), "shape", ()) or (0,)
    return int(shape[-1] if isinstance(bias, Slopes) else shape[max(len(shape) - 2, 0)])


def check_sequences(who: str, bias: object, **others: Any) -> bool:
    """Whether a checked bias or ``others`` have a batch axis; they must agree on its size."""
    given: Any = {"slopes": bias.values} if isinstance(bias, Slopes) else {}
    if isinstance(bias, RunningSum) and bias.values.dim() == 3:
        given["sums"] = bias.values.flatten(1)
    return qk_checks.check_batches(who, **given, **others)


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
        query_offset: Key index of the first query, ``K - Q`` if None: an int, or an integer tensor
            ``()`` or ``(B,)``.
        document_ids: Ids ``(K,)`` or ``(B, K)``. A run of equal ids is a document, and a query
            sees only its own.
        window: As in :func:`biased_attention`.
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
    queries, keys = qk_checks.check_lengths(who, q_len, k_len)
    checks.boolean(who, "causal", causal)
    checks.float_dtype(who, "dtype", dtype)
    if bias is None:
        rule = "bias must be Slopes, DistanceTable, RunningSum or RowBias"
        checks.fail(who, rule, None, "Pass Slopes(torch.zeros(heads)) for none.", TypeError)
    if not isinstance(bias, RowBias):
        check_bias(who, bias, heads_of(bias), keys)
        device = bias.values.device
    start = qk_checks.check_query_offset(who, query_offset, queries, keys, device or "cpu")
    ids = qk_checks.check_key_ids(who, "document_ids", document_ids, keys, device or "cpu")
    batched = check_sequences(who, bias, query_offset=start, document_ids=ids)
    ends = document_ends(ids)
    how: Any = {"causal": causal, "window": qk_checks.check_window(who, window)}
    seen = spans(queries, keys, offset=start, ends=ends, device=device or "cpu", **how)
    index = torch.arange(keys, device=seen.own.device)
    matrix, hidden = matrix_of(bias, seen.own, index, dtype), hidden_keys(seen, index)
    matrix = matrix.to(dtype).masked_fill(hidden, float("-inf"))
    return matrix if batched or len(matrix) > 1 else matrix[0]


def matrix_of(bias: Bias, own: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    """The bias of queries at key indices ``own`` to keys at ``index``, ``[1 or B, H, n, k]``."""
    if isinstance(bias, RowBias):
        return bias.rows(own, index)
    kind, values, zero = stored(bias, dtype)
    return bias_rows(kind, values, zero, own, index)


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
