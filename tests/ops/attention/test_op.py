"""The op of attention: it keeps torch's rules, and refuses what does not fit, whoever calls it."""

import pytest
import torch

from posenc.ops.attention import op
from posenc.ops.attention.biases import (
    KINDS,
    DistanceTable,
    Fields,
    NoBias,
    RunningSum,
    Slopes,
)
from posenc.ops.attention.biases.kind import axes_of, fits
from posenc.ops.attention.call import Call
from support.attention import call_of, numbers_of

B, H, HK, Q, K, D, DV = 2, 4, 2, 3, 5, 8, 6
IDS, RANGES = torch.zeros(B, K, dtype=torch.int64), torch.zeros(B, H, 2, dtype=torch.int32)
MISFITS = {
    "q-of-three-axes": {"q": (H, Q, D)},
    "q-of-integers": {"q": torch.ones(B, H, Q, D, dtype=torch.int64)},
    "q-elsewhere": {"q": torch.ones(B, H, Q, D, device="meta")},
    "q-of-other-channels": {"q": (B, H, Q, D + 1)},
    "k-of-fewer-sequences": {"k": (1, HK, K, D)},
    "k-without-heads": {"k": (B, 0, K, D), "v": (B, 0, K, DV)},
    "k-of-heads-that-do-not-divide": {"k": (B, 3, K, D), "v": (B, 3, K, DV)},
    "k-of-halves": {"k": torch.ones(B, HK, K, D, dtype=torch.bfloat16)},
    "no-keys": {"k": (B, HK, 0, D), "v": (B, HK, 0, DV)},
    "v-of-fewer-keys": {"v": (B, HK, K - 1, DV)},
    "slopes-of-integers": {"bias": Slopes(torch.ones(1, H, dtype=torch.int64))},
    "slopes-elsewhere": {"bias": Slopes(torch.ones(1, H, device="meta"))},
    "slopes-of-one-axis": {"bias": Slopes(torch.ones(H))},
    "slopes-of-more-sequences": {"bias": Slopes(torch.ones(3, H))},
    "table-of-fewer-heads": {"bias": DistanceTable(torch.ones(1, 9))},
    "table-without-columns": {"bias": DistanceTable(torch.ones(H, 0))},
    "zero-past-the-table": {"bias": DistanceTable(torch.ones(H, 9), 9)},
    "sums-of-fewer-keys": {"bias": RunningSum(torch.ones(1, H, K - 1))},
    "sums-of-two-axes": {"bias": RunningSum(torch.ones(H, K))},
    "starts-of-more-sequences": {"starts": torch.zeros(3, dtype=torch.int64)},
    "starts-of-32-bits": {"starts": torch.zeros(B, dtype=torch.int32)},
    "first-without-last": {"first": IDS},
    "first-of-fewer-keys": {"first": IDS[:, 1:], "last": IDS},
    "padding-of-fewer-keys": {"padding": torch.ones(1, K - 1, dtype=torch.uint8)},
    "padding-of-bools": {"padding": torch.ones(B, K, dtype=torch.bool)},
    "last-of-more-sequences": {"first": IDS, "last": IDS.new_zeros(3, K)},
}
GRADIENTS = {
    "g-of-fewer-queries": {"g": (B, H, Q - 1, DV)},
    "g-of-halves": {"g": torch.ones(B, H, Q, DV, dtype=torch.bfloat16)},
    "g-elsewhere": {"g": torch.ones(B, H, Q, DV, device="meta")},
    "out-of-other-channels": {"out": (B, H, Q, D)},
    "lse-of-fewer-queries": {"lse": (B, H, Q - 1)},
    "lse-of-float64": {"lse": torch.ones(B, H, Q).double()},
    "g-lse-of-fewer-heads": {"g_lse": (B, 1, Q)},
    "ranges-of-other-bits": {"ranges": RANGES.long()},
    "ranges-of-others": {"ranges": torch.zeros(3, dtype=torch.int32)},
}


