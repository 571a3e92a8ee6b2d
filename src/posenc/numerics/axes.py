"""Positions with several coordinates: which coordinate each channel pair follows.

Positions then have a leading axis, ``[A, ..., T]``, for example time, height and width of a patch.
If all coordinates of a token are equal, as they are for text, `Sections` rotate as one axis would.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from posenc._contract import checks
from posenc.numerics.constants import ByValue


@dataclass(frozen=True, eq=False)
class Axes(ByValue):
    """Base class: for each pair, the coordinate it follows and the rate it takes."""

    def count(self) -> int:
        """How many coordinates a position has."""
        raise NotImplementedError

    def widths(self, dim: int) -> tuple[int, ...]:
        """:math:`d` of each range of rates :math:`b^{-2i/d}`, where ``dim`` channels are rotated.

        A scaling rule is applied to each range by itself.
        """
        return (dim,)

    def followed(self, pairs: int) -> tuple[int, ...]:
        """The coordinate of each pair."""
        raise NotImplementedError

    def rate_index(self, pairs: int) -> tuple[int, ...]:
        """The index of each pair's rate among those of all ranges, one range after the other."""
        return tuple(range(pairs))

    def of_text(self) -> bool:
        """Whether positions of text, equal in all coordinates, make sense."""
        return True

    def check(self, who: str, dim: int) -> None:
        """Refuse a number of rotated channels that cannot be divided among the coordinates."""


@dataclass(frozen=True, eq=False)
class Sections(Axes):
    """M-RoPE: the pairs of one spectrum divided among the coordinates.

    Args:
        sizes: Pairs of each coordinate: ``(16, 24, 24)`` for time, height and width in Qwen2-VL.
        interleaved: False for one run of pairs after the other (Qwen2-VL). True for every
            ``A``-th pair (Qwen3-VL): pair ``i`` follows coordinate ``a = i % A`` while
            ``i < A * sizes[a]``, and the first one otherwise.

    Examples:
        >>> Sections((2, 1, 1)).followed(4)
        (0, 0, 1, 2)
        >>> Sections((4, 1, 1), interleaved=True).followed(6)
        (0, 1, 2, 0, 0, 0)

    References:
        Wang et al., *Qwen2-VL*, 2024, section 2.1; Bai et al., *Qwen3-VL*, 2025.
    """

    sizes: tuple[int, ...]
    interleaved: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.sizes, (list, tuple)) or not self.sizes:
            rule, got = "sizes must be a tuple of ints", checks.describe(self.sizes)
            checks.fail("Sections", rule, got, "Pass (16, 24, 24), for example.", TypeError)
        sizes = tuple(checks.integer("Sections", "sizes", size, least=0) for size in self.sizes)
        object.__setattr__(self, "sizes", sizes)
        checks.boolean("Sections", "interleaved", self.interleaved)

    def count(self) -> int:
        """How many coordinates a position has."""
        return len(self.sizes)

    def followed(self, pairs: int) -> tuple[int, ...]:
        """The coordinate of each pair."""
        if not self.interleaved:
            return tuple(axis for axis, size in enumerate(self.sizes) for _ in range(size))
        count = len(self.sizes)
        return tuple(i % count if i < count * self.sizes[i % count] else 0 for i in range(pairs))

    def check(self, who: str, dim: int) -> None:
        """Refuse sections that do not add up to the rotated pairs."""
        pairs, total = dim // 2, sum(self.sizes)
        if total != pairs:
            rule = f"sections must add up to {pairs} pairs, half of the {dim} rotated channels"
            got = f"{' + '.join(map(str, self.sizes))} = {total}"
            checks.fail(who, rule, got, "Change sizes or rotary_dim.")


