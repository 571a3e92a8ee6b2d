"""What only the C kernel has: threads, instruction sets, and its rounding."""

import pytest
import torch

import oracles
from oracles import tables
from posenc.ops import backends, native
from posenc.ops.rotation import reference
from posenc.ops.rotation.spec import Spec, TableRows
from support.rotations import DTYPES, LAYOUTS, by_c, check, instruction_sets

pytestmark = pytest.mark.skipif(not native.available, reason="the extension was not built")


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
        by_c([x], [y], cos, sin, TableRows(), Spec())
    torch.set_num_threads(threads)
    assert torch.equal(*ys)
    check("c", [x], cos, sin, TableRows(), Spec(), slice(0, 101))


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
        by_c([x], [y], cos, sin, TableRows(), Spec(interleaved, interleaved))
        finite = reference.rotate(x, cos, sin, TableRows(), Spec(interleaved, interleaved))
        torch.testing.assert_close(y, finite, rtol=0, atol=0, equal_nan=True)


def test_every_bfloat16_and_float16_rounds_as_torch_does():
    """All 65 536 numbers of each, scaled so that their rounding shows."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        x = bits.view(dtype).view(1, 1, 512, 128)
        cos = torch.full((512, 64), 1 / 3, dtype=torch.float64)
        sin = torch.full((512, 64), -0.7, dtype=torch.float64)
        y = torch.empty_like(x)
        by_c([x], [y], cos, sin, TableRows(), Spec(False, False))
        wanted = reference.rotate(x, cos, sin, TableRows(), Spec(False, False))
        same = (y == wanted) | (y.isnan() & wanted.isnan())
        # A fused multiply-add moves a tie now and then, by one spacing.
        assert same.float().mean() > 0.999
        near = (y.double() - wanted.double()).abs() <= oracles.ulp(wanted.double().abs(), dtype)
        # The largest number and infinity are neighbours as well.
        largest = [t.double().abs() >= torch.finfo(dtype).max for t in (y, wanted)]
        assert (same | near | (largest[0] & largest[1])).all()


@pytest.mark.parametrize("dtype", DTYPES)
@LAYOUTS
def test_every_instruction_set_is_right(dtype, inner, outer, pytestconfig):
    """A machine runs the best set it has; the others are for older machines, and run here too."""
    best, ran = native._native.isa(), []
    for isa in instruction_sets():
        ran.append(isa)
        for pairs in (1, 31, 32, 50, 96):
            x = torch.randn(2, 9, 5, 2 * pairs).to(DTYPES[dtype])
            check("c", [x], *tables(5, pairs), TableRows(), Spec(inner, outer), slice(0, 5))
    assert best == (pytestconfig.getoption("--isa") or ran[0])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("own", [False, True], ids=["rows-shared", "rows-of-each-sequence"])
def test_several_tiles_of_table_rows_serve_all_heads_and_sequences(dtype, own):
    """More tokens than one tile of table rows, which serves all heads of both, and all sequences
    where they take the same rows."""
    q, k = (torch.randn(2, heads, 700, 64).to(DTYPES[dtype]) for heads in (3, 1))
    rows, index = TableRows(5), torch.arange(5, 705)
    if own:
        rows, index = TableRows(0, torch.tensor([[5], [9]])), torch.tensor([[5], [9]]) + index - 5
    check("c", [q, k], *tables(720, 32), rows, Spec(False, False), index)


def test_backends_name_the_instruction_set_in_use_now(monkeypatch):
    assert native._native.isa() in backends()[0].why
    monkeypatch.setattr(native._native, "isa", lambda: "another")
    assert "another" in backends()[0].why


def test_instruction_sets_are_refused_by_name():
    with pytest.raises(ValueError, match="does not run here"):
        native._native.set_isa("abacus")
