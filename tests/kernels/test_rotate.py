"""Every implementation of the rotation, against float64."""

import subprocess
import sys

import pytest
import torch

import oracles
from assertions import assert_within_ulps
from oracles import tables
from posenc.kernels import backend, c, reference
from posenc.kernels.spec import RowOutOfRange, Rows, Turn

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
GPU = "cuda" if torch.cuda.is_available() else "cpu"


def by_reference(xs, ys, *arguments):
    for x, y in zip(xs, ys, strict=True):
        y.copy_(reference.rotate(x, *arguments))


def by_triton(xs, ys, cos, sin, rows, turn):
    from posenc.kernels.triton.rotate import rotate_into

    rotate_into(xs, ys, cos, sin, rows, turn)


BACKENDS = {"reference": (by_reference, "cpu"), "triton": (by_triton, GPU)}
if c.available:
    BACKENDS["c"] = (c.rotate_into, "cpu")
# Triton's interpreter cuts bfloat16 off where a GPU rounds it.
CUT = {("triton", torch.bfloat16): 1.0} if GPU == "cpu" else {}


def expected(x, cos, sin, index, turn):
    """Rotation of ``x`` in float64 by complex numbers, and the magnitude of each result."""
    cos, sin = (t.cpu()[index].unsqueeze(-3) for t in (cos, sin))
    pairs = cos.shape[-1]
    span = slice(turn.column, turn.column + 2 * pairs)
    x = x.cpu().double()
    exact, size = x.clone(), x.abs()
    turned = oracles.rotate(
        x[..., span], cos, -sin if turn.transposed else sin, interleaved=turn.interleaved
    )
    length = oracles.pair_magnitude(turned, pairs, interleaved=turn.interleaved)
    if turn.interleaved and not turn.interleaved_out:
        turned, length = (torch.cat((t[..., 0::2], t[..., 1::2]), -1) for t in (turned, length))
    elif turn.interleaved_out and not turn.interleaved:
        turned, length = (
            t.unflatten(-1, (2, pairs)).transpose(-1, -2).flatten(-2) for t in (turned, length)
        )
    exact[..., span], size[..., span] = turned, length
    return exact, size


def check(name, xs, cos, sin, rows, turn, index):
    run, device = BACKENDS[name]
    xs = [x.to(device) for x in xs]
    ys = [torch.full_like(x, float("nan")) for x in xs]
    moved = None if rows.positions is None else rows.positions.to(device)
    run(xs, ys, cos.to(device), sin.to(device), Rows(rows.start, moved), turn)
    for x, y in zip(xs, ys, strict=True):
        exact, size = expected(x, cos, sin, index, turn)
        ulps = 4 if x.dtype == torch.float64 else CUT.get((name, x.dtype), 0.501)
        assert_within_ulps(y.cpu(), exact, ulps, size)
        assert y.stride() == x.stride() or not x.is_contiguous()


LAYOUTS = pytest.mark.parametrize(
    ("inner", "outer"),
    [(True, True), (False, False), (True, False), (False, True)],
    ids=["interleaved", "half", "interleaved-to-half", "half-to-interleaved"],
)
SHAPES = {
    "odd-length": lambda: torch.randn(2, 3, 17, 16),
    "three-tokens": lambda: torch.randn(1, 2, 3, 16),
    "decode": lambda: torch.randn(3, 5, 1, 16),
    "tokens-first": lambda: torch.randn(2, 5, 3, 16).transpose(1, 2),
    "slice-of-qkv": lambda: torch.randn(2, 5, 3, 3, 16)[:, :, 1].transpose(1, 2),
    "gaps": lambda: torch.randn(2, 4, 9, 19)[:, ::2, ::3, 1:17],
    "last-dimension-not-dense": lambda: torch.randn(2, 2, 16, 3).transpose(-1, -2),
    "expanded": lambda: torch.randn(1, 1, 3, 16).expand(2, 2, 3, 16),
    "one-head": lambda: torch.randn(4, 1, 6, 16),
    "six-heads": lambda: torch.randn(2, 6, 3, 16),
    "six-heads-tokens-first": lambda: torch.randn(2, 3, 6, 16).transpose(1, 2),
    "empty-batch": lambda: torch.randn(0, 2, 5, 16),
    "no-tokens": lambda: torch.randn(2, 2, 0, 16),
    "no-heads": lambda: torch.randn(2, 0, 5, 16),
}


@pytest.mark.parametrize("name", BACKENDS)
@LAYOUTS
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_layout(name, dtype, inner, outer):
    """Halves and float32 owe their output rounding; float64 is computed in itself."""
    xs = [torch.randn(2, 5, 3, 16).transpose(1, 2), torch.randn(2, 2, 5, 16)]
    cos, sin = tables(9, 8)
    for transposed in (False, True):
        turn = Turn(inner, outer, 0, transposed)
        check(name, [x.to(DTYPES[dtype]) for x in xs], cos, sin, Rows(2), turn, slice(2, 7))


