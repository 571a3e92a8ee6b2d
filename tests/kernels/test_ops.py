"""The rotation as PyTorch ops."""

import pytest
import torch
from torch.autograd import gradcheck

from oracles import tables
from posenc.kernels import ops, reference
from posenc.kernels.spec import Rows, Spec, flatten

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
GPU = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("rows", [Rows(1), Rows(0, torch.tensor([[3, 1, 3], [0, 0, 3]]))], ids=str)
@pytest.mark.parametrize("batched", [False, True])
def test_ops_have_gradients_to_their_tables(rows, batched):
    spec = Spec(True, False, 2)
    q = torch.randn(2, 2, 3, 8, dtype=torch.float64, requires_grad=True)
    cos, sin = (t.requires_grad_() for t in tables(8 if batched else 4, 3))
    if batched:
        cos, sin = cos.unflatten(0, (2, 4)), sin.unflatten(0, (2, 4))

    def rotated(q, cos, sin):
        return ops.rotate(q, cos, sin, *flatten(rows, spec))

    assert gradcheck(rotated, (q, cos, sin))
    got = torch.autograd.grad(rotated(q, cos, sin).square().sum(), (cos, sin), retain_graph=True)
    plain = reference.rotate(q, cos, sin, rows, spec)
    wanted = torch.autograd.grad(plain.square().sum(), (cos, sin))
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("count", "in_place"), [(1, False), (2, False), (1, True)], ids=["one", "q-and-k", "in-place"]
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_ops_pass_opcheck(dtype, count, in_place):
    device = GPU
    xs = [torch.randn(2, heads, 4, 8).to(device, DTYPES[dtype]) for heads in (3, 1)[:count]]
    name = ("rotate" if count == 1 else "rotate_qk") + ("_" if in_place else "")
    op = getattr(torch.ops.posenc, name).default
    cos, sin = tables(9, 3, device)
    for rows in (Rows(2), Rows(0, torch.tensor([[0, 1, 2, 8]], device=device))):
        for grad in (False, not in_place):
            inputs = [x.clone().requires_grad_(grad) for x in xs]
            torch.library.opcheck(op, (*inputs, cos, sin, *flatten(rows, Spec(False, True, 2))))


# What fits: 2 sequences of 5 tokens, 8 channels of which 3 pairs are rotated, 9 table rows.
X, TABLE, IDS = (2, 3, 5, 8), (9, 3), torch.zeros(2, 5, dtype=torch.int64)
# A call that does not: what differs from the one that does. Tensors are made by `_call`.
HOSTILE = {
    "table-of-too-few-rows": {"cos": (4, 3), "sin": (4, 3)},
    "sin-of-fewer-rows": {"sin": (2, 3)},
    "sin-of-fewer-pairs": {"sin": (9, 2)},
    "cos-of-more-pairs-than-channels": {"cos": (9, 5), "sin": (9, 5)},
    "table-without-pairs": {"cos": (9, 0), "sin": (9, 0)},
    "table-without-rows": {"cos": (0, 3), "sin": (0, 3)},
    "table-of-one-axis": {"cos": (9,), "sin": (9,)},
    "table-of-four-axes": {"cos": (2, 1, 9, 3), "sin": (2, 1, 9, 3)},
    "table-of-five-axes-for-two": {"x": (5, 8), "cos": (1, 1, 1, 9, 3), "sin": (1, 1, 1, 9, 3)},
    "one-table-for-two-sequences": {"cos": (1, 9, 3), "sin": (1, 9, 3)},
    "tables-of-no-sequence": {"cos": (0, 9, 3), "sin": (0, 9, 3)},
    "table-of-integers": {"cos": torch.ones(9, 3, dtype=torch.int64)},
    "table-of-complex-numbers": {"cos": torch.ones(9, 3, dtype=torch.complex128)},
    "table-elsewhere": {"cos": torch.ones(9, 3, device="meta")},
    "sin-elsewhere": {"sin": torch.ones(9, 3, device="meta")},
    "start-past-the-table": {"start": 5},
    "start-below-zero": {"start": -1},
    "start-that-wraps": {"start": 2**63 - 1},
    "start-that-wraps-with-positions": {"start": 2**63 - 1, "positions": IDS},
    "start-below-zero-with-positions": {"start": -(2**63), "positions": IDS},
    "positions-past-the-table": {"positions": IDS + 9},
    "positions-below-zero": {"positions": IDS - 1},
    "positions-that-wrap": {"positions": IDS + (2**63 - 1)},
    "positions-of-too-few-tokens": {"positions": IDS[:, :3]},
    "positions-of-too-many-sequences": {"positions": IDS.new_zeros(3, 5)},
    "positions-of-no-sequence": {"positions": IDS[:0]},
    "positions-of-no-token": {"positions": IDS[:, :0]},
    "positions-of-one-axis": {"positions": IDS[0]},
    "positions-of-three-axes": {"positions": IDS[..., None]},
    "positions-of-32-bits": {"positions": IDS.int()},
    "positions-of-8-bits": {"positions": IDS.to(torch.uint8)},
    "positions-of-floats": {"positions": IDS.double()},
    "positions-elsewhere": {"positions": IDS.to("meta")},
    "x-of-three-axes": {"x": (3, 5, 8)},
    "x-of-five-axes": {"x": (1, 2, 3, 5, 8)},
    "x-of-integers": {"x": torch.ones(X, dtype=torch.int64)},
    "x-of-complex-numbers": {"x": torch.ones(X, dtype=torch.complex64)},
    "x-narrower-than-its-pairs": {"x": (2, 3, 5, 4)},
    "x-without-channels": {"x": (2, 3, 5, 0)},
    "first-channel-below-zero": {"first_channel": -2},
    "first-channel-past-the-channels": {"first_channel": 6},
    "first-channel-that-wraps": {"first_channel": 2**63 - 1},
    "first-channel-between": {"first_channel": 1},
}  # fmt: skip
HOSTILE_PAIRS = {
    "k-of-fewer-sequences": {"k": (1, 3, 5, 8)},
    "k-of-fewer-tokens": {"k": (2, 3, 2, 8)},
    "k-of-fewer-channels": {"k": (2, 3, 5, 6)},
    "k-of-three-axes": {"k": (2, 5, 8)},
    "k-of-integers": {"k": torch.ones(X, dtype=torch.int32)},
    "k-elsewhere": {"k": torch.ones(X, device="meta")},
}


