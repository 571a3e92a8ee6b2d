import base64
import copy
import dataclasses
import html
import math
import re

import pytest

from posenc.lab.comparison import report
from posenc.lab.comparison.encodings import ENCODINGS
from posenc.lab.comparison.plan import Plan
from posenc.lab.comparison.run import Run
from posenc.lab.comparison.text import tales
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


@pytest.fixture
def without_charts(monkeypatch):
    """Charts take longer than the words of the page."""
    monkeypatch.setattr(report, "_pictures", lambda charts: [])


def test_the_page_needs_no_other_file(page):
    """It is opened from a disk, without a network."""
    addresses = re.findall(r'(?:src|href|srcset|action|data)="([^"]*)"', page)
    assert addresses
    assert all(address.startswith("data:") for address in addresses)
    assert not re.search(r"@import|url\((?!#)|<script", page)


def test_the_page_has_every_number_and_the_command(results, page):
    text = " ".join(html.unescape(re.sub("<[^>]+>", "", page)).split())
    for row in results["summary"]["text"]:
        cost = results["costs"][row["encoding"]]
        words = [row["label"], row["how"], row["past"], *(f"{loss:.3f}" for loss in row["score"])]
        for each in (*words, f"{cost['parameters']:,}", f"{cost['read']:.2f}"):
            assert each in text
    assert "posenc compare --text '<b>.txt'" in text
    # Base 8 over 8 channels: 2π · 8^(6/8) positions.
    assert "base 8: the slowest pair rotates once in 30 positions" in text
    assert "Not finished" not in text


@pytest.mark.usefixtures("without_charts")
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


def test_a_dollar_in_the_name_of_a_text_is_drawn_as_it_is(results):
    """Matplotlib would read a formula between two of them, and refuse one it cannot read."""
    named = {**results, "text": {**results["text"], "name": r"$\frac$.txt"}}
    assert rb"$\frac$.txt" in image(report.overview(TINY, named), ".svg")


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
    assert report.page(plan, ranked).count("<img ") == 1 + 3


def letters_of(page, width):
    """The smallest letters of each picture in pixels, if it is as wide as this."""
    for encoded in re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', page):
        svg = base64.b64decode(encoded).decode()
        drawn = float(re.search(r'viewBox="0 0 ([\d.]+) ', svg)[1])
        smallest = min(float(size) for size in re.findall(r"font(?:-size)?: ([\d.]+)px", svg))
        yield smallest * width / drawn


def test_charts_can_be_read_on_a_phone(page):
    """One below the other, in the 360 pixels that a narrow screen has for them."""
    shown = list(letters_of(page, 360))
    assert len(shown) == 3
    assert min(shown) > 8


@pytest.mark.usefixtures("without_charts")
def test_one_seed_is_not_ranked(results, page):
    """It has no spread, so a rank would be one of chance; and says what shows it."""
    assert "#1" not in page
    assert "<b>" not in page
    assert "--seeds 3 shows it" in page
    two = copy.deepcopy(results)
    for row in two["summary"]["text"]:
        row["seeds"] = [0, 1]
    page = report.page(dataclasses.replace(TINY, seeds=2), two)
    assert "#1" in page
    assert "<b>" in page
    assert "--seeds" not in page


@pytest.mark.usefixtures("without_charts")
def test_a_measure_that_a_run_does_not_have_has_no_column(results, page):
    """Memory is counted on CUDA."""
    assert "MB" not in page
    assert not re.search(r"<t[hd]></t[hd]>", page.split("What each costs")[1].split("<tr>", 2)[2])
    counted = copy.deepcopy(results)
    for cost in counted["costs"].values():
        cost["read_bytes"] = 2_000_000
    page = report.page(TINY, counted)
    assert "<th>reading, MB</th>" in page
    assert "<td>2.00</td>" in page
    assert "step, MB" not in page


def test_the_page_says_what_guessing_costs(results, page):
    """The tales have 56 symbols; a string of a game has 8 of 16 letters, or fewer if short."""
    symbols = len(set(tales()))
    assert f"costs ln {symbols} = {math.log(symbols):.2f} nats" in page
    words = report.guess(dataclasses.replace(TINY, train_length=32), results, "copy")
    assert "among the 8 letters of the string is right in 12.5%" in words
    assert "among all 16 letters in 6.2%" in words
    assert "among the 2 letters" in report.guess(TINY, results, "index")