TILES = {
    "split": (1, 1, 1, True),
    "blocks": (2, 2, 1, False),
    "whole": (4, 4, 1, False),
}


@pytest.mark.parametrize("tile", TILES)
@LAYOUTS
@pytest.mark.parametrize("heads", [(3, 2), (4, 1), (3,)], ids=str)
def test_triton_takes_any_tile(tile, inner, outer, heads, monkeypatch):
    """With tables of float64, and of float32 where those are the same numbers."""
    from posenc.kernels.triton import rotate

    monkeypatch.setattr(rotate, "tile", lambda *arguments: TILES[tile])
    monkeypatch.setattr(rotate, "_LAUNCHES", {})
    xs = [torch.randn(2, 5, h, 18, device=GPU).half().transpose(1, 2) for h in heads]
    cos, sin = (table.to(GPU) for table in tables(9, 6))
    turn, found = Turn(inner, outer, 6), []
    for dtype in (torch.float64, torch.float32):
        ys = [torch.empty_like(x) for x in xs]
        rotate.rotate_into(xs, ys, cos.to(dtype), sin.to(dtype), Rows(1), turn)
        found.append(ys)
    for x, y, again in zip(xs, *found, strict=True):
        exact, size = expected(x, cos, sin, slice(1, 6), turn)
        assert_within_ulps(y.cpu(), exact, 0.501, size)
        assert torch.equal(y, again)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "half"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_and_stride(name, shape, dtype, interleaved):
    x = SHAPES[shape]().to(DTYPES[dtype])
    cos, sin = tables(20, 8)
    turn = Turn(interleaved, interleaved)
    check(name, [x], cos, sin, Rows(), turn, slice(0, x.shape[2]))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "half"])
@pytest.mark.parametrize(("pairs", "width", "column"), [
    (1, 2, 0), (3, 6, 0), (3, 10, 0), (3, 10, 4), (5, 13, 3), (48, 96, 0), (8, 96, 80),
])  # fmt: skip
def test_every_number_of_pairs_first_and_last(name, pairs, width, column, interleaved):
    cos, sin = tables(4, pairs)
    turn = Turn(interleaved, interleaved, column)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.randn(2, 5, 3, width).to(dtype)
        check(name, [x], cos, sin, Rows(1), turn, slice(1, 4))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    ("start", "positions", "index"),
    [
        pytest.param(3, None, torch.arange(3, 7), id="offset"),
        pytest.param(
            0, torch.tensor([[1], [5]]), torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]), id="offsets"
        ),
        pytest.param(0, torch.tensor([[7, 0, 2, 2]]), torch.tensor([7, 0, 2, 2]), id="ids"),
        pytest.param(
            2,
            torch.tensor([[0, 1, 2, 3], [6, 5, 0, 0]]),
            torch.tensor([[2, 3, 4, 5], [8, 7, 2, 2]]),
            id="batched-ids-and-start",
        ),
        pytest.param(
            0,
            torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7]])[:, ::2],
            torch.tensor([0, 2, 4, 6]),
            id="strided-ids",
        ),
    ],
)
def test_every_way_to_choose_rows(name, start, positions, index):
    xs = [torch.randn(2, 3, 4, 8), torch.randn(2, 1, 4, 8)]
    cos, sin = tables(9, 4)
    check(name, xs, cos, sin, Rows(start, positions), Turn(), index)


@pytest.mark.parametrize("name", BACKENDS)
def test_tables_of_each_sequence(name):
    run, device = BACKENDS[name]
    x = torch.randn(2, 3, 4, 8, device=device)
    cos, sin = (t.unflatten(0, (2, 5)) for t in tables(10, 4, device))
    for rows in (Rows(1), Rows(0, torch.tensor([[0, 4, 2, 2]], device=device))):
        y = torch.empty_like(x)
        run([x], [y], cos, sin, rows, Turn())
        for b in range(2):
            alone = torch.empty_like(x[:1])
            run([x[b : b + 1]], [alone], cos[b], sin[b], rows, Turn())
            assert torch.equal(y[b], alone[0])


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    ("rows", "pairs", "strides"),
    [
        (5, 4, ((4, 1), (1, 5))),
        (5, 4, ((1, 5), (1, 5))),
        (5, 4, ((8, 1), (4, 1))),
        (1, 4, ((7, 1), (4, 1))),
        (5, 1, ((1, 3), (1, 1))),
        (1, 1, ((9, 5), (3, 7))),
        (5, 4, ((0, 1), (0, 1))),
    ],
    ids=str,
)
def test_tables_lie_as_they_like(name, rows, pairs, strides):
    x = torch.randn(2, 3, rows, 2 * pairs)
    cos, sin = (
        torch.rand(64, dtype=torch.float64).as_strided((rows, pairs), each) for each in strides
    )
    check(name, [x, x[:, :1]], cos, sin, Rows(), Turn(), slice(0, rows))


