"""RMSNorm fused with the rotation, against the two done one after the other."""

import pytest
import torch
from torch.autograd import gradcheck

import oracles
from posenc.kernels import reference
from posenc.kernels.spec import Norm, Rows, Turn

GPU = "cuda" if torch.cuda.is_available() else "cpu"
CASES = pytest.mark.parametrize(
    ("pairs", "width", "column"), [(6, 12, 0), (6, 16, 0), (6, 16, 4)], ids=["all", "first", "last"]
)
NORMS = pytest.mark.parametrize("whole", [False, True], ids=["each-head", "all-heads"])


def example(pairs, width, whole, dtype, device="cpu"):
    x = torch.randn(2, 5, 3, width).to(device, dtype).transpose(1, 2)
    weight = torch.randn(3 * width if whole else width).to(device, dtype)
    cos, sin = (t.to(device) for t in oracles.exact_cos_sin(range(9), 2 * pairs))
    return x, weight, cos, sin


@CASES
@NORMS
def test_reference_is_norm_then_rotation(pairs, width, column, whole):
    x, weight, cos, sin = example(pairs, width, whole, torch.float64)
    norm, turn = Norm(1e-5, 1.0, whole), Turn(False, False, column)
    got = reference.norm_rotate(x, weight, cos, sin, Rows(2), turn, norm)
    if whole:
        flat = x.transpose(1, 2).flatten(2)
        normed = torch.nn.functional.rms_norm(flat, (3 * width,), 1 + weight, 1e-5)
        normed = normed.unflatten(2, (3, width)).transpose(1, 2)
    else:
        normed = torch.nn.functional.rms_norm(x, (width,), 1 + weight, 1e-5)
    span = slice(column, column + 2 * pairs)
    wanted = normed.clone()
    wanted[..., span] = oracles.rotate(normed[..., span], cos[2:7], sin[2:7], interleaved=False)
    torch.testing.assert_close(got, wanted, rtol=1e-13, atol=1e-14)


@NORMS
def test_reference_gradients(whole):
    x, weight, cos, sin = example(3, 8, whole, torch.float64)

    def normed(x, weight):
        return reference.norm_rotate(x, weight, cos, sin, Rows(), Turn(), Norm(1e-6, 0.0, whole))

    assert gradcheck(normed, (x.requires_grad_(), weight.requires_grad_()))


@CASES
@NORMS
@pytest.mark.parametrize(
    ("inner", "outer"), [(True, True), (False, False), (True, False)],
    ids=["interleaved", "half", "interleaved-to-half"],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["fp64", "bf16"])
def test_triton_matches_forward_and_backward(pairs, width, column, whole, inner, outer, dtype):
    from posenc.kernels.triton import norm as kernel

    x, weight, cos, sin = example(pairs, width, whole, dtype, GPU)
    rows = Rows(0, torch.tensor([[0, 3, 1, 8, 2]], device=GPU))
    arguments = (cos, sin, rows, Turn(inner, outer, column), Norm(1e-6, 1.0, whole))
    got = kernel.norm_rotate(x, weight, *arguments)
    g = torch.randn_like(got)
    to_x, to_weight = kernel.norm_rotate_backward(g, x, weight, *arguments)

    wide_x, wide_weight = x.double().requires_grad_(), weight.double().requires_grad_()
    wanted = reference.norm_rotate(wide_x, wide_weight, *arguments)
    wanted_x, wanted_weight = torch.autograd.grad(wanted, (wide_x, wide_weight), g.double())
    # Against float64: the rounding of the output, cut off by the interpreter, and float32 sums.
    bound = 1e-12 if dtype == torch.float64 else 1.01 * torch.finfo(dtype).eps
    for result, exact in ((got, wanted), (to_x, wanted_x), (to_weight, wanted_weight)):
        assert result.dtype == dtype
        off = (result.double() - exact).abs().max() / exact.abs().max()
        assert off < bound


@pytest.mark.skipif(GPU == "cpu", reason="the op exists where Triton compiles")
def test_opcheck():
    x, weight, cos, sin = example(6, 16, False, torch.float32, GPU)
    op = torch.ops.posenc.norm_rotate.default
    flags = (None, 0, True, True, 0, False, 1e-6, 0.0, False)
    torch.library.opcheck(op, (x.requires_grad_(), weight.requires_grad_(), cos, sin, *flags))
