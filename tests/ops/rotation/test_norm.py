"""RMSNorm fused with the rotation, against the two done one after the other."""

import itertools

import pytest
import torch
from torch.autograd import forward_ad, gradcheck, gradgradcheck

import oracles
from posenc import ops
from posenc.ops import native
from posenc.ops.rotation import reference
from posenc.ops.rotation.rotation import norm_rotate_backward_op, norm_rotate_op
from posenc.ops.rotation.spec import Norm, Spec, TableRows, flatten
from support.assertions import assert_within_ulps
from support.plans import planned
from support.rotations import GPU, LAYOUTS, instruction_sets

CASES = pytest.mark.parametrize(
    ("pairs", "width", "first"), [(6, 12, 0), (6, 16, 0), (6, 16, 4)], ids=["all", "first", "last"]
)
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
NORMS = pytest.mark.parametrize("all_heads", [False, True], ids=["each-head", "all-heads"])


def example(pairs, width, all_heads, dtype, device="cpu", length=5):
    x = torch.randn(2, length, 3, width).to(device, dtype).transpose(1, 2)
    weight = torch.randn(3 * width if all_heads else width).to(device, dtype)
    cos, sin = (t.to(device) for t in oracles.exact_cos_sin(range(9), 2 * pairs))
    return x, weight, cos, sin


@CASES
@NORMS
def test_reference_is_norm_then_rotation(pairs, width, first, all_heads):
    x, weight, cos, sin = example(pairs, width, all_heads, torch.float64)
    norm, spec = Norm(1e-5, 1.0), Spec(False, False, first)
    got = reference.norm_rotate(x, weight, cos, sin, TableRows(2), spec, norm)
    if all_heads:
        flat = x.transpose(1, 2).flatten(2)
        normed = torch.nn.functional.rms_norm(flat, (3 * width,), 1 + weight, 1e-5)
        normed = normed.unflatten(2, (3, width)).transpose(1, 2)
    else:
        normed = torch.nn.functional.rms_norm(x, (width,), 1 + weight, 1e-5)
    span = slice(first, first + 2 * pairs)
    wanted = normed.clone()
    wanted[..., span] = oracles.rotate(normed[..., span], cos[2:7], sin[2:7], interleaved=False)
    torch.testing.assert_close(got, wanted, rtol=1e-13, atol=1e-14)


def interpreted():
    """All of them; of those that are quick, every two of the five are met together."""
    parts = {"all": (6, 12, 0), "first": (6, 16, 0), "last": (6, 16, 4)}
    layouts = {"half": (False, False), "to-half": (True, False), "interleaved": (True, True)}
    dtypes = {"fp64": torch.float64, "bf16": torch.bfloat16}
    for numbers in itertools.product(range(3), range(2), range(3), range(2)):
        part, all_heads, layout, dtype = numbers
        quick = layout < 2 and (part + all_heads + layout + dtype) % 2 == 0
        names = [*parts][part], "all-heads" if all_heads else "each-head", [*layouts][layout]
        yield pytest.param(
            *parts[names[0]], bool(all_heads), *layouts[names[2]], [*dtypes.values()][dtype],
            id="-".join((*names, [*dtypes][dtype])), marks=[] if quick else pytest.mark.slow,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("pairs", "width", "first", "all_heads", "inner", "outer", "dtype"), [*interpreted()]
)
def test_triton_matches_forward_and_backward(pairs, width, first, all_heads, inner, outer, dtype):
    """A program takes one token: three of them, in two sequences, are as good as many."""
    x, weight, cos, sin = example(pairs, width, all_heads, dtype, GPU, length=3)
    rows = TableRows(0, torch.tensor([[0, 3, 8]], device=GPU))
    arguments = (cos, sin, rows, Spec(inner, outer, first), Norm(1e-6, 1.0))
    got = by_plan(x, weight, *arguments)
    g = torch.randn_like(got)
    to_x, to_weight = by_plan(x, weight, *arguments, g)

    wide_x, wide_weight = x.double().requires_grad_(), weight.double().requires_grad_()
    wanted = reference.norm_rotate(wide_x, wide_weight, *arguments)
    wanted_x, wanted_weight = torch.autograd.grad(wanted, (wide_x, wide_weight), g.double())
    # Against float64: the rounding of the output, cut off by the interpreter, and float32 sums.
    bound = 1e-12 if dtype == torch.float64 else 1.01 * torch.finfo(dtype).eps
    for result, exact in ((got, wanted), (to_x, wanted_x), (to_weight, wanted_weight)):
        assert result.dtype == dtype
        off = (result.double() - exact).abs().max() / exact.abs().max()
        assert off < bound