@pytest.mark.parametrize("name", ["reference", *(["c"] if c.available else [])])
@pytest.mark.parametrize(
    ("rows", "bad"),
    [
        (Rows(7), 10),
        (Rows(-1), -1),
        (Rows(0, torch.tensor([[0, 1, 10, 2]])), 10),
        (Rows(0, torch.tensor([[0, 1, 2, 3], [0, -1, 2, 3]])), -1),
        (Rows(0, torch.tensor([[0], [7]])), 10),
        (Rows(0, torch.tensor([[0, 1, 2**62, 2]])), 2**62),
        (Rows(5, torch.tensor([[0, 1, 2**63 - 1, 2]])), None),
    ],
    ids=["past", "negative-start", "ids", "negative-id", "offsets", "far", "wrapping"],
)
def test_a_row_outside_the_table_is_an_error_and_writes_nothing(name, rows, bad):
    x = torch.randn(2, 3, 4, 8)
    y = torch.zeros_like(x)
    cos, sin = tables(10, 4)
    with pytest.raises(RowOutOfRange) as caught:
        BACKENDS[name][0]([x], [y], cos, sin, rows, Turn())
    assert bad is None or caught.value.row == bad
    assert y.abs().sum() == 0


@pytest.mark.skipif(GPU == "cpu", reason="Triton's interpreter skips device assertions")
def test_a_row_outside_the_table_stops_a_gpu():
    """In a process of its own, because a device assertion ends the CUDA context."""
    script = (
        "import torch, posenc; rope = posenc.RoPE(8, 10).cuda();"
        "x = torch.randn(1, 1, 2, 8).cuda(); ids = torch.tensor([3, 10]).cuda();"
        "rope(x, x, position_ids=ids); torch.cuda.synchronize()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode != 0
    assert "position outside the table" in done.stderr


@pytest.mark.parametrize("name", [name for name in BACKENDS if name != "reference"])
@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "half"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_in_place_is_the_same_and_leaves_the_rest(name, dtype, interleaved):
    run, device = BACKENDS[name]
    x = torch.randn(2, 5, 3, 20, device=device).to(DTYPES[dtype]).transpose(1, 2)
    cos, sin = tables(5, 8, device)
    turn = Turn(interleaved, interleaved, 4)
    y, z = torch.empty_like(x), x.clone()
    run([x], [y], cos, sin, Rows(), turn)
    run([z], [z], cos, sin, Rows(), turn)
    assert torch.equal(y, z)
    assert torch.equal(z[..., :4], x[..., :4])


@pytest.mark.skipif(not c.available, reason="the extension was not built")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads_together", [True, False])
def test_threads_do_the_same_as_one(dtype, heads_together):
    x = torch.randn(3, 8, 101, 160)
    x = (x.transpose(1, 2).contiguous().transpose(1, 2) if heads_together else x).to(DTYPES[dtype])
    cos, sin = tables(101, 64)
    ys = [torch.full_like(x, float("nan")) for _ in range(2)]
    threads = torch.get_num_threads()
    for count, y in zip((1, 4), ys, strict=True):
        torch.set_num_threads(count)
        c.rotate_into([x], [y], cos, sin, Rows(), Turn())
    torch.set_num_threads(threads)
    assert torch.equal(*ys)
    check("c", [x], cos, sin, Rows(), Turn(), slice(0, 101))


@pytest.mark.skipif(not c.available, reason="the extension was not built")
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_special_numbers_keep_their_meaning(dtype):
    """Turned by zero, every number comes back; NaN and infinity stay what they are."""
    largest = torch.finfo(DTYPES[dtype]).max
    tiny = torch.finfo(DTYPES[dtype]).smallest_normal / 4
    row = [float("nan"), 1.0, float("inf"), -2.0, largest, -largest, tiny, -tiny] * 4
    x = torch.tensor(row).to(DTYPES[dtype]).view(1, 1, 1, 32)
    for interleaved in (True, False):
        y = torch.empty_like(x)
        cos, sin = torch.ones(1, 16).double(), torch.zeros(1, 16).double()
        c.rotate_into([x], [y], cos, sin, Rows(), Turn(interleaved, interleaved))
        finite = reference.rotate(x, cos, sin, Rows(), Turn(interleaved, interleaved))
        torch.testing.assert_close(y, finite, rtol=0, atol=0, equal_nan=True)


@pytest.mark.skipif(not c.available, reason="the extension was not built")
def test_every_bfloat16_and_float16_rounds_as_torch_does():
    """All 65 536 numbers of each, scaled so that their rounding shows."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        x = bits.view(dtype).view(1, 1, 512, 128)
        cos = torch.full((512, 64), 1 / 3, dtype=torch.float64)
        sin = torch.full((512, 64), -0.7, dtype=torch.float64)
        y = torch.empty_like(x)
        c.rotate_into([x], [y], cos, sin, Rows(), Turn(False, False))
        wanted = reference.rotate(x, cos, sin, Rows(), Turn(False, False))
        same = (y == wanted) | (y.isnan() & wanted.isnan())
        # A fused multiply-add moves a tie now and then, by one spacing.
        assert same.float().mean() > 0.999
        near = (y.double() - wanted.double()).abs() <= oracles.ulp(wanted.double().abs(), dtype)
        assert (same | near | (y.isinf() | wanted.isinf())).all()


@pytest.mark.skipif(not c.available, reason="the extension was not built")
@pytest.mark.parametrize("dtype", DTYPES)
@LAYOUTS
def test_every_instruction_set_is_right(dtype, inner, outer):
    """A machine runs the best set it has; the others are for older machines, and run here too."""
    from posenc.kernels.c import _rotate

    best, ran = _rotate.isa(), []
    try:
        for isa in ("avx512", "avx2", "neon", "baseline"):
            try:
                _rotate.set_isa(isa)
            except ValueError:
                continue
            ran.append(isa)
            for pairs in (1, 31, 32, 50, 96):
                x = torch.randn(2, 9, 5, 2 * pairs).to(DTYPES[dtype])
                check("c", [x], *tables(5, pairs), Rows(), Turn(inner, outer), slice(0, 5))
    finally:
        _rotate.set_isa(best)
    assert best == ran[0]


@pytest.mark.skipif(not c.available, reason="the extension was not built")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("own", [False, True], ids=["rows-shared", "rows-of-each-sequence"])
def test_queries_and_keys_share_the_rows_made_ready_for_them(dtype, own):
    """More tokens than one tile of table rows, which serves all heads of both, and all sequences
    where they take the same rows."""
    q, k = (torch.randn(2, heads, 700, 64).to(DTYPES[dtype]) for heads in (3, 1))
    rows, index = Rows(5), torch.arange(5, 705)
    if own:
        rows, index = Rows(0, torch.tensor([[5], [9]])), torch.tensor([[5], [9]]) + index - 5
    check("c", [q, k], *tables(720, 32), rows, Turn(False, False), index)


@pytest.mark.parametrize("name", BACKENDS)
def test_queries_and_keys_may_differ_in_dtype_and_strides(name):
    q, k = torch.randn(2, 3, 5, 16).half(), torch.randn(2, 2, 16, 5).transpose(-1, -2)
    check(name, [q, k], *tables(5, 8), Rows(), Turn(), slice(0, 5))
    check(name, [k, q[:, :0]], *tables(5, 8), Rows(), Turn(), slice(0, 5))


@pytest.mark.parametrize("name", BACKENDS)
def test_what_is_yet_to_be_negated(name):
    run, device = BACKENDS[name]
    x = torch.randn(2, 3, 5, 16, device=device)
    cos, sin = tables(5, 8, device)
    plain, negated = torch.empty_like(x), torch.empty_like(x)
    run([-x], [plain], cos, sin, Rows(), Turn())
    run([torch._neg_view(x)], [negated], cos, sin, Rows(), Turn())
    assert torch.equal(negated, plain)
    run([torch._neg_view(x)], [torch._neg_view(x)], cos, sin, Rows(), Turn())
    assert torch.equal(-x, plain)


@pytest.mark.skipif(not c.available, reason="the extension was not built")
def test_instruction_sets_are_named_and_refused_by_name():
    from posenc.kernels.c import _rotate

    assert _rotate.isa() in backend.backends()[0].why
    _rotate.set_isa(_rotate.isa())
    with pytest.raises(ValueError, match="does not run here"):
        _rotate.set_isa("abacus")


def test_backends_say_what_they_are():
    names = [entry.name for entry in backend.backends()]
    assert names == ["c", "triton", "reference"]
    assert all(entry.why for entry in backend.backends())
    assert backend.backends()[2].available


@pytest.mark.parametrize("name", [name for name in BACKENDS if name != "reference"])
def test_tables_that_do_not_fit_are_refused(name):
    run, device = BACKENDS[name]
    x = torch.randn(2, 1, 4, 8, device=device)
    for cos, sin in (tables(4, 5, device), [t.expand(3, 4, 4) for t in tables(4, 4, device)]):
        with pytest.raises(ValueError, match="do not fit"):
            run([x], [torch.empty_like(x)], cos, sin, Rows(), Turn())
