"""Sinusoidal position encoding."""

from __future__ import annotations

import torch
from torch import Tensor

from posenc._contract import checks
from posenc.numerics.frequencies import Spectrum
from posenc.numerics.tables import sinusoid


def sinusoidal_pos_embedding(
    seq_len: int,
    embed_dim: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    *,
    offset: int = 0,
    base: float = 10_000.0,
) -> Tensor:
    r"""Sinusoidal encoding of ``seq_len`` positions.

    .. math::
        \text{PE}(p, 2i) = \sin(p / b^{2i/D}), \qquad \text{PE}(p, 2i + 1) = \cos(p / b^{2i/D})

    Every number is the exact value rounded once to ``dtype``.

    Args:
        seq_len: Positions ``L``, positive.
        embed_dim: Channels ``D``, positive. If odd, the last sine has no cosine.
        device: Where the result lives.
        dtype: A floating dtype; float32 if None.
        offset: The first position.
        base: :math:`b` above.

    Returns:
        Tensor of shape ``(seq_len, embed_dim)``.

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
    start = checks.integer(who, "offset", offset, least=0)
    dtype = torch.float32 if dtype is None else checks.float_dtype(who, "dtype", dtype)
    spectrum = Spectrum(dim, checks.positive_float(who, "base", base))
    return sinusoid(torch.arange(start, start + length, device=device), spectrum, dtype)
