"""Rotating functions in forms of their own."""

import torch
from torch import nn

from hf_models import apart
from posenc.interop.huggingface import patched


def rotate_half(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def apply_rotary_pos_emb_kernel(q, k, cos, sin):
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


class Kernel(nn.Module):
    """What the kernels package makes of a function."""

    kernel_layer_name = "rotary_pos_emb"

    def forward(self, q, k, cos, sin):
        return apply_rotary_pos_emb_kernel(q, k, cos, sin)


kernelized_rotary = Kernel()


class Kernelized(nn.Module):
    def forward(self, q, cos, sin):
        return kernelized_rotary(q, q, cos, sin)


def test_a_function_that_the_kernels_package_made_a_module_is_replaced():
    model = Kernelized()
    q = torch.randn(2, 3, 5, 8)
    phi = torch.rand(5, 4)
    tables = [torch.cat((t, t), dim=-1) for t in (phi.cos(), phi.sin())]
    expected = model(q, *tables)

    with patched(model) as report:
        got = model(q, *tables)

    assert [p.function for p in report.places] == ["kernelized_rotary"]
    assert all(apart(a, b) < 1e-6 for a, b in zip(expected, got, strict=True))
