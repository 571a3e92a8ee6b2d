"""Truths that share nothing with `src`: closed forms in mpmath, complex numbers, plain loops."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cache

import mpmath
import torch
from torch import Tensor

mpmath.mp.prec = 160


# Hundreds of tests ask for the same rows, and mpmath takes a second for a long table. What is kept
# belongs to the precision in force, ``bits``.
@cache
def _rate(pair: int, dim: int, base: float, bits: int) -> mpmath.mpf:
    return mpmath.power(mpmath.mpf(base), mpmath.mpf(-2 * pair) / dim)


def angle(position: int, pair: int, dim: int, base: float = 10_000.0) -> mpmath.mpf:
    return mpmath.mpf(position) * _rate(pair, dim, base, mpmath.mp.prec)


@cache
def _cos_sin(position: int, pair: int, dim: int, base: float, bits: int) -> tuple[float, float]:
    cos, sin = mpmath.cos_sin(angle(position, pair, dim, base))
    return float(cos), float(sin)


def exact_cos_sin(
    positions: Sequence[int], dim: int, base: float = 10_000.0
) -> tuple[Tensor, Tensor]:
    """cos and sin of the exact angles, correctly rounded to float64, ``[T, P]``."""
    pairs = (dim + 1) // 2
    rows = [[_cos_sin(p, i, dim, base, mpmath.mp.prec) for i in range(pairs)] for p in positions]
    both = torch.tensor(rows, dtype=torch.float64).view(len(rows), pairs, 2)
    return both[..., 0].contiguous(), both[..., 1].contiguous()


def tables(rows: int, pairs: int, device: str = "cpu") -> list[Tensor]:
    """cos and sin of positions ``0 .. rows - 1``, on a device."""
    return [table.to(device) for table in exact_cos_sin(range(rows), 2 * pairs)]


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Rotation by complex multiplication, in complex128."""
    pairs = cos.shape[-1]
    turned = x[..., : 2 * pairs].double()
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
    else:
        a, b = turned[..., :pairs], turned[..., pairs:]
    z = torch.complex(a, b) * torch.complex(cos.double(), sin.double())
    out = torch.empty_like(turned)
    if interleaved:
        out[..., 0::2], out[..., 1::2] = z.real, z.imag
    else:
        out[..., :pairs], out[..., pairs:] = z.real, z.imag
    return torch.cat((out, x[..., 2 * pairs :].double()), dim=-1)


def pair_magnitude(x: Tensor, pairs: int, *, interleaved: bool) -> Tensor:
    """Length of the pair each rotated channel belongs to, in the shape of ``x``."""
    turned = x[..., : 2 * pairs].double()
    grid, axis = ((pairs, 2), -1) if interleaved else ((2, pairs), -2)
    length = turned.unflatten(-1, grid).norm(dim=axis, keepdim=True)
    spread = length.expand_as(turned.unflatten(-1, grid)).flatten(-2)
    return torch.cat((spread, x[..., 2 * pairs :].double().abs()), dim=-1)


