import itertools
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posenc.lab.pictures import style


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.floats(0.01, 0.1))
def test_labels_are_pushed_apart_and_keep_their_order(heights, apart):
    """Direct labels replace a legend only if none hides another or changes places with it."""
    moved = style.push_apart(heights, apart)
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    ranked = [moved[i] for i in order]
    assert all(b - a >= apart - 1e-9 for a, b in itertools.pairwise(ranked))


def test_labels_that_have_room_stay():
    assert style.push_apart([0.9, 0.1, 0.5], 0.1) == pytest.approx([0.9, 0.1, 0.5])


def drawing():
    figure = style.figure(3, 2)
    ax = figure.subplots()
    style.plain(ax, "Title", "across", "up")
    ax.plot([0, 1], [0, 1], marker="o")
    return figure


@pytest.mark.parametrize(
    ("suffix", "start"),
    [
        pytest.param(".png", b"\x89PNG", id="png"),
        pytest.param(".svg", b"<?xml", id="svg"),
        pytest.param(".pdf", b"%PDF", id="pdf"),
    ],
)
def test_a_picture_is_the_same_bytes_every_time(suffix, start):
    """A picture in a repository must change only when what it shows does."""
    once, again = (style.image(drawing(), suffix) for _ in range(2))
    assert once.startswith(start)
    assert once == again


def test_inline_pictures_take_the_ink_of_the_page_and_share_no_ids():
    """Two pictures in one page would otherwise take each other's markers and clips."""
    first, second = (style.inline_svg(drawing(), name, 'a "b"') for name in ("one", "two"))
    assert "currentColor" in first
    assert style.INK not in first
    ids = [
        {e.get("id") for e in ElementTree.fromstring(svg).iter() if e.get("id")}
        for svg in (first, second)
    ]
    assert ids[0]
    assert not ids[0] & ids[1]
    root = ElementTree.fromstring(first)
    assert root.get("aria-label") == 'a "b"'
    assert root.get("width") is None
    assert root.get("viewBox")
