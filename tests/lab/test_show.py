import math
from itertools import pairwise

import pytest
import torch

import posenc
from posenc.lab import show
from posenc.lab.panels import image

VIEWS = {
    "sinusoidal": show.sinusoidal(dim=16, length=12, trained=64),
    "learned": show.learned(dim=16, length=12),
    "rope": show.rope(dim=16, length=12, trained=64),
    "rope-rules": show.rope(dim=16, trained=64, scaling="yarn", against="ntk"),
    "pope": show.pope(dim=16, length=12, trained=64),
    **{name: draw(heads=4, length=12, trained=8) for name, draw in show.BIASES.items()},
    "grid": show.grid(heads=2),
}


QUICK = ("sinusoidal", "rope-rules", "alibi", "forget-gate", "grid")


def assert_can_be_read(figure):
    """All words are on the paper and apart, and a colour bar is beside its map."""
    figure.draw_without_rendering()
    paper = figure.bbox
    words = [figure._suptitle] if figure._suptitle else []
    for ax in figure.axes:
        words += [ax._left_title, ax.xaxis.label, ax.yaxis.label]
        words += [ax.get_legend()] if ax.get_legend() else []
        plot = ax.get_window_extent()
        for bar in ax.child_axes:
            place = bar.get_window_extent()
            assert 0 < place.x0 - plot.x1 < 0.05 * plot.width
            assert (place.y0, place.y1) == pytest.approx((plot.y0, plot.y1))
    boxes = [each.get_window_extent() for each in words]
    for i, box in enumerate(boxes):
        assert paper.x0 <= box.x0 <= box.x1 <= paper.x1, words[i]
        assert paper.y0 <= box.y0 <= box.y1 <= paper.y1, words[i]
        for other, of in zip(boxes[:i], words, strict=False):
            assert not (box.width and other.width and box.overlaps(other)), (words[i], of)


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in VIEWS]
)
def test_every_view_is_drawn_with_a_title_for_each_panel_and_can_be_read(name):
    figure = show.figure(VIEWS[name])
    assert len([ax for ax in figure.axes if ax.get_title(loc="left")]) == len(VIEWS[name].panels)
    assert_can_be_read(figure)


@pytest.mark.slow
@pytest.mark.parametrize("encoding", show.ENCODINGS)
def test_a_picture_without_options_can_be_read(encoding):
    assert_can_be_read(show.figure(show.ENCODINGS[encoding]()))


@pytest.mark.parametrize(
    ("suffix", "start"),
    [
        (".svg", b"<?xml"),
        pytest.param(".png", b"\x89PNG", marks=pytest.mark.slow),
        pytest.param(".pdf", b"%PDF", marks=pytest.mark.slow),
    ],
)
def test_a_picture_is_the_same_bytes_every_time(suffix, start):
    """A picture in a repository must change only when what it shows does."""
    once, again = (image(show.figure(VIEWS["learned"]), suffix) for _ in range(2))
    assert once.startswith(start)
    assert once == again


def test_scores_are_those_of_the_module():
    """The picture of decay is what q·k of the module itself is, not another formula."""
    rule = posenc.scaling.YaRN(4.0, original_length=64)
    rope = posenc.RoPE(32, 300, interleaved=False, scaling=rule)
    chart = show.rope(dim=32, trained=64, scaling="yarn", factor=4.0).panels[2]
    distance, score = (torch.tensor(axis, dtype=torch.float64) for axis in chart.lines[1][1:3])
    ones = torch.ones(1, 1, 257, 32, dtype=torch.float64)
    q, k = rope(ones, ones)
    exact = (k[0, 0] @ q[0, 0, 0]) / 32
    assert torch.allclose(score, exact[distance.long()], rtol=0, atol=1e-12)


