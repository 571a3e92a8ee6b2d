"""Fourier features of continuous coordinates as a module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from posenc._contract import checks
from posenc._contract.sharding import replicate_like
from posenc._contract.tracing import without_modes
from posenc.functional.fourier import check_octaves, of_mixtures, of_octaves
from posenc.nn._module import KeepsFloat32, ReadOnlyArguments


class FourierFeatures(KeepsFloat32, ReadOnlyArguments):
    r"""Sines and cosines of coordinates, which need not be whole numbers.

    .. math::
        \text{random, learned:}\ (\cos 2\pi B x,\ \sin 2\pi B x), \quad B_{fa} \sim N(0, s^2)
        \qquad
        \text{nerf:}\ (\sin 2^k \pi s x_a,\ \cos 2^k \pi s x_a)

    The matrix :math:`B` is drawn from a seed, which follows :func:`torch.manual_seed` if none is
    given: two modules have different ones. Precision is that of
    :func:`posenc.functional.fourier_features`: exact up to one rounding for float32 coordinates.

    Args:
        coordinates: Coordinates ``A`` of a position: 1 for a time, 2 for a place in an image.
        num_frequencies: Frequencies ``F``; of each coordinate if ``kind`` is ``"nerf"``.
        kind: ``"random"`` for a random matrix :math:`B` that stays as it is, ``"learned"`` for one
            that is trained, ``"nerf"`` for powers of two.
        scale: :math:`s`: the larger, the finer the details that features tell apart.
        include_input: Whether the coordinates come before the features.
        seed: The seed of :math:`B`, from which every device draws the same numbers. If None, the
            constructor draws it from torch's generator, also on the meta device: ranks with the
            same ``torch.manual_seed`` have the same matrix. Pass one if the ranks' differ.
        dtype: The dtype of :math:`B`, which stays float32 when the model is cast to half precision.
            FSDP2 shards such a model with this module as a unit of its own, which has no
            MixedPrecisionPolicy.

    Attributes:
        frequencies: :math:`B`, of shape ``(F, A)``, in turns per unit, which is saved: a Parameter
            if ``kind`` is ``"learned"``, a buffer if ``"random"``, None if ``"nerf"``.
        embed_dim: Channels of the result.

    Examples:
        >>> features = FourierFeatures(coordinates=2, num_frequencies=64, scale=10.0)
        >>> features(torch.rand(5, 2)).shape
        torch.Size([5, 128])
        >>> FourierFeatures(3, num_frequencies=10, kind="nerf", include_input=True).embed_dim
        63

    References:
        Tancik et al., *Fourier Features Let Networks Learn High Frequency Functions in Low
        Dimensional Domains*, 2020; Li et al., *Learnable Fourier Features for Multi-Dimensional
        Spatial Positional Encoding*, 2021; Mildenhall et al., *NeRF*, 2020, section 5.1.
    """

    frequencies: Tensor | None

    def __init__(
        self,
        coordinates: int,
        *,
        num_frequencies: int,
        kind: str = "random",
        scale: float = 1.0,
        include_input: bool = False,
        seed: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        who = type(self).__name__
        self.coordinates = checks.integer(who, "coordinates", coordinates)
        self.num_frequencies = checks.integer(who, "num_frequencies", num_frequencies)
        self.kind = checks.choice(who, "kind", kind, ("random", "learned", "nerf"))
        if kind == "nerf":
            check_octaves(who, num_frequencies)
        self.scale = checks.positive_float(who, "scale", scale)
        self.include_input = checks.boolean(who, "include_input", include_input)
        if seed is None and kind != "nerf":
            # Without modes: a fake tensor has no value.
            with without_modes():
                seed = int(torch.randint(2**31, (), device="cpu"))
        self.seed = checks.optional(checks.integer, who, "seed", seed, least=0)
        self.dtype = checks.float_dtype(who, "dtype", dtype)
        if kind == "nerf":
            self.frequencies = None
        else:
            empty = torch.empty(self.num_frequencies, self.coordinates, dtype=dtype)
            if kind == "learned":
                self.frequencies = nn.Parameter(empty)
            else:
                self.register_buffer("frequencies", empty)
        self.reset_parameters()

    @property
    def embed_dim(self) -> int:
        """Channels of the result."""
        each = self.coordinates if self.kind == "nerf" else 1
        return 2 * self.num_frequencies * each + self.coordinates * self.include_input

    def reset_parameters(self) -> None:
        """Draw the frequencies again, from the seed."""
        if self.frequencies is None or self.frequencies.is_meta:
            return
        assert self.seed is not None
        # On the CPU, so that every device gets the same numbers.
        draw = torch.Generator("cpu").manual_seed(self.seed)
        shape, dtype = self.frequencies.shape, torch.float64
        drawn = self.scale * torch.randn(shape, generator=draw, dtype=dtype, device="cpu")
        with torch.no_grad():
            self.frequencies.copy_(replicate_like(self.frequencies, drawn))

    def forward(self, coordinates: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """The features of each position.

        Args:
            coordinates: Integers or floats ``(..., A)``.
            dtype: The dtype of the result, whatever that of the coordinates is.

        Returns:
            Tensor of shape ``(..., embed_dim)``.
        """
        who, included = type(self).__name__, self.include_input
        if self.frequencies is None:
            octaves = (self.coordinates, self.num_frequencies, self.scale)
            return of_octaves(who, coordinates, *octaves, included, dtype)
        return of_mixtures(who, coordinates, self.frequencies, included, dtype)
