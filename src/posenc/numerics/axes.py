"""Positions with several coordinates: which coordinate each channel pair follows.

Positions then have a leading axis, ``[A, ..., T]``: time, height and width of a patch, say. Where
all coordinates of a token are equal, as they are for text, `Sections` rotate as one axis would.
"""

from __future__ import annotations

from dataclasses import dataclass

from posenc._contract import checks
from posenc.numerics.values import ByValue


@dataclass(frozen=True, eq=False)
class Axes(ByValue):
    """Base class: for each pair, the coordinate it follows and the rate it takes."""

    def count(self) -> int:
        """How many coordinates a position has."""
        raise NotImplementedError

    def width(self, dim: int) -> int:
        """:math:`d` of the rates :math:`b^{-2i/d}`, where ``dim`` channels are rotated."""
        return dim

    def followed(self, pairs: int) -> tuple[int, ...]:
        """The coordinate of each pair."""
        raise NotImplementedError

    def rate_index(self, pairs: int) -> tuple[int, ...]:
        """The index of each pair's rate among those of :meth:`width` channels."""
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
            checks.fail("Sections", rule, got, "Pass (16, 24, 24), say.", TypeError)
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
    """An equal run of pairs for each coordinate, as vision models have it.

    Args:
        coordinates: How many; 2 for height and width.
        rates: ``"per_axis"`` if each coordinate has the whole range of rates, those of ``D / A``
            channels (Qwen2-VL's vision, SAM 2, DINOv3). ``"shared"`` if coordinate ``a`` has the
            rates ``a``, ``a + A``, ``a + 2 A``, ... of ``D`` channels (Pixtral).

    Examples:
        >>> Axial(2).followed(4), Axial(2).rate_index(4), Axial(2).width(8)
        ((0, 0, 1, 1), (0, 1, 0, 1), 4)
        >>> Axial(2, rates="shared").rate_index(4), Axial(2, rates="shared").width(8)
        ((0, 2, 1, 3), 8)

    References:
        Heo et al., *Rotary Position Embedding for Vision Transformer*, 2024, section 3.2.
    """

    coordinates: int = 2
    rates: str = "per_axis"

    def __post_init__(self) -> None:
        count = checks.integer("Axial", "coordinates", self.coordinates)
        object.__setattr__(self, "coordinates", count)
        if self.rates not in ("per_axis", "shared"):
            rule = "rates must be 'per_axis' or 'shared'"
            checks.fail("Axial", rule, checks.describe(self.rates), "Pass one of these.")

    def count(self) -> int:
        """How many coordinates a position has."""
        return self.coordinates

    def of_text(self) -> bool:
        """Whether positions of text make sense: they would be the diagonal of an image."""
        return self.coordinates == 1

    def width(self, dim: int) -> int:
        """:math:`d` of the rates."""
        return dim if self.rates == "shared" else dim // self.coordinates

    def followed(self, pairs: int) -> tuple[int, ...]:
        """The coordinate of each pair."""
        return tuple(i * self.coordinates // pairs for i in range(pairs))

    def rate_index(self, pairs: int) -> tuple[int, ...]:
        """The index of each pair's rate."""
        each = pairs // self.coordinates
        if self.rates == "per_axis":
            return tuple(i % each for i in range(pairs))
        return tuple(i % each * self.coordinates + i // each for i in range(pairs))

    def check(self, who: str, dim: int) -> None:
        """Refuse a width that is not an even number of channels for each coordinate."""
        if dim % (2 * self.coordinates):
            rule = f"rotated channels must be a multiple of {2 * self.coordinates}"
            checks.fail(who, rule, dim, "Give each coordinate the same number of pairs.")