def by_plan(x, weight, cos, sin, rows, spec, norm, g=None):
    """A plan; with ``g``, the gradients."""
    how = cos, sin, *flatten(rows, spec), norm.eps, norm.shift
    if g is None:
        return planned(norm_rotate_op, x, weight, *how)[0]
    return planned(norm_rotate_backward_op, g, x, weight, *how)


def test_triton_takes_rows_that_overlap():
    x = torch.randn(100, dtype=torch.float64, device=GPU).as_strided((1, 2, 5, 8), (50, 20, 1, 1))
    weight = torch.randn(8, dtype=torch.float64, device=GPU)
    cos, sin = (t.to(GPU) for t in oracles.exact_cos_sin(range(9), 8))
    arguments = (cos, sin, TableRows(), Spec(), Norm())
    g = torch.randn(1, 2, 5, 8, dtype=torch.float64, device=GPU)
    found = (
        by_plan(x, weight, *arguments),
        *by_plan(x, weight, *arguments, g),
    )
    wanted = (
        reference.norm_rotate(x, weight, *arguments),
        *reference.norm_rotate_backward(g, x, weight, *arguments),
    )
    for got, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-12, atol=1e-12)


MEMORY = {
    "tokens-first": lambda w: torch.randn(2, 5, 3, w).transpose(1, 2),
    "heads-first": lambda w: torch.randn(2, 3, 5, w),
    "slice-of-qkv": lambda w: torch.randn(2, 5, 3, 3, w)[:, :, 1].transpose(1, 2),
    "gaps": lambda w: torch.randn(2, 6, 10, w + 3)[:, ::2, ::2, 1 : w + 1],
    "last-dimension-not-dense": lambda w: torch.randn(2, 3, w, 5).transpose(-1, -2),
    "expanded": lambda w: torch.randn(1, 3, 1, w).expand(2, 3, 5, w),
    "no-tokens": lambda w: torch.randn(2, 3, 0, w),
    "rows-that-overlap": lambda w: torch.randn(w + 4).unfold(0, w, 1).expand(2, 3, 5, w),
}


needs_c = pytest.mark.skipif(not native.available, reason="needs the C extension")


def by_c(x, weight, cos, sin, rows, spec, norm, g=None):
    """Native code, which raises RuntimeError where it cannot run; with ``g``, the gradients."""
    how = cos, sin, *flatten(rows, spec), norm.eps, norm.shift
    if g is None:
        return norm_rotate_op.native(x, weight, *how)
    return norm_rotate_backward_op.native(g, x, weight, *how)


def check_c(x, weight, g, cos, sin, rows, spec, norm):
    """The kernel, and the gradients for ``g``, against autograd in float64."""
    arguments, pairs = (cos, sin, rows, spec, norm), cos.shape[-1]
    wide_x, wide_weight = x.double().requires_grad_(), weight.double().requires_grad_()
    exact = reference.norm_rotate(wide_x, wide_weight, *arguments)
    exact_x, exact_weight = torch.autograd.grad(exact, (wide_x, wide_weight), g.double())
    y, (to_x, to_weight) = by_c(x, weight, *arguments), by_c(x, weight, *arguments, g)
    for got, like in ((y, x), (to_x, x), (to_weight, weight)):
        assert (got.dtype, got.shape) == (like.dtype, like.shape)
    for got in (y, to_x):
        assert got.stride() == torch.empty_like(x).stride()
    if x.numel() == 0:
        return
    # Half an ulp at the magnitude of the pair; other channels are pairs of themselves.
    span = slice(spec.first_channel, spec.first_channel + 2 * pairs)
    size = exact.detach().abs()
    of_pairs = exact.detach()[..., span]
    size[..., span] = oracles.pair_magnitude(of_pairs, pairs, interleaved=spec.interleaved_out)
    assert_within_ulps(y, exact.detach(), 8 if x.dtype == torch.float64 else 0.51, size)
    # The gradient of x is rounded once, at the size of the terms of a row. float64 is computed in
    # itself, and so is what it is compared with: sums over a row in both.
    size = torch.maximum(exact_x.abs(), exact_x.abs().amax(3, keepdim=True) / 16)
    ulps = {torch.float64: 8 * x.shape[3], torch.float32: 0.51}.get(x.dtype, 0.55)
    assert_within_ulps(to_x, exact_x, ulps, size)
    # What the rounding of the result costs, and sums in float32.
    off = (to_weight.double() - exact_weight).abs().max() / exact_weight.abs().max()
    rounding = max(1.01 * torch.finfo(weight.dtype).eps / 2, 1e-13)
    assert off < rounding + (1e-6 if x.element_size() == 2 else 0)


