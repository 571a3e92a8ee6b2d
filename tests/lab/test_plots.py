from posenc.lab.plots import overview


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
