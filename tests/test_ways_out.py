"""Errors that a reader of the manual met, and the way out that each names."""

import pytest
import torch

import posenc
from posenc.axes import Axial
from posenc.positions import grid, normalized_grid


def test_coordinates_of_each_token_are_told_to_be_turned():
    """The ids of a pipeline of diffusers are ``(L, 3)``."""
    rope = posenc.RoPE(12, None, axes=Axial((4, 4, 4)))
    with pytest.raises(ValueError, match=r"Pass position_ids\.T: coordinates come first"):
        rope.rotate(torch.randn(1, 1, 5, 12), position_ids=torch.zeros(5, 3))


@pytest.mark.parametrize("make", [grid, normalized_grid])
def test_sizes_of_a_grid_are_told_to_be_unpacked(make):
    with pytest.raises(TypeError, match=rf"Call {make.__name__}\(\*sizes\)"):
        make((4, 6))


@pytest.mark.parametrize("move", ["shift", "rerotate"])
def test_moved_keys_are_those_that_the_module_returned(move):
    pope, k = posenc.PoPE(8, num_kv_heads=2), torch.randn(1, 2, 5, 8)
    by = (1,) if move == "shift" else (torch.arange(5), torch.arange(5))
    with pytest.raises(ValueError, match=r"must be 16, got 8\.\n  Pass keys as PoPE returned them"):
        getattr(pope, move)(k, *by)
