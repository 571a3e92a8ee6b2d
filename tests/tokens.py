"""Tokens as they are decoded, for the tests of calls that are like the one before."""

import copy

import torch


def token(dtype=torch.float32, heads=3):
    return torch.randn(2, heads, 1, 8).to(dtype), torch.randn(2, 1, 1, 8).to(dtype)


def assert_as_if_first(rope, q, k, *arguments, **keywords):
    """``rope`` gives what a module that was never called gives."""
    wanted = copy.deepcopy(rope)(q, k, *arguments, **keywords)
    for got, exact in zip(rope(q, k, *arguments, **keywords), wanted, strict=True):
        assert torch.equal(got, exact)
