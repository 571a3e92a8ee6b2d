"""The biases that attention takes, a file for each kind."""

from __future__ import annotations

from typing import NoReturn, TypeAlias, get_args

from torch import Tensor

from posenc._contract import checks
from posenc.ops.attention.biases.cope import CopeLevels, LevelFields
from posenc.ops.attention.biases.fire import FireNetwork, NetworkFields
from posenc.ops.attention.biases.none import NoBias
from posenc.ops.attention.biases.row_bias import RowBias
from posenc.ops.attention.biases.slopes import Slopes
from posenc.ops.attention.biases.sums import RunningSum
from posenc.ops.attention.biases.table import DistanceTable
from posenc.ops.attention.biases.vectors import Products, VectorFields

__all__ = [
    "BY_ROWS",
    "COUNTED",
    "KINDS",
    "NUMBERS",
    "PRUNED",
    "TERMS",
    "Bias",
    "CopeLevels",
    "DistanceTable",
    "Fields",
    "FireNetwork",
    "LevelFields",
    "NetworkFields",
    "NoBias",
    "Numbers",
    "Products",
    "RowBias",
    "RunningSum",
    "Slopes",
    "Terms",
    "VectorFields",
    "bias_of",
    "check_bias",
    "described",
    "numbers_of",
    "refuse_sharded",
]

# Biases that follow from a few numbers, without queries and keys: an op takes them as they are.
Numbers: TypeAlias = Slopes | DistanceTable | RunningSum
NUMBERS = (Slopes, DistanceTable, RunningSum)
# What kernels compute tile by tile, with the scores.
Terms: TypeAlias = Products | FireNetwork | CopeLevels
TERMS = (Products, FireNetwork, CopeLevels)
# What the ops have of a bias. The file of each names its ops: posenc::attend_slopes.
Fields: TypeAlias = NoBias | Numbers | VectorFields | NetworkFields | LevelFields
KINDS: dict[type[Fields], str] = {
    kind: kind.__module__.rpartition(".")[2] for kind in get_args(Fields)
}
Bias: TypeAlias = Numbers | RowBias | Terms
"""The type of whatever :func:`biased_attention` takes as a bias: :class:`Slopes`,
:class:`DistanceTable`, :class:`RunningSum`, :class:`RowBias`, and what :func:`relative_terms` and
``as_bias`` of a module return."""
# Biases that are computed for a few queries at a time where there is no kernel.
BY_ROWS = (RowBias, *TERMS)
# Those by which far keys may be left out, and what gates of scores count, so that it is added when
# keys are hidden.
PRUNED = (Slopes, RunningSum)
COUNTED = (CopeLevels,)

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
    if not isinstance(bias, NUMBERS):
        rule = (
            "bias must be Slopes, DistanceTable, RunningSum, RowBias, what relative_terms or "
            "as_bias of a module returns, or None"
        )
        hint = "Pass Slopes(slopes), or module.as_bias(k_len); a matrix is for attn_mask."
        checks.fail(who, rule, checks.describe(bias), hint, TypeError)
    bias.check(who, heads, keys)


def refuse_sharded(who: str, kind: str) -> NoReturn:
    """Refuse DTensors with a bias of this kind: a rank has no numbers for its part of it."""
    rule = "bias must be Slopes, DistanceTable, RunningSum or None where q is a DTensor"
    checks.fail(who, rule, kind, "Call the function on local tensors.", TypeError)


def numbers_of(bias: Bias | None, q: Tensor) -> NoBias | Numbers:
    """What an op has of a bias that it takes as it is, on the device of the queries."""
    if not isinstance(bias, NUMBERS):
        return NoBias()
    fields = bias.as_fields(q.dtype)
    values = fields.values
    return fields if values.device == q.device else fields._replace(values=values.to(q.device))


def bias_of(fields: Fields, q: Tensor, k: Tensor) -> NoBias | Bias:
    """The bias of an op's fields."""
    if isinstance(fields, (NoBias, *NUMBERS)):
        return fields
    return fields.as_bias(q, k)
