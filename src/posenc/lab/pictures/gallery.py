"""One picture of all four encodings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from posenc import nn
from posenc.lab.pictures import panels, style
from posenc.lab.pictures.panels import Rotation
from posenc.numerics.frequencies import inverse_frequencies

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def gallery(length: int = 96, dim: int = 64) -> Figure:
    """What is added, what is rotated, what is subtracted."""
    figure = style.figure(14, 7.6, "posenc: where a token is, four ways")
    axes = figure.subplots(2, 3)
    rates = inverse_frequencies(dim)
    rotation = (Rotation("", rates),)
    panels.heat(axes[0, 0], nn.SinusoidalPE(length, dim).get_encoding(length), "Sinusoidal: added")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        learned = nn.LearnedPosEmbedding(length, dim).pos_emb.weight.detach()
    panels.heat(axes[0, 1], learned, "Learned: added, before training")
    panels.turns(axes[0, 2], rates)
    panels.wavelengths(axes[1, 0], rotation, length)
    panels.decay(axes[1, 1], rotation, length, 4 * length)
    panels.bias(axes[1, 2], nn.ALiBi(8), length)
    axes[0, 2].set_title(f"Rotary: {axes[0, 2].get_title(loc='left').lower()}", loc="left")
    return figure
