import math

import pytest
import torch

from posenc import LearnedPosEmbedding
from posenc.interop.checkpoints import resize_learned


def linear(table, length):
    """Row by row: both ends kept, the others on the line between their two neighbours."""
    rows = []
    for i in range(length):
        at = i * (len(table) - 1) / (length - 1)
        low = min(int(at), len(table) - 2)
        rows.append(table[low] + (at - low) * (table[low + 1] - table[low]))
    return torch.stack(rows)


def cubic(x, a=-0.75):
    """Keys' kernel, as image libraries choose its parameter."""
    x = abs(x)
    if x < 1:
        return (a + 2) * x**3 - (a + 3) * x**2 + 1
    return a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a if x < 2 else 0.0


def bicubic(cells, size):
    """Cell by cell: centres to centres, the border repeated."""
    height, width, channels = cells.shape
    new = torch.zeros(*size, channels, dtype=torch.float64)
    for i in range(size[0]):
        for j in range(size[1]):
            y, x = (i + 0.5) * height / size[0] - 0.5, (j + 0.5) * width / size[1] - 0.5
            for r in range(math.floor(y) - 1, math.floor(y) + 3):
                for c in range(math.floor(x) - 1, math.floor(x) + 3):
                    cell = cells[min(max(r, 0), height - 1), min(max(c, 0), width - 1)]
                    new[i, j] += cubic(y - r) * cubic(x - c) * cell
    return new


def antialiased(line, size, mode):
    """Of a line of cells: a kernel as wide as a new cell, its weights divided by their sum."""
    step = len(line) / size
    wide = max(step, 1.0)
    new = []
    for i in range(size):
        away = [(j + 0.5 - (i + 0.5) * step) / wide for j in range(len(line))]
        if mode == "bicubic":
            weights = torch.tensor([cubic(x, a=-0.5) for x in away], dtype=torch.float64)
        else:
            weights = torch.tensor([max(1 - abs(x), 0.0) for x in away], dtype=torch.float64)
        new.append((weights / weights.sum() * line.movedim(0, -1)).sum(-1))
    return torch.stack(new)


@pytest.mark.parametrize("mode", ["bicubic", "bilinear"])
@pytest.mark.parametrize(
    ("grid", "size"),
    [((4, 4), (7, 9)), ((9, 7), (3, 2)), ((6, 4), (2, 8)), ((5, 5), (5, 5))],
    ids=str,
)
def test_a_grid_is_resized_with_antialiasing(grid, size, mode):
    table = torch.randn(2 + grid[0] * grid[1], 3, dtype=torch.float64)
    options = {"grid": grid, "prefix": 2, "mode": mode}
    got = resize_learned(table, size, antialias=True, **options)
    rows = antialiased(table[2:].view(*grid, 3), size[0], mode)
    exact = antialiased(rows.transpose(0, 1), size[1], mode).transpose(0, 1).reshape(-1, 3)
    assert torch.equal(got[:2], table[:2])
    torch.testing.assert_close(got[2:], exact, rtol=0, atol=1e-13)
    state = resize_learned({"wpe": table}, size, antialias=True, **options)
    assert torch.equal(state["wpe"], got)
    half = resize_learned(table.bfloat16(), size, antialias=True, **options)
    wide = resize_learned(table.bfloat16().double(), size, antialias=True, **options)
    assert torch.equal(half, wide.bfloat16())


@pytest.mark.parametrize("length", [2, 5, 7, 20])
def test_a_line_is_interpolated_between_its_ends(length):
    table = torch.randn(7, 3, dtype=torch.float64)
    got = resize_learned(table, length)
    torch.testing.assert_close(got, linear(table, length), rtol=0, atol=1e-14)


def test_interpolation_is_computed_in_float64_and_rounded_once():
    table = torch.randn(100, 4).bfloat16()
    got = resize_learned(table, 333)
    assert torch.equal(got, linear(table.double(), 333).bfloat16())


