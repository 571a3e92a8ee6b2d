import torch

import posenc
from posenc.lab.plots import characters, gallery


def test_characters_show_order_and_leave_minus_infinity_blank():
    lines = characters(posenc.ALiBi(8).get_bias(4)[0]).split("\n")
    assert [line.rstrip() for line in lines] == ["@", "*@", "-*@", " -*@"]


def test_characters_shrink_to_the_screen():
    lines = characters(torch.rand(500, 300), rows=10, columns=40).split("\n")
    assert len(lines) == 10
    assert {len(line) for line in lines} == {40}


def test_a_constant_matrix_is_drawn():
    assert characters(torch.ones(2, 3)) == "   \n   "


def test_the_gallery_has_a_panel_for_every_encoding(tmp_path):
    figure = gallery(length=16, dim=16)
    titles = " ".join(ax.get_title() for ax in figure.axes)
    for name in ("Sinusoidal", "Learned", "Rotary", "ALiBi"):
        assert name in titles
    figure.savefig(tmp_path / "gallery.svg")