def ulp(magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """Distance between neighbouring numbers of ``dtype`` at ``magnitude``, in float64."""
    info = torch.finfo(dtype)
    # frexp puts the mantissa in [0.5, 1): the spacing there is eps / 2 times the power of two.
    _, exponent = torch.frexp(magnitude.double())
    spacing = info.eps / 2 * torch.exp2(exponent.double())
    return spacing.clamp(min=info.tiny * info.eps)


def rounded(x: float | mpmath.mpf, dtype: torch.dtype) -> float:
    """The number of ``dtype`` nearest to a finite ``x``, ties to even, in whole numbers."""
    info = torch.finfo(dtype)
    if x == 0:
        return 0.0
    # |x| is in [2^(e - 1), 2^e), where neighbours are eps times 2^(e - 1) apart.
    exponent = int(mpmath.frexp(x)[1])
    unit = mpmath.mpf(max(info.eps * 2.0 ** (exponent - 1), info.tiny * info.eps))
    exact = mpmath.mpf(x) / unit
    count = int(mpmath.floor(exact))
    above = exact - count
    if above > 0.5 or (above == 0.5 and count % 2):
        count += 1
    value = float(count * unit)
    return value if abs(value) <= info.max else math.copysign(math.inf, value)


def sinusoid(positions: Sequence[int], dim: int, base: float = 10_000.0) -> Tensor:
    """The sinusoidal table, channel by channel, correctly rounded to float64."""
    rows = []
    for p in positions:
        row = []
        for channel in range(dim):
            cos, sin = _cos_sin(p, channel // 2, dim, base, mpmath.mp.prec)
            row.append(sin if channel % 2 == 0 else cos)
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float64)


def fourier_features(
    points: Sequence[Sequence[float]], matrix: Sequence[Sequence[float]]
) -> Tensor:
    """cos and sin of two pi times B x, from exact numbers, correctly rounded to float64."""
    rows = []
    for point in points:
        sums = [mpmath.fdot(map(mpmath.mpf, row), map(mpmath.mpf, point)) for row in matrix]
        phi = [2 * mpmath.pi * total for total in sums]
        rows.append([float(mpmath.cos(a)) for a in phi] + [float(mpmath.sin(a)) for a in phi])
    return torch.tensor(rows, dtype=torch.float64)


def nerf_features(
    points: Sequence[Sequence[float]], frequencies: int, scale: float | mpmath.mpf = 1.0
) -> Tensor:
    """sin and cos of two to the k times pi, a frequency after the other, rounded to float64."""
    rows = []
    for point in points:
        row = []
        for k in range(frequencies):
            phi = [2**k * mpmath.pi * mpmath.mpf(scale) * mpmath.mpf(x) for x in point]
            row += [float(mpmath.sin(a)) for a in phi] + [float(mpmath.cos(a)) for a in phi]
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float64)


def softplus(x: float) -> mpmath.mpf:
    """The logarithm of one plus the exponential."""
    return mpmath.log1p(mpmath.exp(mpmath.mpf(x)))


def polar(
    x: Tensor, positions: Sequence[float], delta: Tensor | None = None, base: float = 10_000.0
) -> tuple[Tensor, Tensor]:
    """PoPE of ``(B, H, T, D)``, number by number, and the magnitude of each result, in float64."""
    width = x.shape[-1]
    exact = torch.empty(*x.shape[:-1], 2 * width, dtype=torch.float64)
    size = torch.empty_like(exact)
    for b, h, t, c in itertools.product(*map(range, x.shape)):
        rate = mpmath.power(mpmath.mpf(base), mpmath.mpf(-c) / width)
        phase = mpmath.mpf(0 if delta is None else float(delta[h, c]))
        phi, mu = mpmath.mpf(positions[t]) * rate + phase, softplus(float(x[b, h, t, c]))
        exact[b, h, t, c], exact[b, h, t, width + c] = (
            float(mu * mpmath.cos(phi)),
            float(mu * mpmath.sin(phi)),
        )
        size[b, h, t, c] = size[b, h, t, width + c] = float(mu)
    return exact, size


def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Attention with every score written down, in float64; key heads serve groups of heads."""
    q, k, v = (x.double() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    return (q @ k.mT * scale + bias.double()).softmax(-1) @ v


def alibi_bias(slopes: Sequence[float], queries: int, keys: int, *, causal: bool) -> Tensor:
    """ALiBi's bias entry by entry, in float64."""
    bias = torch.empty(len(slopes), queries, keys, dtype=torch.float64)
    for h, slope in enumerate(slopes):
        for i in range(queries):
            for j in range(keys):
                distance = i + keys - queries - j
                if causal and distance < 0:
                    bias[h, i, j] = float("-inf")
                else:
                    bias[h, i, j] = -slope * abs(distance)
    return bias


def relative_keys(q: Tensor, k: Tensor, i: int, j: int, vectors: Tensor, most: int) -> Tensor:
    """Shaw's product of one query with the vector of one key, before the scale.

    ``vectors``, ``[R, D]``, are for ``j - i`` from ``-most``.
    """
    row = min(max(j - i, -most), len(vectors) - 1 - most) + most
    return q.double() @ vectors[row].double()


