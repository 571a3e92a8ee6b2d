"""Queries, keys and values for the tests of attention."""

import torch

HEADS, WIDTH = 4, 16
STEEP = {"bias_max": 3.0}  # windows well inside a few hundred keys


def qkv(queries, keys, *, groups=1, dtype=torch.float64, batch=2, grad=False):
    q = torch.randn(batch, HEADS, queries, WIDTH, dtype=dtype)
    k = torch.randn(batch, HEADS // groups, keys, WIDTH, dtype=dtype)
    v = torch.randn(batch, HEADS // groups, keys, 8, dtype=dtype)
    return [x.requires_grad_(grad) for x in (q, k, v)]
