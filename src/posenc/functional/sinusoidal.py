"""Sinusoidal encoding of positions, of grids and of diffusion timesteps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from posenc._contract import checks
from posenc._contract.position_checks import positions
from posenc.functional._positions import positions_of, rows_of
from posenc.numerics.frequencies import Spectrum
from posenc.numerics.tables import angles, float64_device, round_once, sinusoid


def sinusoidal_pos_embedding(
    seq_len: int,
    embed_dim: int,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    *,
    offset: int | Tensor = 0,
    position_ids: Tensor | None = None,
    base: float = 10_000.0,
) -> Tensor:
    r"""Sinusoidal encoding of ``seq_len`` positions.

    .. math::
        \text{PE}(p, 2i) = \sin(p / b^{2i/D}), \qquad \text{PE}(p, 2i + 1) = \cos(p / b^{2i/D})

    Values are exact up to one rounding to ``dtype``.

    Args:
        seq_len: Positions ``L``, positive.
        embed_dim: Channels ``D``, positive. If odd, the last sine has no cosine.
        device: The device of the result; if None, that of a tensor of positions or offsets, and
            without one the CPU.
        dtype: A floating dtype; float32 if None.
        offset: The first position, or an integer tensor ``(B,)`` with one for each sequence.
        position_ids: Integers of shape ``(L,)`` or ``(B, L)``, instead of ``offset``.
        base: :math:`b` above.

    Returns:
        Tensor of shape ``(seq_len, embed_dim)``, or ``(B, seq_len, embed_dim)``.

    Examples:
        >>> sinusoidal_pos_embedding(seq_len=2, embed_dim=4)
        tensor([[0.0000, 1.0000, 0.0000, 1.0000],
                [0.8415, 0.5403, 0.0100, 0.9999]])

    References:
        Vaswani et al., *Attention Is All You Need*, 2017, section 3.5.
    """
    who = "sinusoidal_pos_embedding"
    length = checks.integer(who, "seq_len", seq_len)
    dim = checks.integer(who, "embed_dim", embed_dim)
    dtype = torch.float32 if dtype is None else checks.float_dtype(who, "dtype", dtype)
    spectrum = Spectrum(dim, checks.base(who, base))
    lead: tuple[int, ...] = ()
    where = torch.device("cpu")
    if isinstance(position_ids, Tensor):
        lead, where = position_ids.shape[:-1], position_ids.device
    elif isinstance(offset, Tensor):
        lead, where = offset.shape, offset.device
    # Of the tensor to encode, rows_of reads only the shape and the device.
    like = torch.empty((*(lead or (1,)), length, 0), device=where if device is None else device)
    at = positions_of(who, like, rows_of(who, like, offset, position_ids))
    return sinusoid(at, spectrum, dtype).view(*lead, length, dim)


def timestep_embedding(
    timesteps: Tensor,
    embed_dim: int,
    *,
    max_period: float = 10_000.0,
    flip_sin_to_cos: bool = False,
    downscale_freq_shift: float = 1.0,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    r"""Sinusoidal encoding of diffusion timesteps, all sines and then all cosines.

    .. math:: \theta_i = P^{-i/(D/2 - \delta)}, \qquad
              t \mapsto (\sin s\,t\,\theta_0, \dots, \cos s\,t\,\theta_0, \dots)

    Args:
        timesteps: ``(N,)``, integer or floating.
        embed_dim: Channels ``D``. If odd, the last one is zero.
        max_period: :math:`P`.
        flip_sin_to_cos: Put the cosines first (ADM, DiT, Stable Diffusion).
        downscale_freq_shift: :math:`\delta`: 1 as in DDPM, 0 as in ADM, DiT and Stable Diffusion.
        scale: :math:`s`.
        dtype: A floating dtype.

    Returns:
        Tensor of shape ``(N, embed_dim)``.

    Examples:
        >>> timestep_embedding(torch.tensor([1.0]), 4)
        tensor([[8.4147e-01, 1.0000e-04, 5.4030e-01, 1.0000e+00]])

    References:
        Ho et al., *Denoising Diffusion Probabilistic Models*, 2020.
    """
    who = "timestep_embedding"
    at = positions(who, "timesteps", timesteps)
    checks.rank(who, "timesteps", at, (1,), "(N,)")
    half = checks.integer(who, "embed_dim", embed_dim, least=2) // 2
    checks.float_dtype(who, "dtype", dtype)
    checks.boolean(who, "flip_sin_to_cos", flip_sin_to_cos)
    scale = checks.positive_float(who, "scale", scale)
    plain = isinstance(downscale_freq_shift, (int, float))
    if not plain or not 0 <= downscale_freq_shift < half:
        rule = f"downscale_freq_shift must be from 0 to below embed_dim / 2 = {half}"
        checks.fail(who, rule, checks.describe(downscale_freq_shift), "Pass 0 or 1.")
    span = half - downscale_freq_shift
    period = checks.base(who, max_period, "max_period")
    where = float64_device(at.device)
    index = torch.arange(half, dtype=torch.float64, device=where)
    phi = angles(at.to(where), scale * period ** (-index / span))
    parts = (phi.cos(), phi.sin()) if flip_sin_to_cos else (phi.sin(), phi.cos())
    encoded = round_once(torch.cat(parts, dim=-1), dtype).to(at.device)
    return torch.nn.functional.pad(encoded, (0, embed_dim % 2))


class Channels(NamedTuple):
    """Which channels a coordinate has; hashable."""

    widths: tuple[int, ...]  # of each coordinate
    order: tuple[int, ...]  # coordinates in the order of their channels
    concatenated: bool
    base: float


def sinusoidal_grid_embedding(
    position_ids: Tensor,
    embed_dim: int,
    *,
    dtype: torch.dtype = torch.float32,
    base: float = 10_000.0,
    concatenated: bool = False,
    widths: Sequence[int] | None = None,
    order: Sequence[int] | None = None,
) -> Tensor:
    r"""Sinusoidal encoding of positions with ``A`` coordinates, a run of channels for each.

    .. math:: \sin(p_a / b^{2i/d_a}), \quad \cos(p_a / b^{2i/d_a}), \qquad \textstyle\sum_a d_a = D

    Args:
        position_ids: Integer or floating coordinates ``(A, ..., L)``, as from
            :func:`posenc.positions.grid`.
        embed_dim: Channels ``D``, a multiple of ``2 A`` if there are no ``widths``.
        dtype: A floating dtype.
        base: :math:`b`, as in :func:`sinusoidal_pos_embedding`.
        concatenated: If true, each coordinate has all its sines before its cosines, and
            coordinates run from last to first (MAE, DiT). If false, sines and cosines alternate,
            and coordinates run from first to last (positional-encodings).
        widths: Even channels :math:`d_a` of each coordinate, in the order of ``position_ids``;
            equal if None.
        order: The coordinates in the order of their channels, such as ``(0, 2, 1)`` for time,
            width and height in CogVideoX; as ``concatenated`` says if None.

    Returns:
        Tensor of shape ``(..., L, embed_dim)``.

    Examples:
        >>> from posenc.positions import grid
        >>> sinusoidal_grid_embedding(grid(2, 3), embed_dim=16).shape
        torch.Size([6, 16])
        >>> video = grid(4, 2, 3)  # time, height, width
        >>> sinusoidal_grid_embedding(video, 16, widths=(4, 6, 6), order=(0, 2, 1)).shape
        torch.Size([24, 16])

    References:
        Vaswani et al., 2017, section 3.5; He et al., *Masked Autoencoders*, 2022, appendix A;
        Yang et al., *CogVideoX*, 2024.
    """
    who = "sinusoidal_grid_embedding"
    at = positions(who, "position_ids", position_ids)
    checks.float_dtype(who, "dtype", dtype)
    if at.dim() < 2 or len(at) == 0:
        rule, got = "position_ids must have shape (A, ..., L)", f"shape {tuple(at.shape)}"
        checks.fail(who, rule, got, "Pass position_ids[None] for one coordinate.")
    channels = check_channels(who, len(at), embed_dim, base, concatenated, widths, order)
    return of_grid(at.unbind(0), channels, dtype)


def check_channels(
    who: str, axes: int, embed_dim: Any, base: Any, concatenated: Any, widths: Any, order: Any
) -> Channels:
    """The channels that the arguments describe, for ``axes`` coordinates."""
    dim = checks.even(who, "embed_dim", embed_dim)
    backwards = checks.boolean(who, "concatenated", concatenated)
    if widths is None:
        if dim % (2 * axes):
            rule = f"embed_dim must be a multiple of twice the {axes} coordinates"
            checks.fail(who, rule, dim, "Pass another embed_dim, or widths.")
        widths = (dim // axes,) * axes
    each = _integers(who, "widths", widths, axes, 1)
    if sum(each) != dim or any(width % 2 for width in each):
        rule = f"widths must be even and add up to embed_dim={dim}"
        checks.fail(who, rule, each, "Change widths or embed_dim.")
    if order is None:
        order = tuple(range(axes))[::-1] if backwards else tuple(range(axes))
    runs = _integers(who, "order", order, axes, 0)
    if sorted(runs) != list(range(axes)):
        rule = f"order must name each of the coordinates 0 to {axes - 1} once"
        checks.fail(who, rule, runs, "Pass (0, 2, 1), for example.")
    return Channels(each, runs, backwards, checks.base(who, base))


def of_grid(coordinates: Sequence[Tensor], channels: Channels, dtype: torch.dtype) -> Tensor:
    """The encoding of a tensor ``[...]`` for each coordinate, ``[..., D]``."""
    parts = []
    for axis in channels.order:
        at, spectrum = coordinates[axis], Spectrum(channels.widths[axis], channels.base)
        parts.append(sinusoid(at, spectrum, dtype, concatenated=channels.concatenated))
    return torch.cat(parts, dim=-1)


def _integers(who: str, name: str, values: Any, count: int, least: int) -> tuple[int, ...]:
    if not isinstance(values, (list, tuple)) or len(values) != count:
        rule, got = f"{name} must be a tuple of {count} ints", checks.describe(values)
        checks.fail(who, rule, got, "Pass one for each coordinate.")
    return tuple(checks.integer(who, name, value, least=least) for value in values)
