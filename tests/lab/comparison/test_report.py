import copy
import dataclasses
import re
from html.parser import HTMLParser

import pytest

from posenc.lab.comparison import report
from posenc.lab.comparison.encodings import ENCODINGS
from posenc.lab.comparison.plan import Plan
from posenc.lab.comparison.run import Run
from posenc.lab.panels import image

TINY = Plan(
    encodings=("none", "learned", "rope-yarn", "alibi", "forget-gate"),
    train_length=8,
    steps=3,
    batch=2,
    width=16,
    layers=1,
    heads=2,
    windows=2,
)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    run = Run(tmp_path_factory.mktemp("run"), TINY, "posenc compare --text '<b>.txt'")
    run.begin()
    run.go()
    return run.results


@pytest.fixture(scope="module")
def page(results):
    return report.page(TINY, results)


class Page(HTMLParser):
    """Tags that are open, text that is seen, and addresses that are asked for."""

    def __init__(self, page):
        super().__init__()
        self.open, self.text, self.addresses = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)
        for name, value in attributes:
            if name in ("src", "href", "xlink:href", "srcset", "action", "data"):
                self.addresses.append(value)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in ("meta", "link", "br"):
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_needs_nothing_from_anywhere(page):
    """It is opened from a disk, without a network."""
    read = Page(page)
    assert read.open == []
    inside = ("#", "data:")
    assert read.addresses
    assert all(address.startswith(inside) for address in read.addresses), read.addresses
    assert "@import" not in page
    assert not re.search(r"url\((?!#)", page)
    assert "<script" not in page


def test_the_page_has_every_number_and_the_command(results, page):
    text = " ".join("".join(Page(page).text).split())
    for row in results["summary"]["text"]:
        assert row["label"] in text
        assert row["how"] in text
        assert row["past"] in text
        for loss in row["score"]:
            assert f"{loss:.3f}" in text
        cost = results["costs"][row["encoding"]]
        assert f"{cost['parameters']:,}" in text
        assert f"{cost['read_bytes'] / 1e6:.2f}" in text
    assert "posenc compare --text '<b>.txt'" in text
    assert "Not finished" not in text


def test_the_page_says_how_slowly_the_slowest_pair_rotates(page):
    """Base 8 over 8 channels: 2π · 8^(6/8) positions."""
    assert "base 8: the slowest pair rotates once in 30 positions" in " ".join(page.split())


def test_a_run_that_is_not_finished_says_so(results):
    assert "Not finished" in report.page(TINY, {**results, "complete": False})


def test_nothing_of_the_results_becomes_a_tag(results):
    """They are read from a file, which anybody may have written."""
    tag = "<script>alert(1)</script>'\"{{ 7 * 7 }}"
    hostile = copy.deepcopy(results)
    hostile |= {"command": tag, "posenc": tag}
    hostile["machine"] = dict.fromkeys(hostile["machine"], tag)
    hostile["text"] |= {"name": tag, "sha256": tag}
    for row in hostile["summary"]["text"]:
        row |= {"label": tag, "past": tag, "how": tag, "rank": [tag] * len(TINY.times)}
    written = report.page(TINY, hostile)
    assert "<script" not in written
    assert written.count("&lt;script&gt;alert(1)&lt;/script&gt;&#39;&#34;{{ 7 * 7 }}") > 30
    assert Page(written).open == []


def test_a_dollar_in_the_name_of_a_text_is_drawn_as_it_is(results):
    """Matplotlib would read a formula between two of them, and refuse one it cannot read."""
    named = {**results, "text": {**results["text"], "name": r"$\frac$.txt"}}
    assert rb"$\frac$.txt" in image(report.overview(TINY, named), ".svg")


def test_one_legend_names_every_line_of_all_panels(results):
    """Each encoding has the colour, the marker and the dash of the legend, in every panel."""
    sheet = report.overview(TINY, results)
    sheet.draw_without_rendering()
    (legend,) = sheet.legends
    assert [ax.get_legend() for ax in sheet.axes] == [None] * 3

    def look(line):
        return line.get_color(), line.get_marker(), line.get_linestyle()

    named = {
        text.get_text(): look(line)
        for text, line in zip(legend.texts, legend.get_lines(), strict=True)
    }
    assert named.keys() == {row["label"] for row in results["summary"]["text"]}
    assert len(set(named.values())) == len({colour for colour, _, _ in named.values()}) == 5
    for ax in sheet.axes:
        # RoPE was trained for RoPE + YaRN, and is not compared: it has the look of the latter.
        named["RoPE"] = named["RoPE + YaRN"]
        lines = [line for line in ax.get_lines() if not line.get_label().startswith("_")]
        assert lines
        assert all(look(line) == named[line.get_label()] for line in lines)
        assert ax.get_window_extent().x1 <= legend.get_window_extent().x0
    assert legend.get_window_extent().x1 <= sheet.bbox.x1 + 1


def test_a_single_length_is_drawn(tmp_path):
    plan = dataclasses.replace(TINY, times=(1,), encodings=("none",))
    run = Run(tmp_path, plan)
    run.begin()
    run.go()
    assert report.overview(plan, run.results).axes
    assert "1 ×" in report.page(plan, run.results)


def test_many_encodings_have_a_board_with_the_best_mean_rank_first(results):
    (row, *_), names = results["summary"]["text"], tuple(ENCODINGS)
    rows = [
        {**row, "encoding": name, "label": ENCODINGS[name].label, "rank": [rank] * 4}
        for rank, name in zip(range(len(names), 0, -1), names, strict=True)
    ]
    plan = dataclasses.replace(TINY, encodings=names)
    ranked = {**results, "summary": {"text": rows}}
    (ax,) = report.overview(plan, ranked).axes
    labels = [label.get_text().removesuffix(" *") for label in ax.get_yticklabels()]
    assert labels == [ENCODINGS[name].label for name in reversed(names)]
    assert [text.get_text() for text in ax.texts][:4] == [f"{score:.2f}" for score in row["score"]]
    assert "* applied to a trained model" in ax.get_xlabel()
    # Matplotlib warns, which is an error here, if a legend leaves no room for its charts.
    assert report.page(plan, ranked).count("<img alt") == 2