def _call(op, x=X, k=X, cos=TABLE, sin=TABLE, positions=None, start=0, first_channel=0):
    """Call an op, and hand back what it was to rotate."""
    made = [t if isinstance(t, torch.Tensor) else torch.ones(t) for t in (x, k)]
    xs = made[: 2 if op is ops.rotate_qk else 1]
    wide = [t if isinstance(t, torch.Tensor) else torch.full(t, 0.5).double() for t in (cos, sin)]
    op(*xs, *wide, positions, start, True, True, first_channel, False)
    return xs


@pytest.mark.parametrize("op", [ops.rotate, ops.rotate_qk, ops.rotate_], ids=str)
@pytest.mark.parametrize("change", [{}, {"first_channel": 2}, {"start": 4}, {"positions": IDS + 8}])
def test_a_call_that_fits_is_taken(op, change):
    """So that a refusal below is of what differs from this call."""
    (x, *_) = _call(op, **change)
    assert torch.equal(x, torch.ones(X)) == (op is not ops.rotate_)


@pytest.mark.parametrize("op", [ops.rotate, ops.rotate_qk, ops.rotate_], ids=str)
@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_an_op_refuses_what_does_not_fit_and_writes_nothing(op, change):
    """Anyone can call an op, and the kernels trust what it gives them."""
    x = change.get("x", X)
    x = x.clone() if isinstance(x, torch.Tensor) else torch.ones(x)
    before = x.clone()
    with pytest.raises(ValueError, match=r"posenc::rotate|must be in \[0, "):
        _call(op, **{**change, "x": x})
    assert torch.equal(x, before)


@pytest.mark.parametrize("change", HOSTILE_PAIRS.values(), ids=HOSTILE_PAIRS)
def test_queries_and_keys_that_do_not_belong_together_are_refused(change):
    with pytest.raises(ValueError, match="posenc::rotate_qk: "):
        _call(ops.rotate_qk, **change)


def test_a_tensor_that_overlaps_itself_is_not_written_in_place():
    x = torch.ones(1, 3, 5, 8).expand(X)
    with pytest.raises(ValueError, match="share memory with itself"):
        _call(ops.rotate_, x=x)
    assert torch.equal(x, torch.ones(X))


def test_positions_inside_what_is_written_are_read_before():
    """They were looked at once; written over, they would point anywhere."""
    held = torch.zeros(2 * 3 * 5 * 8, dtype=torch.float64)
    ids = held.view(torch.int64)[-10:].view(2, 5)
    ids.copy_(torch.arange(10).view(2, 5) % 9)
    x = held.view(X)
    cos, sin = tables(9, 3)
    wanted = reference.rotate(x.clone(), cos, sin, Rows(0, ids.clone()), Spec())
    ops.rotate_(x, cos, sin, ids, 0, True, True, 0, False)
    torch.testing.assert_close(x, wanted, rtol=1e-15, atol=0)


@pytest.mark.parametrize("wrong", [(3,), (8, 1), (25,)], ids=str)
def test_the_norm_refuses_a_weight_that_does_not_fit(wrong):
    x, (cos, sin), how = torch.ones(X), tables(9, 3), (None, 0, True, True, 0, False, 1e-6, 0.0)
    for whole in (False, True):
        with pytest.raises(ValueError, match="posenc::norm_rotate: weight must be"):
            ops._norm_rotate(x, torch.ones(wrong), cos, sin, *how, whole)
    with pytest.raises(ValueError, match="posenc::norm_rotate: a gradient must be"):
        ops._norm_backward(torch.ones(2, 1, 5, 8), x, torch.ones(8), cos, sin, *how, False)
    with pytest.raises(ValueError, match="posenc::norm_rotate: cos and sin must be"):
        ops._norm_rotate(x, torch.ones(8), cos, sin[:2], *how, False)
