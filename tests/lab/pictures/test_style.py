import base64
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


def test_a_picture_in_a_page_is_one_element_with_its_description():
    """Its ids are a document's of their own: two pictures cannot take each other's clips."""
    element = ElementTree.fromstring(style.in_page(drawing(), 'a "b"'))
    assert element.get("alt") == 'a "b"'
    kind, content = element.get("src").split(",")
    assert kind == "data:image/svg+xml;base64"
    assert ElementTree.fromstring(base64.b64decode(content)).get("viewBox")