@dataclass(frozen=True, eq=False)
class Axial(Axes):
    r"""A run of pairs for each coordinate, as vision and diffusion models have it.

    .. math:: \theta_{a,i} = b^{-2i/d_a}, \qquad i = 0, \dots, d_a/2 - 1

    Args:
        coordinates: How many, in equal runs: 2 for height and width. Or the channels
            :math:`d_a` of each: ``(16, 56, 56)`` for Flux, whose heads have 128.
        rates: ``"per_axis"`` if each coordinate has a whole range of rates, as above (Qwen2-VL's
            vision, SAM 2, DINOv3, Flux, Wan). ``"shared"`` if coordinate ``a`` of ``A`` has the
            rates ``a``, ``a + A``, ``a + 2 A``, ... of ``D`` channels (Pixtral).

    Examples:
        >>> Axial(2).followed(4), Axial(2).rate_index(4), Axial(2).widths(8)
        ((0, 0, 1, 1), (0, 1, 0, 1), (4,))
        >>> Axial((2, 6)).followed(4), Axial((2, 6)).widths(8)
        ((0, 1, 1, 1), (2, 6))
        >>> Axial(2, rates="shared").rate_index(4), Axial(2, rates="shared").widths(8)
        ((0, 2, 1, 3), (8,))

    References:
        Heo et al., *Rotary Position Embedding for Vision Transformer*, 2024, section 3.2;
        Black Forest Labs, the code of *FLUX.1*, 2024 (unequal widths).
    """

    coordinates: int | tuple[int, ...] = 2
    rates: str = "per_axis"

    def __post_init__(self) -> None:
        given: Any = self.coordinates
        if not isinstance(given, (list, tuple)):
            given = checks.integer("Axial", "coordinates", given)
        elif given:
            given = tuple(checks.even("Axial", "each of coordinates", width) for width in given)
        else:
            rule = "coordinates must be an int, or the channels of each coordinate"
            checks.fail("Axial", rule, given, "Pass 2, or (16, 56, 56), for example.")
        object.__setattr__(self, "coordinates", given)
        checks.choice("Axial", "rates", self.rates, ("per_axis", "shared"))
        if self.rates == "shared" and isinstance(given, tuple):
            rule = "coordinates must be an int if rates are shared"
            hint = "For unequal runs of one range of rates, use axes.Sections."
            checks.fail("Axial", rule, given, hint)

    def count(self) -> int:
        """How many coordinates a position has."""
        return self.coordinates if isinstance(self.coordinates, int) else len(self.coordinates)

    def of_text(self) -> bool:
        """Whether positions of text make sense: they would be the diagonal of an image."""
        return self.count() == 1

    def widths(self, dim: int) -> tuple[int, ...]:
        """:math:`d` of each range of rates; equal runs take theirs from one range."""
        if isinstance(self.coordinates, tuple):
            return self.coordinates
        return (dim if self.rates == "shared" else dim // self.coordinates,)

    def followed(self, pairs: int) -> tuple[int, ...]:
        """The coordinate of each pair."""
        if isinstance(self.coordinates, tuple):
            return tuple(a for a, width in enumerate(self.coordinates) for _ in range(width // 2))
        return tuple(i * self.coordinates // pairs for i in range(pairs))

    def rate_index(self, pairs: int) -> tuple[int, ...]:
        """The index of each pair's rate."""
        if isinstance(self.coordinates, tuple):
            return super().rate_index(pairs)
        each = pairs // self.coordinates
        if self.rates == "per_axis":
            return tuple(i % each for i in range(pairs))
        return tuple(i % each * self.coordinates + i // each for i in range(pairs))

    def check(self, who: str, dim: int) -> None:
        """Refuse a width that is not that of the coordinates together."""
        if isinstance(self.coordinates, tuple):
            if sum(self.coordinates) != dim:
                got = f"{' + '.join(map(str, self.coordinates))} = {sum(self.coordinates)}"
                rule = f"the channels of the coordinates must add up to the {dim} rotated channels"
                checks.fail(who, rule, got, "Change coordinates or rotary_dim.")
        elif dim % (2 * self.coordinates):
            rule = f"rotated channels must be a multiple of {2 * self.coordinates}"
            hint = "Give the channels of each coordinate, as in axes.Axial((16, 56, 56))."
            checks.fail(who, rule, dim, hint)
