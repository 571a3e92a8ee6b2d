"""The ops of attention refuse what does not fit: anyone can call them."""

import pytest
import torch

from posenc.attention import op

B, H, HK, Q, K, D, DV = 2, 4, 2, 3, 5, 8, 6
IDS, NO_RANGES = torch.zeros(B, K, dtype=torch.int64), torch.zeros(0, dtype=torch.int32)
HOSTILE = {
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
    "v-of-other-heads": {"v": (B, H, K, DV)},
    "values-without-a-kind": {"kind": "none"},
    "a-kind-without-values": {"values": None},
    "unknown-bits": {"more": 64},
    "a-sign": {"more": -(2**40)},
    "values-of-integers": {"values": torch.ones(1, H, dtype=torch.int64)},
    "values-elsewhere": {"values": torch.ones(1, H, device="meta")},
    "slopes-of-one-axis": {"values": (H,)},
    "slopes-of-fewer-heads": {"values": (1, H - 1)},
    "slopes-of-more-sequences": {"values": (3, H)},
    "table-of-fewer-heads": {"values": (1, 9), "kind": "table"},
    "table-without-columns": {"values": (H, 0), "kind": "table"},
    "zero-past-the-table": {"values": (H, 9), "kind": "table", "zero": 9},
    "zero-below-the-table": {"values": (H, 9), "kind": "table", "zero": -1},
    "sums-of-fewer-keys": {"values": (1, H, K - 1), "kind": "sums"},
    "sums-of-two-axes": {"values": (H, K), "kind": "sums"},
    "starts-of-more-sequences": {"starts": torch.zeros(3, dtype=torch.int64)},
    "starts-of-32-bits": {"starts": torch.zeros(B, dtype=torch.int32)},
    "starts-below-zero": {"starts": torch.full((B,), -1)},
    "starts-that-wrap": {"starts": torch.full((B,), 2**63 - 1)},
    "start-below-zero": {"start": -1},
    "start-that-wraps": {"start": 2**63 - 1},
    "first-alone": {"first": IDS},
    "last-alone": {"last": IDS},
    "first-of-fewer-keys": {"first": IDS[:, 1:], "last": IDS},
    "last-of-more-sequences": {"first": IDS, "last": IDS.new_zeros(3, K)},
    "first-of-32-bits": {"first": IDS.int(), "last": IDS},
    "scale-of-nan": {"scale": float("nan")},
    "window-of-one-side": {"window": [3, -1]},
    "window-below-zero": {"window": [-1, 0]},
    "window-that-wraps": {"window": [2**63 - 1, 0]},
}
GRADIENTS = {
    "g-of-fewer-queries": {"g": (B, H, Q - 1, DV)},
    "g-of-halves": {"g": torch.ones(B, H, Q, DV, dtype=torch.bfloat16)},
    "g-elsewhere": {"g": torch.ones(B, H, Q, DV, device="meta")},
    "out-of-other-channels": {"out": (B, H, Q, D)},
    "lse-of-fewer-queries": {"lse": (B, H, Q - 1)},
    "lse-of-float64": {"lse": torch.ones(B, H, Q).double()},
    "g-lse-of-fewer-heads": {"g_lse": (B, 1, Q)},
    "ranges-of-other-bits": {"ranges": torch.zeros(0, dtype=torch.int64)},
    "ranges-of-others": {"ranges": torch.zeros(3, dtype=torch.int32)},
}


def made(x):
    return torch.ones(x) if isinstance(x, tuple) else x


def inputs(
    q=(B, H, Q, D), k=(B, HK, K, D), v=(B, HK, K, DV), values=(1, H), starts=None, first=None,
    last=None, kind="slopes", zero=0, start=K - Q, scale=0.5, window=(-1, -1), more=0,
):  # fmt: skip
    how = op.KINDS.index(kind) | op.CAUSAL | op.PRUNE | more
    tensors, numbers = map(made, (q, k, v)), (how, zero, start, scale, *window)
    return [*tensors, made(values), starts, first, last, *numbers]


def gradient(
    g=(B, H, Q, DV), g_lse=(B, H, Q), out=(B, H, Q, DV), lse=(B, H, Q),
    ranges=NO_RANGES, **others,
):  # fmt: skip
    q, k, v, *call = inputs(**others)
    call[4] |= op.TO_VALUES
    given = *map(made, (g, g_lse)), q, k, v, *map(made, (out, lse)), ranges
    return torch.ops.posenc.attend_backward(*given, *call)


FITTING = {
    "slopes": {},
    "table": {"values": (H, 9), "kind": "table", "zero": 8},
    "sums": {"values": (B, H, K), "kind": "sums"},
    "starts": {"starts": torch.tensor([0, 2])},
    "documents": {"first": IDS, "last": IDS + 4},
    "window": {"window": [1, 0]},
    "documents-past-both-ends": {"first": IDS - 9, "last": IDS + 99},
    "none": {"values": None, "kind": "none"},
}


@pytest.mark.parametrize("change", FITTING.values(), ids=FITTING)
def test_a_call_that_fits_is_taken(change):
    """So that a refusal below is of what differs from this call."""
    out, lse, _ = torch.ops.posenc.attend(*inputs(**change))
    assert torch.allclose(out, torch.ones(B, H, Q, DV))
    assert lse.isfinite().all()
    assert [x.shape for x in gradient(**change)[:3]] == [
        (B, H, Q, D),
        (B, HK, K, D),
        (B, HK, K, DV),
    ]


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_the_ops_refuse_what_does_not_fit(change):
    with pytest.raises(ValueError, match="posenc::attend: "):
        torch.ops.posenc.attend(*inputs(**change))
    with pytest.raises(ValueError, match="posenc::attend_backward: "):
        gradient(**change)


@pytest.mark.parametrize("change", GRADIENTS.values(), ids=GRADIENTS)
def test_gradients_that_do_not_fit_are_refused(change):
    with pytest.raises(ValueError, match="posenc::attend_backward: "):
        gradient(**change)