def test_scores_of_pope_are_those_of_the_module():
    """Equal lengths by distance, and one channel with its phase."""
    view = show.pope(dim=16, length=40, trained=64)
    pope = posenc.PoPE(16, num_kv_heads=1, max_seq_len=64)
    x = torch.full((1, 1, 64, 16), math.log(math.e - 1), dtype=torch.float64)
    q, k = pope(x, x)
    distance, score = (
        torch.tensor(axis, dtype=torch.float64) for axis in view.panels[2].lines[0][1:3]
    )
    exact = (k[0, 0] @ q[0, 0, 0]) / 16
    near = distance < 64
    assert torch.allclose(score[near], exact[distance[near].long()], rtol=0, atol=1e-12)
    with torch.no_grad():
        pope.delta.fill_(-math.pi / 4)
    k = pope(x, x)[1][0, 0].unflatten(-1, (2, 16))[..., 4]
    q = q[0, 0, 63].view(2, 16)[:, 4]
    drawn = torch.tensor(view.panels[3].lines[1].y, dtype=torch.float64)
    assert torch.allclose(drawn, (k @ q).flip(0)[:40], rtol=0, atol=1e-6)


def test_a_bias_is_drawn_as_the_module_has_it():
    """By distance, and as the matrix: Sandwich has no parameters, so there is one picture."""
    view = show.ENCODINGS["sandwich"](heads=4, length=12, trained=8)
    table = posenc.Sandwich(4).table(12)
    assert view.numbers["bias"] == table.tolist()
    added, matrix, weight, any_query = view.panels
    assert [line.y for line in added.lines] == table.tolist()
    assert torch.equal(matrix.table, posenc.Sandwich(4).bias(12)[2])
    assert weight.lines[0].y == pytest.approx((table[0] - table[0, 0]).exp().tolist())
    assert [line.y for line in any_query.lines] == [table[2].tolist()]


def test_queries_have_lines_of_their_own_only_where_they_differ():
    """Three lines above each other would look like one whose legend is wrong."""
    by_name = {name: VIEWS[name].panels[3] for name in ("alibi", "transformer-xl", "fire", "cope")}
    assert {name: len(chart.lines) for name, chart in by_name.items()} == {
        "alibi": 1,
        "transformer-xl": 1,
        "fire": 3,
        "cope": 3,
    }
    assert "any query" in by_name["alibi"].title
    assert "three queries" in by_name["fire"].title


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 8, 12])
def test_a_map_shows_one_of_the_heads_that_have_a_line(heads):
    lines, matrix, _, queries = show.relative("alibi", heads=heads, length=8, trained=4).panels
    head = matrix.title.removeprefix("Bias of ")
    assert head in [line.label for line in lines.lines]
    assert queries.title.endswith(head)


LEARNED = ("t5", "learned-bias", "relative-keys", "transformer-xl", "deberta")


@pytest.mark.parametrize("name", LEARNED)
def test_a_bias_that_begins_with_nothing_to_see_is_drawn_with_an_example_that_falls(name):
    """A flat line would show nothing, and random numbers only noise; the title says what it is."""
    view = show.relative(name, heads=4, length=40, trained=32)
    assert view.title.endswith("an example of learned values")
    for head in view.numbers["bias"]:
        assert head[0] == max(head)
        # Ripples of a sum of sinusoids are small beside the fall.
        assert max(b - a for a, b in pairwise(head)) < 0.1 * (head[0] - head[-1])
    assert show.relative(name, heads=4, length=40, trained=32).numbers == view.numbers


def test_a_table_of_positions_is_an_example_whose_neighbours_are_alike():
    view = show.learned(dim=64, length=128)
    assert view.title.endswith("an example of learned values")
    alike = view.panels[1].table
    assert alike.diagonal(1).min() > 0.9
    assert alike[0, 64:].max() < 0.5


def test_cells_of_a_grid_are_square():
    figure = show.figure(VIEWS["grid"])
    figure.draw_without_rendering()
    for ax in figure.axes[:3]:
        assert ax.get_window_extent().width == pytest.approx(ax.get_window_extent().height)


def test_three_tokens_forget_and_the_others_keep():
    gates = show.forget_gate(heads=2, length=64).panels[3].lines[1]
    low = {position for position, kept in zip(gates.x, gates.y, strict=True) if kept < 0.5}
    assert low == {16, 32, 40}


def test_the_gallery_has_a_panel_for_every_encoding():
    figure = show.gallery(length=16, dim=16)
    titles = " ".join(ax.get_title(loc="left") for ax in figure.axes)
    for name in ("Sinusoidal", "Learned", "Rotary", "ALiBi"):
        assert name in titles


def test_the_gallery_can_be_read():
    assert_can_be_read(show.gallery())
