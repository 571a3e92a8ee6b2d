"""The rotation as PyTorch ops."""

import pytest
import torch
from torch.autograd import gradcheck

from oracles import tables
from posenc.ops.rotation import reference, rotation
from posenc.ops.rotation.spec import DOUBLED_TABLES, Spec, TableRows, flatten

GPU = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(
    "rows", [TableRows(1), TableRows(0, torch.tensor([[3, 1, 3], [0, 0, 3]]))], ids=str
)
@pytest.mark.parametrize("batched", [False, True])
def test_ops_have_gradients_to_their_tables(rows, batched):
    spec = Spec(True, False, 2)
    q = torch.randn(2, 2, 3, 8, dtype=torch.float64, requires_grad=True)
    cos, sin = (t.requires_grad_() for t in tables(8 if batched else 4, 3))
    if batched:
        cos, sin = cos.unflatten(0, (2, 4)), sin.unflatten(0, (2, 4))

    def rotated(q, cos, sin):
        return rotation.rotate_op.overload(q, cos, sin, *flatten(rows, spec))

    assert gradcheck(rotated, (q, cos, sin))
    got = torch.autograd.grad(rotated(q, cos, sin).square().sum(), (cos, sin), retain_graph=True)
    plain = reference.rotate(q, cos, sin, rows, spec)
    wanted = torch.autograd.grad(plain.square().sum(), (cos, sin))
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("count", "in_place"),
    [(1, False), (2, False), (1, True), (2, True)],
    ids=["one", "q-and-k", "in-place", "q-and-k-in-place"],
)
def test_the_ops_pass_opcheck(count, in_place):
    device = GPU
    xs = [torch.randn(2, heads, 4, 8).to(device) for heads in (3, 1)[:count]]
    name = ("rotate" if count == 1 else "rotate_qk") + ("_" if in_place else "")
    op = getattr(torch.ops.posenc, name).default
    cos, sin = tables(9, 3, device)
    for rows in (TableRows(2), TableRows(0, torch.tensor([[0, 1, 2, 8]], device=device))):
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
    "three-tables-for-two-sequences": {"cos": (3, 9, 3), "sin": (3, 9, 3)},
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
    "positions-of-one-axis-and-too-few": {"positions": IDS[0, :1]},
    "positions-of-no-axis": {"positions": IDS[0, 0]},
    "positions-of-three-axes": {"positions": IDS[..., None]},
    "positions-of-32-bits-past-the-table": {"positions": IDS.int() + 9},
    "positions-of-8-bits": {"positions": IDS.to(torch.uint8)},
    "positions-of-floats": {"positions": IDS.double()},
    "positions-elsewhere": {"positions": IDS.to("meta")},
    "x-of-three-axes": {"x": (3, 5, 8)},
    "x-of-five-axes": {"x": (1, 2, 3, 5, 8)},
    "x-of-integers": {"x": torch.ones(X, dtype=torch.int64)},
    "x-of-complex-numbers": {"x": torch.ones(X, dtype=torch.complex64)},
    "x-narrower-than-its-pairs": {"x": (2, 3, 5, 4)},
    "x-without-channels": {"x": (2, 3, 5, 0)},
    "layout-below-zero": {"layout": -1},
    "layout-of-unknown-bits": {"layout": 259},
    "layout-of-all-bits": {"layout": 2**63 - 1},
}  # fmt: skip
HOSTILE_PAIRS = {
    "k-of-fewer-sequences": {"k": (1, 3, 5, 8)},
    "k-of-fewer-tokens": {"k": (2, 3, 2, 8)},
    "k-of-fewer-channels": {"k": (2, 3, 5, 6)},
    "k-of-three-axes": {"k": (2, 5, 8)},
    "k-of-integers": {"k": torch.ones(X, dtype=torch.int32)},
    "k-elsewhere": {"k": torch.ones(X, device="meta")},
}


OPS = {
    "rotate": rotation.rotate_op,
    "rotate_qk": rotation.rotate_qk_op,
    "rotate_": rotation.rotate_in_place_op,
    "rotate_qk_": rotation.rotate_qk_in_place_op,
}


def in_python(op):
    """The implementation without native code or a plan."""

    def run(*call):
        results = op.run(op.call(*call))
        return results[0] if results else None

    return run


