"""Every implementation of the rotation, against float64."""

import itertools
import subprocess
import sys
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch

from oracles import tables
from posenc import ops
from posenc.ops import backends, execute, native
from posenc.ops.rotation.spec import RowOutOfRange, Spec, TableRows
from support.assertions import assert_within_ulps
from support.plans import planned
from support.rotations import BACKENDS, DTYPES, GPU, LAYOUTS, check, expected, rotate

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


def dtypes_and_layouts():
    """All of them; of Triton's, which the interpreter takes long for, each is quick once."""
    layouts = [*zip(LAYOUTS.args[1], LAYOUTS.kwargs["ids"], strict=True)]
    for name, (n, dtype), (m, (layout, title)) in itertools.product(
        BACKENDS, enumerate(DTYPES), enumerate(layouts)
    ):
        marks = [pytest.mark.slow] * (name == "triton" and n != m)
        yield pytest.param(name, dtype, *layout, id=f"{name}-{dtype}-{title}", marks=marks)


@pytest.mark.parametrize(("name", "dtype", "inner", "outer"), [*dtypes_and_layouts()])
def test_every_dtype_and_layout_agrees_with_the_oracle(name, dtype, inner, outer):
    """Halves and float32 owe their output rounding; float64 is computed in itself."""
    xs = [torch.randn(2, 3, 3, 16).transpose(1, 2), torch.randn(2, 2, 3, 16)]
    cos, sin = tables(6, 8)
    for transposed in (False, True):
        spec = Spec(inner, outer, 0, transposed)
        check(name, [x.to(DTYPES[dtype]) for x in xs], cos, sin, TableRows(2), spec, slice(2, 5))


TILES = {
    "split": (1, 1, 1, True),
    "blocks": (2, 2, 1, False),
    "whole": (4, 4, 1, False),
}


@pytest.mark.parametrize("narrow", ["cos", "sin"])
@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("name", BACKENDS)
def test_tables_may_differ_in_dtype(name, dtype, narrow):
    cos, sin = tables(7, 6)
    pair = {"cos": cos, "sin": sin}
    pair[narrow] = pair[narrow].float()
    x = torch.randn(2, 3, 7, 12).to(DTYPES[dtype])
    check(name, [x], pair["cos"], pair["sin"], TableRows(), Spec(), slice(0, 7))


# Each tile with half and with interleaved pairs; the rest runs in make test-all. All four are
# loaded and stored in the loop over heads by "whole", and one block to a program in the test above.
QUICK_TILES = {
    "split": ["half", "interleaved"],
    "blocks": ["interleaved-to-half", "half-to-interleaved"],
    "whole": LAYOUTS.kwargs["ids"],
}


def tiles():
    for tile, (layout, name) in itertools.product(
        TILES, zip(LAYOUTS.args[1], LAYOUTS.kwargs["ids"], strict=True)
    ):
        for heads in ((3, 2), (4, 1), (3,)):
            quick = name in QUICK_TILES[tile] and heads == (3, 2)
            marks = [] if quick else pytest.mark.slow
            yield pytest.param(tile, *layout, heads, id=f"{tile}-{name}-{heads}", marks=marks)


@pytest.mark.parametrize(("tile", "inner", "outer", "heads"), [*tiles()])
def test_triton_takes_any_tile(tile, inner, outer, heads, monkeypatch):
    """With tables of float64, and of float32 where those are the same numbers."""
    from posenc.ops import execute
    from posenc.ops.rotation.triton import rotate as kernels

    monkeypatch.setattr(kernels, "tile", lambda *arguments: TILES[tile])
    monkeypatch.setattr(execute, "_plans", OrderedDict())
    # One token more than the largest tile, or a few that are alone in theirs.
    length = 3 if tile == "split" else 5
    xs = [torch.randn(2, length, h, 18, device=GPU).half().transpose(1, 2) for h in heads]
    cos, sin = (table.to(GPU) for table in tables(9, 6))
    spec, found = Spec(inner, outer, 6), []
    for dtype in (torch.float64, torch.float32):
        ys = [torch.empty_like(x) for x in xs]
        rotate(planned, xs, ys, cos.to(dtype), sin.to(dtype), TableRows(1), spec)
        found.append(ys)
    for x, y, again in zip(xs, *found, strict=True):
        exact, size = expected(x, cos, sin, slice(1, 1 + length), spec)
        assert_within_ulps(y.cpu(), exact, 0.501, size)
        assert torch.equal(y, again)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(("dtype", "interleaved"), [("fp32", True), ("bf16", False)])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_and_stride_agrees_with_the_oracle(name, shape, dtype, interleaved):
    x = SHAPES[shape]().to(DTYPES[dtype])
    cos, sin = tables(20, 8)
    spec = Spec(interleaved, interleaved)
    check(name, [x], cos, sin, TableRows(), spec, slice(0, x.shape[2]))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "half"])
