import math

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


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in VIEWS]
)
def test_every_view_is_drawn_with_a_title_for_each_panel(name):
    figure = show.figure(VIEWS[name])
    figure.draw_without_rendering()
    assert len([ax for ax in figure.axes if ax.get_title(loc="left")]) == len(VIEWS[name].panels)


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
    added, matrix, weight, queries = view.panels
    assert [line.y for line in added.lines] == table.tolist()
    assert torch.equal(matrix.table, posenc.Sandwich(4).bias(12)[2])
    assert weight.lines[0].y == pytest.approx((table[0] - table[0, 0]).exp().tolist())
    assert [line.y for line in queries.lines] == [table[2, :n].tolist() for n in (12, 7, 4)]


def test_a_bias_that_starts_at_zero_is_drawn_with_random_numbers():
    """A flat line would show nothing; the same numbers every time, so the picture is too."""
    once, again = (show.relative("learned-bias", heads=2, length=12, trained=8) for _ in range(2))
    row = once.numbers["bias"][0]
    assert len(set(row)) == 8
    assert len(set(row[7:])) == 1
    assert once.numbers == again.numbers


def test_three_tokens_forget_and_the_others_keep():
    gates = show.forget_gate(heads=2, length=64).panels[3].lines[1]
    low = {position for position, kept in zip(gates.x, gates.y, strict=True) if kept < 0.5}
    assert low == {16, 32, 40}


def test_the_gallery_has_a_panel_for_every_encoding():
    figure = show.gallery(length=16, dim=16)
    titles = " ".join(ax.get_title(loc="left") for ax in figure.axes)
    for name in ("Sinusoidal", "Learned", "Rotary", "ALiBi"):
        assert name in titles