def _call(name, call, x=X, k=X, cos=TABLE, sin=TABLE, positions=None, start=0, layout=3):
    """Call an op, and hand back what it was to rotate."""
    both = [t if isinstance(t, torch.Tensor) else torch.ones(t) for t in (x, k)]
    xs = both[: 2 if "qk" in name else 1]
    wide = [t if isinstance(t, torch.Tensor) else torch.full(t, 0.5).double() for t in (cos, sin)]
    call(*xs, *wide, positions, start, layout)
    return xs


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("change", [
    {}, {"layout": 7}, {"start": 4}, {"positions": IDS + 8}, {"positions": IDS[0]},
    {"positions": IDS.int()}, {"cos": (1, 9, 3), "sin": (1, 9, 3)}, {"cos": (9, 6), "sin": (9, 6)},
])  # fmt: skip
def test_a_valid_call_is_accepted(name, change):
    """A refusal below is because of what differs from this call."""
    for call in (OPS[name].overload, in_python(OPS[name])):
        for x in _call(name, call, **change):
            assert torch.equal(x, torch.ones(X)) == (not name.endswith("_"))


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_an_op_refuses_what_does_not_fit_and_writes_nothing(name, change):
    """Anyone can call an op. Native code refuses, and then Python, which says why."""
    x = change.get("x", X)
    x = x.clone() if isinstance(x, torch.Tensor) else torch.ones(x)
    before = x.clone()
    with pytest.raises(ValueError, match=r"posenc::rotate|must be in \[0, "):
        _call(name, OPS[name].overload, **{**change, "x": x})
    assert torch.equal(x, before)


@pytest.mark.parametrize("change", HOSTILE_PAIRS.values(), ids=HOSTILE_PAIRS)
def test_queries_and_keys_that_do_not_belong_together_are_refused(change):
    for name in ("rotate_qk", "rotate_qk_"):
        with pytest.raises(ValueError, match="posenc::rotate"):
            _call(name, OPS[name].overload, **change)


def test_a_tensor_that_overlaps_itself_is_not_written_in_place():
    x = torch.ones(1, 3, 5, 8).expand(X)
    with pytest.raises(ValueError, match="memory with itself"):
        _call("rotate_", OPS["rotate_"].overload, x=x)
    assert torch.equal(x, torch.ones(X))


def test_a_table_of_all_channels_is_told_from_one_of_pairs():
    """Half of the channels, each number twice, has as many columns as there are pairs."""
    x, wide = torch.randn(X), torch.randn(9, 4).double()
    for layout, table in ((0, wide[:, :2].repeat(1, 2)), (3, wide[:, :2].repeat_interleave(2, 1))):
        for call in (rotation.rotate_op.overload, in_python(rotation.rotate_op)):
            got = call(x, table, table, None, 2, layout + DOUBLED_TABLES)
            assert torch.equal(got, call(x, wide[:, :2], wide[:, :2], None, 2, layout))
            assert not torch.equal(got, call(x, table, table, None, 2, layout))


def test_a_table_must_have_each_number_twice_if_it_has_one_for_each_channel():
    x, wide = torch.randn(X), torch.randn(9, 8).double()
    for layout, table in ((0, wide[:, :4].repeat(1, 2)), (3, wide[:, :4].repeat_interleave(2, 1))):
        got = rotation.rotate_op.overload(x, table, table, None, 2, layout)
        wanted = rotation.rotate_op.overload(x, wide[:, :4], wide[:, :4], None, 2, layout)
        assert torch.equal(got, wanted)
        other = table.clone()
        other[4, 1] += 1
        with pytest.raises(ValueError, match="both numbers of a pair"):
            rotation.rotate_op.overload(x, table, other, None, 2, layout)


def test_positions_inside_the_memory_that_is_written_are_read_first():
    """Written over after their check, they would point anywhere."""
    held = torch.zeros(2 * 3 * 5 * 8, dtype=torch.float64)
    ids = held.view(torch.int64)[-10:].view(2, 5)
    ids.copy_(torch.arange(10).view(2, 5) % 9)
    x = held.view(X)
    cos, sin = tables(9, 3)
    wanted = reference.rotate(x.clone(), cos, sin, TableRows(0, ids.clone()), Spec())
    rotation.rotate_in_place_op(x, cos, sin, ids, 0, 3)
    torch.testing.assert_close(x, wanted, rtol=1e-15, atol=0)


@pytest.mark.parametrize("wrong", [(3,), (8, 1), (25,)], ids=str)
def test_the_norm_refuses_a_weight_that_does_not_fit(wrong):
    x, (cos, sin), how = torch.ones(X), tables(9, 3), (None, 0, 3, 1e-6, 0.0)
    forward, backward = rotation.norm_rotate_op, rotation.norm_rotate_backward_op
    g, weight = torch.ones(2, 1, 5, 8), torch.ones(8)
    for op, arguments, rule in (
        (forward, (x, torch.ones(wrong), cos, sin), "weight must be"),
        (backward, (g, x, weight, cos, sin), "a gradient must be"),
        (forward, (x, weight, cos, sin[:2]), "cos and sin must be"),
    ):
        with pytest.raises(ValueError, match=rule):
            op.overload(*arguments, *how)