def filled(x):
    return torch.ones(x) if isinstance(x, tuple) else x


SLOPES = Slopes(torch.ones(1, H))


def call_with(
    q=(B, H, Q, D), k=(B, HK, K, D), v=(B, HK, K, DV), bias: Fields = SLOPES, starts=None,
    first=None, last=None, padding=None,
):  # fmt: skip
    """Queries, keys and values, and a call that may not fit them."""
    call = Call(bias, starts, first, last, K - Q, 0.5, True, True, padding=padding, to_bias=True)
    return [*map(filled, (q, k, v))], call


def attend(**changes):
    inputs, call = call_with(**changes)
    return op.OPS[type(call.bias)].forward.overload(*inputs, *op.arguments(call))


def gradient(
    g=(B, H, Q, DV), g_lse=(B, H, Q), out=(B, H, Q, DV), lse=(B, H, Q), ranges=RANGES, **others
):
    inputs, call = call_with(**others)
    ops, saved = op.OPS[type(call.bias)], [*map(filled, (g, g_lse, out, lse))]
    saved += [ranges] if ops.prunes else []
    return ops.backward.overload(*saved, *inputs, *op.arguments(call))


def test_arguments_that_fit_are_taken():
    """So that a refusal below is of what differs from them."""
    out, _, _ = attend()
    assert torch.allclose(out, torch.ones(B, H, Q, DV))
    assert [x.shape[2] for x in gradient()[:3]] == [Q, K, K]


@pytest.mark.parametrize("change", MISFITS.values(), ids=MISFITS)
def test_the_ops_refuse_what_does_not_fit(change):
    name = f"posenc::attend_{KINDS[type(call_with(**change)[1].bias)]}"
    with pytest.raises(ValueError, match=f"{name}: "):
        attend(**change)
    with pytest.raises(ValueError, match=f"{name}_backward: "):
        gradient(**change)


@pytest.mark.parametrize("change", GRADIENTS.values(), ids=GRADIENTS)
def test_gradients_that_do_not_fit_are_refused(change):
    with pytest.raises(ValueError, match="posenc::attend_slopes_backward: "):
        gradient(**change)


def test_a_kind_states_its_axes():
    """Of which the check of an op and the shapes of its gradients follow."""
    assert axes_of(RunningSum) == {"values": ("1|B", "H", "K+")}
    assert axes_of(DistanceTable) == {"values": ("H", "R")}
    assert not axes_of(NoBias)
    sizes = {"B": 2, "H": 4, "K": 5}
    for shape, is_fit in (
        ((1, 4, 5), True),
        ((2, 4, 9), True),
        ((2, 4, 4), False),
        ((3, 4, 5), False),
        ((2, 1, 5), False),
        ((4, 5), False),
    ):
        assert fits(RunningSum(torch.ones(shape)), sizes) == is_fit


@pytest.mark.parametrize("kind", ["none", "slopes", "table", "sums"])
def test_the_ops_keep_torchs_rules(kind):
    q, k, v = (torch.randn(2, 4, 40, 8).requires_grad_() for _ in range(3))
    values = numbers_of(kind, 4, 40)
    if kind == "table":
        values = values.T.contiguous().T  # T5Bias has its table so
    call = call_of(values, kind, start=0, scale=0.25, zero=11, window=(9, 0))
    ops, given = op.OPS[type(call.bias)], op.arguments(call)
    torch.library.opcheck(ops.forward.overload, (q, k, v, *given))
    with torch.no_grad():
        out, lse, *ranges = ops.forward(q, k, v, *given)
        saved = (torch.randn_like(out), torch.randn_like(lse), out, lse, *ranges, q, k, v)
    given = op.arguments(call._replace(to_bias=True))
    torch.library.opcheck(ops.backward.overload, (*[x.detach() for x in saved], *given))
