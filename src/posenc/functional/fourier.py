"""Fourier features of continuous coordinates."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from posenc._contract import checks
from posenc._contract.sharding import replicate_like
from posenc.numerics.constants import constant
from posenc.numerics.tables import float64_device, round_once


def fourier_features(
    coordinates: Tensor,
    frequencies: Tensor,
    *,
    include_input: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    r"""Cosines and sines of mixtures of the coordinates.

    .. math:: x \mapsto (\cos 2\pi B x,\ \sin 2\pi B x)

    Products are float64, and exact if both tensors have at most 24 bits, as float32 has; those of
    wider numbers put an angle off by less than 7e-16 times the turns. Whole turns are taken off,
    and the result is rounded once to ``dtype``. Gradients reach both tensors.

    Args:
        coordinates: Integers or floats ``(..., A)``.
        frequencies: :math:`B`, floats of shape ``(F, A)``, in turns per unit of a coordinate.
        include_input: Whether the coordinates come first, rounded to ``dtype``.
        dtype: A floating dtype.

    Returns:
        Tensor of shape ``(..., 2 F)``, all cosines before all sines; ``(..., A + 2 F)`` with the
        coordinates.

    Examples:
        >>> times = torch.tensor([[0], [1], [2]])
        >>> fourier_features(times, torch.tensor([[0.25]])).round()
        tensor([[ 1.,  0.],
                [ 0.,  1.],
                [-1.,  0.]])

    References:
        Tancik et al., *Fourier Features Let Networks Learn High Frequency Functions in Low
        Dimensional Domains*, 2020, section 2.
    """
    who = "fourier_features"
    matrix = checks.float_tensor(who, "frequencies", frequencies)
    checks.rank(who, "frequencies", matrix, (2,), "(F, A)")
    return of_mixtures(who, coordinates, matrix, include_input, dtype)


def nerf_features(
    coordinates: Tensor,
    num_frequencies: int,
    *,
    scale: float = 1.0,
    include_input: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    r"""Sines and cosines of each coordinate at frequencies that double.

    .. math:: x \mapsto (\sin 2^k \pi s x_a,\ \cos 2^k \pi s x_a), \qquad k = 0, \dots, K - 1

    Precision is that of :func:`fourier_features`. Channels are in the order of NeRF's code: for
    each frequency the sines of all coordinates, then their cosines.

    Args:
        coordinates: Integers or floats ``(..., A)``, in NeRF between -1 and 1.
        num_frequencies: Frequencies :math:`K` of each coordinate, at most 64.
        scale: :math:`s`: 1 as in the paper; ``1 / math.pi`` as in its code, which leaves out π.
        include_input: Whether the coordinates come first, as in the code.
        dtype: A floating dtype.

    Returns:
        Tensor of shape ``(..., 2 A K)``; ``(..., A + 2 A K)`` with the coordinates.

    Examples:
        >>> nerf_features(torch.tensor([[0.5, 0.25]]), 2).round(decimals=2)
        tensor([[ 1.0000,  0.7100,  0.0000,  0.7100,  0.0000,  1.0000, -1.0000,  0.0000]])

    References:
        Mildenhall et al., *NeRF: Representing Scenes as Neural Radiance Fields for View Synthesis*,
        2020, section 5.1.
    """
    who = "nerf_features"
    count = check_octaves(who, num_frequencies)
    scale = checks.positive_float(who, "scale", scale)
    return of_octaves(who, coordinates, None, count, scale, include_input, dtype)


def check_octaves(who: str, num_frequencies: Any) -> int:
    """A number of frequencies, each of which is twice the last."""
    count = checks.integer(who, "num_frequencies", num_frequencies)
    if count > 64:
        rule = "num_frequencies must be at most 64, because each frequency is twice the last"
        checks.fail(who, rule, count, "Pass 10, for example.")
    return count


def of_mixtures(
    who: str, coordinates: Tensor, matrix: Tensor, include_input: bool, dtype: torch.dtype
) -> Tensor:
    """What :func:`fourier_features` returns, for a caller of another name."""
    at = _coordinates(who, coordinates, matrix.shape[1])
    checks.float_dtype(who, "dtype", dtype)
    where = float64_device(at.device)
    phi = _angles(at.to(where)[..., None, :], matrix.to(where)).sum(-1)
    return _joined(who, at, [phi.cos(), phi.sin()], include_input, dtype)


def of_octaves(
    who: str,
    coordinates: Tensor,
    axes: int | None,
    count: int,
    scale: float,
    include_input: bool,
    dtype: torch.dtype,
) -> Tensor:
    """What :func:`nerf_features` returns, of ``axes`` coordinates if that is given."""
    at = _coordinates(who, coordinates, axes)
    checks.float_dtype(who, "dtype", dtype)
    where = float64_device(at.device)
    rates = constant(tuple([scale * 2.0 ** (k - 1) for k in range(count)]), torch.float64, where)
    phi = _angles(at.to(where)[..., None, :], rates[:, None])
    features = torch.stack((phi.sin(), phi.cos()), dim=-2).flatten(-3)
    return _joined(who, at, [features], include_input, dtype)


def _angles(at: Tensor, frequencies: Tensor) -> Tensor:
    """The angle of each product, less whole turns, in float64."""
    frequencies = replicate_like(at, frequencies.to(torch.float64))
    return (at.to(torch.float64) * frequencies).frac() * math.tau


def _coordinates(who: str, at: Any, axes: int | None) -> Tensor:
    """``at`` if it is a tensor ``(..., axes)``, or of any number of axes."""
    typed = isinstance(at, Tensor) and (
        at.dtype in checks.INT_DTYPES or at.dtype in checks.FLOAT_DTYPES
    )
    last = at.shape[-1] if typed and at.dim() else 0
    if last == 0 or (axes is not None and last != axes):
        rule = f"coordinates must be a tensor of shape (..., {'A' if axes is None else axes})"
        error = ValueError if typed else TypeError
        hint = "Pass times[..., None] for one coordinate, positions.grid(H, W).T for two."
        checks.fail(who, rule, checks.describe(at), hint, error)
    return at  # type: ignore[no-any-return]


def _joined(
    who: str, at: Tensor, parts: list[Tensor], include_input: bool, dtype: torch.dtype
) -> Tensor:
    """Coordinates, if they are included, and features, rounded once, on the device of ``at``."""
    if checks.boolean(who, "include_input", include_input):
        parts = [at.to(parts[0]), *parts]
    return round_once(torch.cat(parts, dim=-1), dtype).to(at.device)
