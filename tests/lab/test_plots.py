import torch

import posenc
from posenc.lab.plots import characters, gallery, overview


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


def result(name, ratio, via="loop"):
    return {"contestant": name, "status": "timed", "via": via, "ratio": ratio}


def test_the_overview_has_a_panel_for_each_machine_and_a_dot_for_each_time(tmp_path):
    """A machine's files are read together; on CUDA the graph's time is the one that counts."""
    case = {"name": "tiny", "mode": "forward"}
    work = {"case": case, "dtype": "bf16", "layout": "half", "positions": "offset"}
    on_cpu = {**work, "device": "cpu", "results": [result("posenc", 2.0), result("clone", 1.5)]}
    on_gpu = {
        **work,
        "device": "cuda",
        "results": [result("posenc", 9.0), result("posenc", 1.25, "graph")],
    }
    machine = {"cpu": "a chip", "gpu": "a card"}
    reports = [
        {"machine": machine, "settings": {"threads": threads}, "measurements": [measurement]}
        for threads, measurement in ((1, on_cpu), (2, on_cpu), (2, on_gpu))
    ]

    figure = overview(reports)
    figure.savefig(tmp_path / "overview.svg")

    dots = {
        ax.get_title(): [float(line.get_xdata()[0]) for line in ax.lines if line.get_ls() == "None"]
        for ax in figure.axes
    }
    assert dots == {"a chip": [2.0, 2.0], "a card": [1.25]}
