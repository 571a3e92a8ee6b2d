"""A relative bias against its formula, entry by entry in float64."""

from __future__ import annotations

import torch

import oracles


def drawn(make, *arguments, **keywords):
    """A module with random parameters."""
    torch.manual_seed(0)
    module = make(*arguments, **keywords)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape) * 0.5)
    return module


def leaves(module):
    """The parameters by name, in float64, with gradients of their own."""
    return {n: p.detach().double().requires_grad_() for n, p in module.named_parameters()}


def matrix(formula, given, heads, queries, keys, *, causal, offset=None):
    """``formula(given, h, i, j)`` of every head, query and key; -inf for hidden keys."""
    start = keys - queries if offset is None else offset
    hidden = torch.tensor(float("-inf"), dtype=torch.float64)
    rows = [
        torch.stack(
            [hidden if causal and j > i else formula(given, h, i, j).double() for j in range(keys)]
        )
        for h in range(heads)
        for i in range(start, start + queries)
    ]
    return torch.stack(rows).unflatten(0, (heads, queries))


def qkv(heads, queries, keys, dim=8, *, batch=2, kv_heads=None, dtype=torch.float64):
    """Random queries, keys and values, of which gradients are wanted."""
    shapes = [(heads, queries)] + [(kv_heads or heads, keys)] * 2
    make = torch.Generator().manual_seed(heads + queries + keys)
    given = [torch.randn(batch, h, n, dim, generator=make, dtype=torch.float64) for h, n in shapes]
    return [x.to(dtype).requires_grad_() for x in given]


def assert_is_formula(module, formula, *, queries=5, keys=7, scale=None, kv_heads=None):
    """The bias, the attention and all gradients are those of the formula, in float64.

    Parameters are float32, so their gradients are rounded to it: 2**-24 of each.
    """
    heads, causal = module.num_heads, module.causal
    given = leaves(module)
    wanted = matrix(formula, given, heads, queries, keys, causal=causal)
    got = module.bias(queries, keys, dtype=torch.float64)
    torch.testing.assert_close(got.detach(), wanted.detach(), rtol=1e-12, atol=1e-12)

    q, k, v = qkv(heads, queries, keys, kv_heads=kv_heads)
    copies = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    exact = oracles.attention(*copies, wanted, q.shape[-1] ** -0.5 if scale is None else scale)
    out = module.attention(q, k, v)
    torch.testing.assert_close(out, exact, rtol=1e-11, atol=1e-11)

    weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
    (out * weight).sum().backward()
    (exact * weight).sum().backward()
    for x, copy in zip((q, k, v), copies, strict=True):
        torch.testing.assert_close(x.grad, copy.grad, rtol=1e-10, atol=1e-10)
    for name, p in module.named_parameters():
        assert p.grad is not None, name
        # Sums of weights that cancel have the error of float64's weights.
        bound = 1e-13 + 2**-23 * given[name].grad.abs().max().item()
        torch.testing.assert_close(p.grad.double(), given[name].grad, rtol=1e-6, atol=bound)
        p.grad = None
