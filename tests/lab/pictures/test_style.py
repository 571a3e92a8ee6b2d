import base64
import xml.etree.ElementTree as ElementTree

import pytest

from posenc.lab.pictures import style


def test_a_legend_names_the_lines_that_have_a_label():
    ax = style.figure(3, 2).subplots()
    ax.plot([0, 1], [0, 1], label="")
    style.legend(ax)
    assert ax.get_legend() is None
    ax.plot([0, 1], [1, 0], label="down", color=style.INK)
    style.legend(ax)
    (text,) = ax.get_legend().texts
    assert (text.get_text(), text.get_color()) == ("down", style.INK)


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
