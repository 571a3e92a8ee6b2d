"""The op of attention: it keeps torch's rules, and refuses what does not fit, whoever calls it."""

import pytest
import torch

from posenc.ops.attention.biases import KINDS, Call
from posenc.ops.attention.op import attend_backward_op, attend_op
from support.attention import numbers_of

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
    "values-without-a-kind": {"kind": "none"},
    "a-kind-without-values": {"values": None},
    "values-of-integers": {"values": torch.ones(1, H, dtype=torch.int64)},
    "values-elsewhere": {"values": torch.ones(1, H, device="meta")},
    "slopes-of-one-axis": {"values": (H,)},
    "slopes-of-more-sequences": {"values": (3, H)},
    "table-of-fewer-heads": {"values": (1, 9), "kind": "table"},
    "zero-past-the-table": {"values": (H, 9), "kind": "table", "zero": 9},
    "sums-of-fewer-keys": {"values": (1, H, K - 1), "kind": "sums"},
    "sums-of-two-axes": {"values": (H, K), "kind": "sums"},
    "starts-of-more-sequences": {"starts": torch.zeros(3, dtype=torch.int64)},
    "starts-of-32-bits": {"starts": torch.zeros(B, dtype=torch.int32)},
    "first-without-last": {"first": IDS},
    "first-of-fewer-keys": {"first": IDS[:, 1:], "last": IDS},
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


def arguments(
    q=(B, H, Q, D), k=(B, HK, K, D), v=(B, HK, K, DV), values=(1, H), starts=None, first=None,
    last=None, kind="slopes", zero=0, to_values=False,
):  # fmt: skip
    call = Call(filled(values), starts, first, last, kind, zero, K - Q, 0.5, True, True)
    return [*map(filled, (q, k, v)), *call._replace(to_values=to_values).arguments()]


def gradient(
    g=(B, H, Q, DV), g_lse=(B, H, Q), out=(B, H, Q, DV), lse=(B, H, Q),
    ranges=RANGES, **others,
):  # fmt: skip
    q, k, v, *call = arguments(**others, to_values=True)
    given = *map(filled, (g, g_lse)), q, k, v, *map(filled, (out, lse)), ranges
    return torch.ops.posenc.attend_by_distance_backward(*given, *call)


def test_arguments_that_fit_are_taken():
    """So that a refusal below is of what differs from them."""
    out, _, _ = torch.ops.posenc.attend_by_distance(*arguments())
    assert torch.allclose(out, torch.ones(B, H, Q, DV))
    assert [x.shape[2] for x in gradient()[:3]] == [Q, K, K]


@pytest.mark.parametrize("change", MISFITS.values(), ids=MISFITS)
def test_the_ops_refuse_what_does_not_fit(change):
    with pytest.raises(ValueError, match="posenc::attend_by_distance: "):
        torch.ops.posenc.attend_by_distance(*arguments(**change))
    with pytest.raises(ValueError, match="posenc::attend_by_distance_backward: "):
        gradient(**change)


@pytest.mark.parametrize("change", GRADIENTS.values(), ids=GRADIENTS)
def test_gradients_that_do_not_fit_are_refused(change):
    with pytest.raises(ValueError, match="posenc::attend_by_distance_backward: "):
        gradient(**change)


@pytest.mark.parametrize("kind", KINDS)
def test_the_ops_keep_torchs_rules(kind):
    q, k, v = (torch.randn(2, 4, 40, 8).requires_grad_() for _ in range(3))
    values = numbers_of(kind, 4, 40)
    if kind == "table":
        values = values.T.contiguous().T  # T5Bias has its table so
    call = Call(values, None, None, None, kind, 11, 0, 0.25, True, True, window=(9, 0))
    torch.library.opcheck(attend_op.overload, (q, k, v, *call.arguments()))
    with torch.no_grad():
        out, lse, ranges = attend_op(q, k, v, *call.arguments())
        saved = (torch.randn_like(out), torch.randn_like(lse), q, k, v, out, lse, ranges)
    how = call._replace(to_values=kind != "none").arguments()
    torch.library.opcheck(attend_backward_op.overload, (*[x.detach() for x in saved], *how))