@needs_c
@CASES
@NORMS
@DTYPES
@LAYOUTS
def test_c_is_exact(pairs, width, first, all_heads, dtype, inner, outer):
    x, weight, cos, sin = example(pairs, width, all_heads, dtype)
    for transposed, eps in ((False, 1e-6), (True, 1e-2)):
        spec, norm = Spec(inner, outer, first, transposed), Norm(eps, 1.0)
        for positions in (torch.tensor([[0, 3, 1, 8, 2]]), torch.tensor([[0], [4]])):
            check_c(x, weight, torch.randn_like(x), cos, sin, TableRows(0, positions), spec, norm)


@needs_c
@NORMS
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("pairs", [1, 17, 48])
def test_c_takes_any_memory_and_width(memory, pairs, all_heads):
    x = MEMORY[memory](2 * pairs + 1)
    count = x.shape[1] * x.shape[3] if all_heads else x.shape[3]
    tables, norm = oracles.exact_cos_sin(range(9), 2 * pairs), Norm(1e-6)
    gradients = torch.randn(x.shape), MEMORY[memory](2 * pairs + 1), torch.ones(()).expand_as(x)
    # The second is in the precision that the kernel reads, but not as it reads it.
    for weight in (torch.randn(count).bfloat16(), torch.randn(2 * count).double()[::2]):
        before = weight.clone()
        for interleaved, g in itertools.product((False, True), gradients):
            spec = Spec(interleaved, interleaved)
            check_c(x, weight, g, *tables, TableRows(2), spec, norm)
        assert torch.equal(weight, before)


@needs_c
@NORMS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_c_on_several_threads_is_c_on_one(dtype, all_heads):
    x = torch.randn(2, 600, 4, 64).to(dtype).transpose(1, 2)
    weight = torch.randn(256 if all_heads else 64)
    arguments = (*oracles.tables(600, 32), TableRows(), Spec(), Norm(1e-6))
    check_c(x, weight, torch.randn_like(x), *arguments)
    # 153,600 elements a piece: below what is shared out.
    pieces = [by_c(x[b : b + 1], weight, *arguments) for b in range(2)]
    assert torch.equal(by_c(x, weight, *arguments), torch.cat(pieces))
    first, again = (by_c(x, weight, *arguments, x) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@needs_c
def test_c_keeps_nans_and_infinities():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.randn(1, 1, 3, 8).to(dtype)
        x[0, 0, 0, 3], x[0, 0, 1, 5] = float("nan"), float("inf")
        weight = torch.ones(8)
        tables = oracles.tables(3, 4)
        got = by_c(x, weight, *tables, TableRows(), Spec(), Norm())
        assert got[0, 0, :2].isnan().any(-1).all()
        assert got[0, 0, 2].isfinite().all()
        weight[2] = torch.tensor(-1, dtype=torch.int32).view(torch.float32)  # a NaN of all ones
        got = by_c(x, weight, *tables, TableRows(), Spec(), Norm())
        assert got[0, 0, 2, 2:4].isnan().all()


@needs_c
@NORMS
@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
def test_every_instruction_set_of_c_is_exact(interleaved, all_heads):
    spec, norm = Spec(interleaved, interleaved), Norm(1e-6)
    for _ in instruction_sets():
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x, weight, *tables = example(32, 70, all_heads, dtype)
            check_c(x, weight, torch.randn_like(x), *tables, TableRows(), spec, norm)


@NORMS
@pytest.mark.parametrize("device", sorted({"cpu", GPU}))
def test_the_gradient_can_be_differentiated_again_and_batched(device, all_heads):
    x, weight, cos, sin = example(3, 8, all_heads, torch.float64, device, length=2)

    def normed(x, weight):
        return ops.norm_rotate(x, weight, cos, sin, TableRows(), Spec(), Norm(1e-6))

    inputs = (x.requires_grad_(), weight.requires_grad_())
    assert gradcheck(normed, inputs, check_batched_grad=True)
    assert gradgradcheck(normed, inputs)
    made, g = normed(*inputs), torch.randn_like(x)
    (wanted,) = torch.autograd.grad(made, x, g, retain_graph=True)
    with forward_ad.dual_level():
        (got,) = torch.autograd.grad(made, x, forward_ad.make_dual(g, g))
        torch.testing.assert_close(forward_ad.unpack_dual(got).tangent, wanted)


@pytest.mark.parametrize("device", sorted({"cpu", GPU}))
def test_the_ops_pass_opcheck(device):
    x, weight, cos, sin = example(6, 16, False, torch.float32, device)
    one, both = torch.ops.posenc.norm_rotate.default, torch.ops.posenc.norm_rotate_qk.default
    how = (cos, sin, None, 0, 3, 1e-6, 0.0)
    for grad in (False, True):
        x, weight = x.detach().requires_grad_(grad), weight.detach().requires_grad_(grad)
        torch.library.opcheck(one, (x, weight, *how))
        torch.library.opcheck(both, (x, x, weight, weight, *how))