@pytest.mark.parametrize(
    ("grid", "size"), [((4, 4), (7, 7)), ((4, 4), (3, 5)), ((2, 6), (4, 4))], ids=str
)
@pytest.mark.parametrize("prefix", [0, 1, 2])
def test_a_grid_is_interpolated_bicubically_and_a_prefix_stays(grid, size, prefix):
    table = torch.randn(1, prefix + grid[0] * grid[1], 3, dtype=torch.float64)
    got = resize_learned(table, size, grid=grid, prefix=prefix)
    exact = bicubic(table[0, prefix:].view(*grid, 3), size).view(-1, 3)
    assert torch.equal(got[0, :prefix], table[0, :prefix])
    torch.testing.assert_close(got[0, prefix:], exact, rtol=0, atol=1e-13)


def test_an_extension_keeps_the_trained_rows_and_repeats_them():
    table = torch.randn(6, 3)
    got = resize_learned(table, 11, method="extend", fill="repeat", prefix=2)
    assert torch.equal(got, table[[0, 1, 2, 3, 4, 5, 2, 3, 4, 5, 2, 3, 4]])


def test_an_extension_fills_with_small_noise():
    table = torch.randn(10, 64)
    generator = torch.Generator().manual_seed(0)
    got = resize_learned(table, 1000, method="extend", generator=generator)
    assert torch.equal(got[:10], table)
    # 63 360 draws: the mean and the spread are known to 1 part in 170.
    assert abs(got[10:].mean()) < 5 * 0.02 / 63_360**0.5
    assert abs(got[10:].std() / 0.02 - 1) < 5 / (2 * 63_360) ** 0.5


def test_a_state_dict_is_resized_and_loads():
    small = LearnedPosEmbedding(max_len=16, embed_dim=4)
    state = resize_learned(small.state_dict(), 64, method="extend", fill="repeat")
    large = LearnedPosEmbedding(max_len=64, embed_dim=4)
    large.load_state_dict(state)
    assert torch.equal(large.pos_emb.weight[16:32], small.pos_emb.weight)


@pytest.mark.parametrize(
    ("table", "arguments", "words"),
    [
        pytest.param(torch.ones(5, 2), {"length": 3, "method": "extend"}, "at least 5", id="cut"),
        pytest.param(torch.ones(5, 2), {"length": (3, 3)}, "prefix=1", id="not-square"),
        pytest.param(torch.ones(5, 2), {"length": (3, 3), "grid": (2, 3)}, "2 x 3", id="grid"),
        pytest.param(torch.ones(5, 2), {"length": 9, "method": "x"}, "method must", id="method"),
        pytest.param(torch.ones(4, 2), {"length": 9, "antialias": True}, "for a grid", id="line"),
        pytest.param(torch.ones(4, 2), {"length": (3, 3), "mode": "x"}, "mode must", id="mode"),
        pytest.param(
            torch.ones(5, 2), {"length": 9, "prefix": 5}, "positions of table", id="prefix"
        ),
        pytest.param({"a": torch.ones(5, 2)}, {"length": 9}, "Pass key", id="no-table"),
        pytest.param({"a": torch.ones(5, 2)}, {"length": 9, "key": "b"}, "'b'", id="key"),
    ],
)
def test_impossible_arguments_are_refused(table, arguments, words):
    with pytest.raises(ValueError, match=words):
        resize_learned(table, arguments.pop("length"), **arguments)


def test_a_grid_is_two_numbers():
    table = torch.randn(16, 4)
    for length, grid in ((64, (4, 4)), ((6, 8, 2), None), ((6, 8), (2, 2, 4))):
        with pytest.raises(TypeError, match=r"must be \(height, width\)"):
            resize_learned(table, length, grid=grid)
    with pytest.raises(ValueError, match="grid must be at least 1"):
        resize_learned(table, (6, 8), grid=(-4, -4))
    assert torch.equal(resize_learned(table, [6, 8]), resize_learned(table, (6, 8)))
