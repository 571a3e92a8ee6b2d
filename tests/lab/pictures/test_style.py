import base64
import xml.etree.ElementTree as ElementTree

import pytest
import torch

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


def test_a_picture_in_a_page_is_an_address_that_holds_it():
    """Its ids are a document's of their own: two pictures cannot take each other's clips."""
    kind, content = style.in_page(drawing()).split(",")
    assert kind == "data:image/svg+xml;base64"
    assert ElementTree.fromstring(base64.b64decode(content)).get("viewBox")


# Okabe and Ito, "Color Universal Design", 2008: all eight but the yellow.
OKABE_ITO = "#000000 #e69f00 #56b4e9 #009e73 #0072b2 #d55e00 #cc79a7".split()
# Machado, Oliveira and Fernandes, 2009, table 1, severity 1: of linear RGB.
EYES = {
    "usual": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "without red cones": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "without green cones": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
}


def least_distance(colours, eyes):
    """Between any two of them in CIELAB, as these eyes see them."""
    values = [[int(c[i : i + 2], 16) / 255 for i in (1, 3, 5)] for c in colours]
    rgb = torch.tensor(values, dtype=torch.float64)
    linear = torch.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = (linear @ torch.tensor(EYES[eyes], dtype=torch.float64).T).clamp(0, 1)
    # IEC 61966-2-1 to XYZ, of white D65.
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    to_xyz = torch.tensor(to_xyz, dtype=torch.float64)
    xyz = seen @ to_xyz.T / to_xyz.sum(1)
    f = torch.where(xyz > (6 / 29) ** 3, xyz ** (1 / 3), xyz * (29 / 6) ** 2 / 3 + 4 / 29)
    x, y, z = f.unbind(-1)
    lab = torch.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], -1)
    return torch.pdist(lab).min().item()


def test_every_colour_is_as_far_from_the_others_as_okabe_and_ito_s_are():
    """To eyes without red or green cones too, and on white: none is nearly white."""
    wanted = min(least_distance(OKABE_ITO, eyes) for eyes in EYES)
    for eyes in EYES:
        # The matrices have six digits, which distances around 20 show in the fourth.
        assert least_distance(style.COLOURS, eyes) > wanted - 1e-3, eyes
        assert least_distance([*style.COLOURS, "#ffffff"], eyes) > wanted - 1e-3, eyes


def test_looks_differ_in_two_ways_at_least():
    """The first twelve in colour and marker; after them a colour comes back with another dash."""
    looks = [style.look(i) for i in range(48)]
    assert len({look.colour for look in looks[:12]}) == 12
    assert len({look.marker for look in looks[:12]}) == 12
    assert len({(look.colour, look.dash) for look in looks}) == 48
    assert len({(look.colour, look.marker) for look in looks}) == 48
