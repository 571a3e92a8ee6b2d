import runpy
from pathlib import Path

from matplotlib.colors import to_rgba

from posenc.lab.pictures.style import INK
from posenc.lab.plots import timings

SUMMARY = Path(__file__).parents[2] / "benchmarks" / "summary.py"


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

    figure = runpy.run_path(str(SUMMARY))["overview"](reports)
    figure.savefig(tmp_path / "overview.svg")

    dots = {
        ax.get_title(loc="left"): [
            float(line.get_xdata()[0]) for line in ax.lines if line.get_ls() == "None"
        ]
        for ax in figure.axes
    }
    assert dots == {"a chip": [2.0, 2.0], "a card": [1.25]}


def test_a_panel_says_its_positions_and_looks_like_every_other_picture():
    """The same case with an offset and with ids is two panels, told apart by their titles."""
    bar = {**result("posenc", 2.0), "ratio_low": 1.5, "ratio_high": 2.5}
    wrong = {**bar, "contestant": "a peer", "status": "wrong"}
    work = {"case": {"name": "tiny", "mode": "forward"}, "dtype": "bf16", "layout": "half"}
    report = {
        "machine": {"cpu": "a chip", "gpu": None},
        "settings": {"threads": 1},
        "measurements": [
            {**work, "device": "cpu", "copies": 1, "positions": at, "results": [bar, wrong]}
            for at in ("offset", "ids")
        ],
    }
    offset, ids = timings(report).axes
    assert offset.get_title(loc="left") == "tiny bf16 half forward"
    assert ids.get_title(loc="left") == "tiny bf16 half forward ids"
    assert [text.get_text() for text in ids.texts] == [" 2", " wrong"]
    assert ids.spines["left"].get_edgecolor() == to_rgba(INK)
