"""The biases that attention takes: a few numbers from which every score's bias follows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, TypeAlias

import torch
from torch import Tensor

from posenc._contract import checks, qk_checks
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


class RowBias(NamedTuple):
    """Any other bias, computed for a few queries at a time.

    Attributes:
        rows: A function of the queries' key indices, int64 ``[1 or B, n]``, and of key indices,
            ``[k]``, that returns the bias, ``[1 or B, H, n, k]``. Both are consecutive; keys that
            none of the queries see may be left out. It is called again in the backward pass, and
            must then return the same.
    """

    rows: Callable[[Tensor, Tensor], Tensor]


class Products(NamedTuple):
    """Products with vectors of distances, times the scale: :func:`relative_terms` has the formula.

    Attributes:
        q: Queries for the products with ``for_queries``, ``(B, H, Q, D)``.
        k: Keys for those with ``for_keys``, ``(B, Hk, K, D)``.
        rows: The rows of the vectors for distances.
        for_queries: ``(R, H D or D)``, in at least float32; None for none.
        for_keys: In the same way.
        shift: Vectors added to the queries of the attention in their products with keys,
            ``(H, D)``; None for none.
        least: Distances below this have the row of this one.
        most: Distances above this have the row of this one.
    """

    q: Tensor
    k: Tensor
    rows: Callable[[Tensor], Tensor]
    for_queries: Tensor | None
    for_keys: Tensor | None
    shift: Tensor | None
    least: int
    most: int


class FireNetwork(NamedTuple):
    r"""FIRE's bias :math:`f_h(x)`, with one hidden layer and ReLU.

    :math:`x = \ln(c\,|i - j| + 1) / \ln(c \max(L, i) + 1)`, where :math:`i` counts from the
    beginning of the query's document. All numbers are in at least float32.

    Attributes:
        c: ``(1,)``, whose absolute value counts, if it is not below 1e-15.
        threshold: :math:`L`, in the same way.
        units: The ``U`` hidden units before ReLU for :math:`x = 0`, and for 1, ``(2, U)``.
        outputs: Those of each head with no unit, and with each unit at 1, ``(1 + U, H)``.
    """

    c: Tensor
    threshold: Tensor
    units: Tensor
    outputs: Tensor


class CopeLevels(NamedTuple):
    """CoPE's bias: levels at the positions that gates of the scores count.

    Attributes:
        q: Queries of the attention.
        k: Keys of the attention.
        values: The bias of queries at each whole position, ``(B, H, Q, P)``.
    """

    q: Tensor
    k: Tensor
    values: Tensor


# What kernels compute tile by tile, with the scores.
Terms: TypeAlias = Products | FireNetwork | CopeLevels
TERMS = (Products, FireNetwork, CopeLevels)
Bias: TypeAlias = Slopes | DistanceTable | RunningSum | RowBias | Terms
"""The type of whatever :func:`biased_attention` takes as a bias: :class:`Slopes`,
:class:`DistanceTable`, :class:`RunningSum`, :class:`RowBias`, and what :func:`relative_terms` and
``as_bias`` of a module return."""
# Biases without numbers in a `Call`: by torch operations a few queries at a time, but for kernels.
BY_ROWS = (RowBias, *TERMS)


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
        """The call of checked arguments; that of a bias by rows has no values."""
        kind, values, zero = stored(bias, q.dtype)
        if values is not None and values.device != q.device:
            values = values.to(q.device)
        starts, begin = (start.reshape(-1), 0) if isinstance(start, Tensor) else (None, start)
        return cls(values, starts, first, last, kind, zero, begin, scale, causal, prune, window)

    @classmethod
    def from_arguments(
        cls,
        values: Tensor | None,
        starts: Tensor | None,
        first: Tensor | None,
        last: Tensor | None,
        how: int,
        zero: int,
        start: int,
        scale: float,
        left: int,
        right: int,
    ) -> Call:
        """The call of the arguments of an op, unchecked."""
        window = None if left == right == -1 else (left, right)
        kind, causal, prune = KINDS[how & 3], bool(how & CAUSAL), bool(how & PRUNE)
        call = cls(values, starts, first, last, kind, zero, start, scale, causal, prune, window)
        return call._replace(chunked=bool(how & CHUNKED), to_values=bool(how & TO_VALUES))

    def arguments(self) -> tuple[Any, ...]:
        """The arguments of an op of a bias with values."""
        return self.values, *self.arguments_without_values()

    def arguments_without_values(self) -> tuple[Any, ...]:
        """The arguments of an op of another bias."""
        how = KINDS.index(self.kind) | CAUSAL * self.causal | PRUNE * self.prune
        how |= CHUNKED * self.chunked | TO_VALUES * self.to_values
        window = self.window or (-1, -1)
        return self.starts, self.first, self.last, how, self.zero, self.start, self.scale, *window

    def spans(self, queries: int, keys: int, device: torch.device) -> Spans:
        """The keys that each query sees."""
        offset = self.start if self.starts is None else self.starts
        ends = None if self.first is None or self.last is None else (self.first, self.last)
        how: Any = {"causal": self.causal, "window": self.window, "device": device}
        return spans(queries, keys, offset=offset, ends=ends, **how)


# What an error says instead of a long repr, or of a class that users cannot import.
_ORIGINS = {
    RowBias: "a RowBias",
    Products: "what relative_terms returns",
    FireNetwork: "the bias of FIRE",
    CopeLevels: "the bias of CoPE",
}


def described(bias: object) -> str:
    """A bias, or what was passed for one, short enough for an error message."""
    return _ORIGINS.get(type(bias)) or checks.describe(bias)


def check_bias(who: str, bias: object, heads: int | None, keys: int) -> None:
    """Refuse a bias that is not for these heads, of any number if None, and keys."""
    if bias is None or isinstance(bias, BY_ROWS):
        return
    if not isinstance(bias, (Slopes, DistanceTable, RunningSum)):
        rule = (
            "bias must be Slopes, DistanceTable, RunningSum, RowBias, what relative_terms or "
            "as_bias of a module returns, or None"
        )
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


def refuse_sharded(who: str, kind: str) -> NoReturn:
    """Refuse DTensors with a bias of this kind: a rank has no numbers for its part of it."""
    rule = "bias must be Slopes, DistanceTable, RunningSum or None where q is a DTensor"
    checks.fail(who, rule, kind, "Call the function on local tensors.", TypeError)


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


def stored(bias: Bias | None, dtype: torch.dtype = torch.float32) -> tuple[str, Tensor | None, int]:
    """The fields `kind`, `values` and `zero` of a :class:`Call`, in at least float32.

    ``dtype`` is that of the scores: a slope times a distance is as precise as they are.
    """
    if bias is None or isinstance(bias, BY_ROWS):
        return "none", None, 0
    # A product with a distance, or a difference, has more bits than a half.
    wide = torch.promote_types(torch.promote_types(bias.values.dtype, dtype), torch.float32)
    values = bias.values.to(wide)
    if isinstance(bias, DistanceTable):
        return "table", values, bias.zero
    if isinstance(bias, Slopes):
        return "slopes", values if values.dim() == 2 else values[None], 0
    return "sums", values if values.dim() == 3 else values[None], 0