def transformer_xl(
    q: Tensor, k: Tensor, i: int, j: int, project: Tensor, u: Tensor, v: Tensor, *, alternate: bool
) -> Tensor:
    """Terms b, c and d of Transformer-XL's equation for one head, with ``project``, ``[D, E]``."""
    width = project.shape[1]
    (r,) = sinusoid([i - j], width)
    if not alternate:
        r = torch.cat((r[0::2], r[1::2]))
    return (q.double() + v.double()) @ (project.double() @ r) + u.double() @ k.double()


def deberta(q: Tensor, k: Tensor, i: int, j: int, to_q: Tensor, to_k: Tensor) -> Tensor:
    """Content to position and position to content for one head; vectors ``[2 span, D]``."""
    span = len(to_q) // 2
    row = min(max(i - j + span, 0), 2 * span - 1)
    return q.double() @ to_q[row].double() + k.double() @ to_k[row].double()


def self_extend(length: int, group: int, window: int) -> Tensor:
    """The relative position of query ``i`` and key ``j`` by Self-Extend; -1 for later keys."""
    found = torch.full((length, length), -1)
    for i in range(length):
        for j in range(i + 1):
            far = math.floor(i / group) - math.floor(j / group) + window - window // group
            found[i, j] = i - j if i - j < window else far
    return found


def dual_chunk(length: int, chunk: int, window: int) -> Tensor:
    """As `self_extend`, by Dual Chunk Attention with ``c = chunk + window``: its three vectors."""
    farthest = chunk + window - 1
    as_keys = list(range(chunk))
    successive = [*range(chunk, chunk + window), *[farthest] * (chunk - window)]
    found = torch.full((length, length), -1)
    for i in range(length):
        for j in range(i + 1):
            apart = i // chunk - j // chunk
            query = {0: as_keys[i % chunk], 1: successive[i % chunk]}.get(apart, farthest)
            found[i, j] = query - as_keys[j % chunk]
    return found


def attention_at(
    q: Tensor, k: Tensor, v: Tensor, relative: Tensor, *, base: float = 10_000.0
) -> Tensor:
    """Attention in float64 whose pair ``(i, j)`` is rotated by ``relative[i, j]``; -1 is hidden.

    Pairs are the halves of a head, taken as complex numbers: the score is the real part of
    ``sum q conj(k) exp(i r theta)``.
    """
    q, k, v = (
        q.double(),
        *(x.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v)),
    )
    half = q.shape[-1] // 2
    a, b = (torch.complex(x[..., :half], x[..., half:]) for x in (q, k))
    theta = base ** (-torch.arange(half, dtype=torch.float64) / half)
    turn = torch.polar(torch.ones(()).double(), relative[..., None] * theta)
    scores = torch.einsum("bhip,bhjp,ijp->bhij", a, b.conj(), turn).real / (2 * half) ** 0.5
    return scores.masked_fill(relative < 0, -math.inf).softmax(-1) @ v


def string_generators(freqs: Tensor, skew: Tensor) -> Tensor:
    """STRING's generators of one head, ``[A, D, D]``: ``P (f J) P^T``, by Cayley's formula.

    ``freqs`` is ``[A, D / 2]``; ``skew`` is the matrix above its diagonal, row by row. Pairs are
    neighbours.
    """
    pairs = freqs.shape[1]
    dim, one = 2 * pairs, torch.eye(2 * pairs, dtype=torch.float64)
    above = iter(skew.double())
    s = torch.zeros(dim, dim, dtype=torch.float64)
    for i in range(dim):
        for j in range(i + 1, dim):
            s[i, j] = next(above)
            s[j, i] = -s[i, j]
    basis = (one - s) @ torch.linalg.inv(one + s)
    blocks = torch.zeros(len(freqs), dim, dim, dtype=torch.float64)
    for i in range(pairs):
        blocks[:, 2 * i, 2 * i + 1], blocks[:, 2 * i + 1, 2 * i] = -freqs[:, i], freqs[:, i]
    return basis @ blocks @ basis.T