@pytest.mark.parametrize(("pairs", "width", "column"), [
    (1, 2, 0), (3, 6, 0), (3, 10, 0), (3, 10, 4), (5, 13, 3), (48, 96, 0), (8, 96, 80),
])  # fmt: skip
def test_every_number_of_pairs_first_and_last(name, pairs, width, column, interleaved):
    cos, sin = tables(4, pairs)
    spec = Spec(interleaved, interleaved, column)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(2, 5, 3, width).to(dtype)
        check(name, [x], cos, sin, TableRows(1), spec, slice(1, 4))


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
def test_every_way_to_choose_rows_agrees_with_the_oracle(name, start, positions, index):
    xs = [torch.randn(2, 3, 4, 8), torch.randn(2, 1, 4, 8)]
    cos, sin = tables(9, 4)
    check(name, xs, cos, sin, TableRows(start, positions), Spec(), index)


@pytest.mark.parametrize("name", BACKENDS)
def test_each_sequence_may_have_tables_of_its_own(name):
    run, device = BACKENDS[name]
    x = torch.randn(2, 3, 4, 8, device=device)
    cos, sin = (t.unflatten(0, (2, 5)) for t in tables(10, 4, device))
    for rows in (TableRows(1), TableRows(0, torch.tensor([[0, 4, 2, 2]], device=device))):
        y = torch.empty_like(x)
        run([x], [y], cos, sin, rows, Spec())
        for b in range(2):
            alone = torch.empty_like(x[:1])
            run([x[b : b + 1]], [alone], cos[b], sin[b], rows, Spec())
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
def test_tables_may_have_any_strides(name, rows, pairs, strides):
    x = torch.randn(2, 3, rows, 2 * pairs)
    cos, sin = (
        torch.rand(64, dtype=torch.float64).as_strided((rows, pairs), each) for each in strides
    )
    check(name, [x, x[:, :1]], cos, sin, TableRows(), Spec(), slice(0, rows))


@pytest.mark.parametrize("name", ["reference", *(["c"] if native.available else [])])
@pytest.mark.parametrize(
    ("rows", "bad"),
    [
        (TableRows(7), 10),
        (TableRows(-1), -1),
        (TableRows(0, torch.tensor([[0, 1, 10, 2]])), 10),
        (TableRows(0, torch.tensor([[0, 1, 2, 3], [0, -1, 2, 3]])), -1),
        (TableRows(0, torch.tensor([[0], [7]])), 10),
        (TableRows(0, torch.tensor([[0, 1, 2**62, 2]])), 2**62),
        (TableRows(5, torch.tensor([[0, 1, 2**63 - 1, 2]])), None),
    ],
    ids=["past", "negative-start", "ids", "negative-id", "offsets", "far", "wrapping"],
)
def test_a_row_outside_the_table_is_an_error_and_writes_nothing(name, rows, bad):
    x = torch.randn(2, 3, 4, 8)
    y = torch.zeros_like(x)
    cos, sin = tables(10, 4)
    # Native code refuses in a word, and what is raised for users is made in Python.
    with pytest.raises((RuntimeError, RowOutOfRange)):
        BACKENDS[name][0]([x], [y], cos, sin, rows, Spec())
    for run in (ops.rotate, ops.rotate_):
        with pytest.raises(RowOutOfRange) as caught:
            run([y], cos, sin, rows, Spec())
        assert bad is None or caught.value.row == bad
    assert y.abs().sum() == 0


