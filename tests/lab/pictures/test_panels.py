import torch

import posenc
from posenc.lab.pictures.panels import Line, characters, chart


def test_characters_show_order_and_leave_minus_infinity_blank():
    lines = characters(posenc.ALiBi(8).get_bias(4)[0]).split("\n")
    assert [line.rstrip() for line in lines] == ["@", "*@", "-*@", " -*@"]


def test_characters_shrink_to_the_screen():
    lines = characters(torch.rand(500, 300), rows=10, columns=40).split("\n")
    assert len(lines) == 10
    assert {len(line) for line in lines} == {40}


def test_a_constant_matrix_is_drawn():
    assert characters(torch.ones(2, 3)) == "   \n   "


def test_a_logarithmic_chart_draws_equal_ratios_as_equal_steps():
    drawn = chart([Line("", [1, 10, 100], [1, 10, 100])], rows=3, columns=5, log="xy")
    assert [row.split("|")[1] for row in drawn.split("\n")[:3]] == ["    *", "  *", "*"]


def test_several_lines_have_marks_of_their_own_and_names():
    drawn = chart([Line("up", [0, 1], [0, 1]), Line("down", [0, 1], [1, 0])], rows=2, columns=2)
    assert drawn.split("\n") == ["1 |o*", "0 |*o", "   0 1", "   * up   o down"]


def test_a_mark_lies_across_and_is_named():
    drawn = chart([Line("", [0, 1], [0, 2])], rows=3, columns=4, mark=(1.0, "limit"))
    assert drawn.split("\n")[1] == "  |----"
    assert drawn.endswith("- limit")


def test_a_flat_line_is_drawn():
    assert chart([Line("", [0, 1], [5, 5])], rows=3, columns=2).split("\n")[1] == "  |**"
