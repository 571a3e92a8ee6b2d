"""What `posenc show` draws of Fourier features."""

from __future__ import annotations

import torch
from torch import Tensor

from posenc import nn
from posenc.lab.pictures.panels import Chart, Heat, Line, View, line

_SCALES = (1.0, 4.0, 16.0)
_OCTAVES = (2, 4, 6)


def fourier(*, dim: int = 128, length: int = 128) -> View:
    """Features of ``length`` coordinates between 0 and 1, and how alike they are by distance."""
    at = torch.linspace(0, 1, length, dtype=torch.float64)[:, None]
    random = nn.FourierFeatures(1, num_frequencies=dim // 2, scale=_SCALES[1])
    assert random.frequencies is not None
    slowest_first = random.frequencies[:, 0].abs().argsort()
    cosines = random(at)[:, : dim // 2][:, slowest_first]
    octaves = nn.FourierFeatures(1, num_frequencies=max(_OCTAVES), kind="nerf")
    many = 64 * dim
    gaussian = [
        _similarity(f"scale {s:g}", nn.FourierFeatures(1, num_frequencies=many, scale=s), at)
        for s in _SCALES
    ]
    doubling = [
        _similarity(f"{k} frequencies", nn.FourierFeatures(1, num_frequencies=k, kind="nerf"), at)
        for k in _OCTAVES
    ]
    cells = f"place, 0 to 1 in {length}"
    title = "Similarity by distance"
    panels = (
        Heat("Random: cosines, slow ones first", "frequency", cells, cosines),
        Heat("NeRF: sine and cosine, frequencies double", "channel", cells, octaves(at)),
        Chart(f"{title}, random", "distance", "", gaussian),
        Chart(f"{title}, powers of two", "distance", "", doubling),
    )
    rates = random.frequencies[:, 0].tolist()
    numbers = {"encoding": "fourier", "dim": dim, "scale": random.scale, "frequencies": rates}
    return View(f"Fourier features of one coordinate, {dim} channels", panels, numbers)


def _similarity(label: str, module: nn.FourierFeatures, at: Tensor) -> Line:
    """Cosine between the features of zero and of each coordinate."""
    made = module(at, dtype=torch.float64)
    return line(label, at[:, 0], made @ made[0] / made[0].square().sum())