@pytest.mark.skipif(GPU == "cpu", reason="Triton's interpreter skips device assertions")
@pytest.mark.parametrize("bad", [10, -1, 2**40])
@pytest.mark.parametrize("length", [2, 2000], ids=["short", "long"])
def test_a_row_outside_the_table_stops_a_gpu(length, bad):
    """In a process of its own, because a device assertion ends the CUDA context."""
    script = (
        "import torch, posenc; rope = posenc.RoPE(8, 10).cuda();"
        f"x = torch.randn(1, 1, {length}, 8).cuda(); ids = torch.arange({length}).cuda() % 10;"
        f"ids[1] = {bad}; rope(x, x, position_ids=ids); torch.cuda.synchronize()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode != 0
    assert "position outside the table" in done.stderr


@pytest.mark.parametrize("name", [name for name in BACKENDS if name != "reference"])
@pytest.mark.parametrize(
    ("dtype", "interleaved"), [("fp64", True), ("fp32", False), ("bf16", True), ("fp16", False)]
)
def test_in_place_is_the_same_and_leaves_the_rest(name, dtype, interleaved):
    run, device = BACKENDS[name]
    x = torch.randn(2, 5, 3, 20, device=device).to(DTYPES[dtype]).transpose(1, 2)
    cos, sin = tables(5, 8, device)
    spec = Spec(interleaved, interleaved, 4)
    y, z = torch.empty_like(x), x.clone()
    run([x], [y], cos, sin, TableRows(), spec)
    run([z], [z], cos, sin, TableRows(), spec)
    assert torch.equal(y, z)
    assert torch.equal(z[..., :4], x[..., :4])


@pytest.mark.parametrize("name", BACKENDS)
def test_queries_and_keys_may_differ_in_dtype_and_strides(name):
    q, k = torch.randn(2, 3, 5, 16).half(), torch.randn(2, 2, 16, 5).transpose(-1, -2)
    check(name, [q, k], *tables(5, 8), TableRows(), Spec(), slice(0, 5))
    check(name, [k, q[:, :0]], *tables(5, 8), TableRows(), Spec(), slice(0, 5))


@pytest.mark.parametrize("name", BACKENDS)
def test_a_lazy_negation_is_resolved(name):
    run, device = BACKENDS[name]
    x = torch.randn(2, 3, 5, 16, device=device)
    cos, sin = tables(5, 8, device)
    plain, negated = torch.empty_like(x), torch.empty_like(x)
    run([-x], [plain], cos, sin, TableRows(), Spec())
    run([torch._neg_view(x)], [negated], cos, sin, TableRows(), Spec())
    assert torch.equal(negated, plain)
    run([torch._neg_view(x)], [torch._neg_view(x)], cos, sin, TableRows(), Spec())
    assert torch.equal(-x, plain)


def test_backends_say_what_they_are():
    names = [entry.name for entry in backends()]
    assert names == ["c", "triton", "reference"]
    assert all(entry.why for entry in backends())
    assert backends()[2].available


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Register an extension, as if torch had CUDA and a device."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(execute, "status", lambda: (True, "ready"))

    def register(**functions):
        for name in ("available", "carries_out_plans", "_error", "_no_plans"):
            monkeypatch.setattr(native, name, getattr(native, name))
        native.available, native.carries_out_plans, native._error = True, False, ""
        extension = SimpleNamespace(isa=lambda: "avx2", **functions)
        monkeypatch.setattr(native, "_native", extension)
        native.register()
        return backends()[1]

    return register


FOUND = {"register": lambda path: None, "find_cuda": lambda path: None}
NOT_FOUND = {
    "a function for launches": ({"find_cuda": lambda path: "cuLaunchKernelEx"}, "cuLaunch"),
    "a function of torch": ({"register": lambda path: "torch_call"}, "has no torch_call"),
    "launches": ({"find_cuda": None}, "only on Linux"),
}


@pytest.mark.parametrize("what", NOT_FOUND)
def test_backends_say_why_python_launches_on_cuda(on_a_gpu, what):
    """The kernels run all the same, but a call of few tokens takes several times as long."""
    changed, why = NOT_FOUND[what]
    found = {name: f for name, f in {**FOUND, **changed}.items() if f is not None}
    entry = on_a_gpu(**found)
    assert entry.available
    assert entry.why.startswith("ready, launched by Python")
    assert why in entry.why
    assert not native.carries_out_plans


def test_backends_say_that_c_launches_on_cuda(on_a_gpu):
    assert on_a_gpu(**FOUND).why == "ready, launched by C"
