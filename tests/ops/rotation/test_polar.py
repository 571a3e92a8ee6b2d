"""PoPE's kernels: every implementation against the formula in mpmath and float64."""

from functools import partial

import pytest
import torch

import oracles
from posenc.ops import TableRows, native, polar
from posenc.ops.rotation.polar import (
    backward_by_operations,
    by_operations,
    polar_backward_op,
    polar_op,
)
from support.assertions import assert_within_ulps
from support.plans import planned
from support.rotations import CUT, DTYPES, GPU


def by_c(x, y, delta, cos, sin, rows):
    y.copy_(polar_op.native(x, delta, cos, sin, rows.positions, rows.start))


def by_triton(x, y, delta, cos, sin, rows):
    y.copy_(planned(polar_op, x, delta, cos, sin, rows.positions, rows.start)[0])


def by_reference(x, y, delta, *how):
    y.copy_(by_operations(x, delta, *how))


BACKENDS = {"reference": (by_reference, "cpu"), "triton": (by_triton, GPU)}
if native.available:
    BACKENDS["c"] = (by_c, "cpu")
# Polynomials are off by 2^-32.7 for float32, and by 2^-19 for half precision: 0.003 ulp.
ULPS = {torch.float64: 4, torch.float32: 0.503, torch.bfloat16: 0.503, torch.float16: 0.503}
SHAPES = {"odd": (2, 2, 3, 7), "one-channel": (1, 1, 1, 1), "wide": (1, 1, 2, 40)}


def budget(name, dtype):
    """With what the polynomials owe where the interpreter cuts off instead of rounding."""
    return CUT[name, dtype] + 0.003 if (name, dtype) in CUT else ULPS[dtype]


def kernel(name, x, delta, cos, sin, rows):
    """The result of one backend, on the CPU; memory that it did not write is NaN."""
    function, device = BACKENDS[name]
    x, cos, sin = (t.to(device) for t in (x, cos, sin))
    delta = None if delta is None else delta.to(device)
    rows = TableRows(rows.start, None if rows.positions is None else rows.positions.to(device))
    y = torch.full((*x.shape[:3], 2 * x.shape[3]), float("nan"), dtype=x.dtype, device=device)
    function(x, y, delta, cos, sin, rows)
    return y.cpu()


def cases(name):
    return [dtype for dtype in DTYPES.values() if (name, dtype) != ("triton", torch.float64)]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
@pytest.mark.parametrize("name", BACKENDS)
def test_matches_the_formula(name, shape):
    """A kernel may owe its output rounding, and nothing else."""
    cos, sin = oracles.tables(12, shape[3])
    delta = -7 * torch.rand(shape[1], shape[3])
    for dtype in cases(name):
        x = (4 * torch.randn(shape)).to(dtype)
        for phase in (None, delta):
            got = kernel(name, x, phase, cos, sin, TableRows(3))
            exact, size = oracles.polar(x, range(3, 3 + shape[2]), phase)
            assert_within_ulps(got, exact, budget(name, dtype), size)


@pytest.mark.parametrize("name", BACKENDS)
def test_rows_are_picked_in_every_form(name):
    cos, sin = oracles.tables(9, 8)
    x, delta = torch.randn(2, 3, 4, 8), -torch.rand(3, 8)
    ids = torch.randint(0, 9, (2, 4))
    forms = [
        (TableRows(0, ids), ids),
        (TableRows(1, ids[:1] // 2), (ids[:1] // 2 + 1).expand(2, 4)),
        (TableRows(0, ids[:, :1] // 2), ids[:, :1] // 2 + torch.arange(4)),
    ]
    for rows, index in forms:
        got = kernel(name, x, delta, cos, sin, rows)
        by_sequence = kernel(name, x, delta, cos[index], sin[index], TableRows())
        for b in range(2):
            exact, size = oracles.polar(x[b : b + 1], index[b].tolist(), delta)
            assert_within_ulps(got[b : b + 1], exact, 0.503, size)
        assert torch.equal(got, by_sequence)


# The interpreter takes 20 seconds.
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "triton")) for n in BACKENDS]
)
def test_softplus_is_exact_for_small_and_large_numbers(name):
    """Also where a result is subnormal, or where it is the input."""
    one, zero = torch.ones(1, 1), torch.zeros(1, 1)
    wide = torch.cat((torch.linspace(-104, 104, 417), torch.logspace(-30, 4, 69)))
    wide = torch.cat((wide, -wide[417:], torch.zeros(1), torch.tensor([-0.0, 3e38, -3e38])))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = wide.to(dtype)[wide.to(dtype).isfinite()].view(1, 1, -1, 1)
        if (name, dtype) == ("triton", torch.bfloat16):
            # The interpreter has no subnormal bfloat16.
            x = x[x > -87].view(1, 1, -1, 1)
        rows = TableRows(0, torch.zeros(1, x.shape[2], dtype=torch.int64))
        got = kernel(name, x, None, one, zero, rows)
        values = [float(oracles.softplus(v)) for v in x.flatten().tolist()]
        exact = torch.tensor(values, dtype=torch.float64).view_as(x)
        assert_within_ulps(got[..., :1], exact, budget(name, dtype), exact)
        assert not got[..., 1:].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_every_number_of_half_precision(dtype):
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    x = x[x.isfinite()].view(1, 1, 1, -1)
    one, zero = torch.ones(1, x.shape[3]), torch.zeros(1, x.shape[3])
    got = polar(x, None, one, zero, TableRows())[..., : x.shape[3]]
    exact = torch.logaddexp(x.double(), torch.zeros(1, dtype=torch.float64))
    assert_within_ulps(got, exact, 0.503, exact)


@pytest.mark.parametrize("name", BACKENDS)
def test_nan_and_infinity_stay_what_they_are(name):
    x = torch.tensor([float("nan"), float("inf"), -float("inf")]).view(1, 1, 1, 3)
    half, wanted = torch.full((1, 3), 0.5), torch.tensor([float("nan"), float("inf"), 0.0] * 2)
    for dtype in cases(name):
        got = kernel(name, x.to(dtype), None, half, half, TableRows()).flatten()
        assert torch.equal(got.isnan(), wanted.isnan())
        assert torch.equal(got.nan_to_num(7.0).float(), wanted.to(dtype).nan_to_num(7.0).float())


def gradients(name, g, x, delta, cos, sin, rows):
    if name == "reference":
        return backward_by_operations(g, x, delta, cos, sin, rows)
    if name == "c":
        return polar_backward_op.native(g, x, delta, cos, sin, rows.positions, rows.start)
    device = BACKENDS[name][1]
    given = [None if t is None else t.to(device) for t in (g, x, delta, cos, sin)]
    dx, to_delta = planned(polar_backward_op, *given, rows.positions, rows.start)
    return dx.cpu(), None if delta is None else to_delta.cpu()


@pytest.mark.parametrize("name", BACKENDS)
def test_gradients_match_float64(name):
    """Through autograd of the formula in float64."""
    cos, sin = oracles.tables(8, 12)
    batch = 1 if name == "triton" else 2
    for dtype in cases(name):
        x, g = (3 * torch.randn(batch, 3, 5, 12)).to(dtype), torch.randn(batch, 3, 5, 24).to(dtype)
        delta = -6 * torch.rand(3, 12)
        leaf, phase = x.double().requires_grad_(), delta.double().requires_grad_()
        mu = torch.logaddexp(leaf, torch.zeros(1, dtype=torch.float64))
        phi = torch.atan2(sin, cos)[2:7] + phase[:, None]
        y = torch.cat((mu * phi.cos(), mu * phi.sin()), -1)
        y.backward(g.double())
        dx, to_delta = gradients(name, g, x, delta, cos, sin, TableRows(2))
        parts = g.double().unflatten(-1, (2, 12)).norm(dim=-2)
        assert_within_ulps(dx, leaf.grad, budget(name, dtype), parts * x.double().sigmoid())
        # A sum of 10 terms in the wider dtype, each off by at most 8 of its ulps.
        wide = torch.float32 if dtype.itemsize == 2 else torch.float64
        error = 18 * torch.finfo(wide).eps + (2.0**-18 if dtype.itemsize == 2 else 2.0**-32)
        most = error * (mu.detach() * parts).sum((0, 2)) + 1e-7 * phase.grad.abs()
        assert ((to_delta.double() - phase.grad).abs() <= most).all()
        alone, _ = gradients(name, g, x, None, cos, sin, TableRows(2))
        still = gradients(name, g, x, torch.zeros(3, 12), cos, sin, TableRows(2))[0]
        assert torch.equal(alone, still)


@pytest.mark.parametrize("learned", [False, True], ids=["queries", "keys"])
def test_first_and_second_derivatives(learned):
    cos, sin = oracles.tables(4, 3)
    x = torch.randn(1, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    delta = (-torch.rand(2, 3, dtype=torch.float64)).requires_grad_() if learned else None
    inputs = (x, delta) if learned else (x,)

    def run(x, delta=None):
        return polar(x, delta, cos, sin, TableRows(1))

    assert torch.autograd.gradcheck(run, inputs, check_batched_grad=True, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(run, inputs)
    tables = cos.requires_grad_(), sin.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda c, s: polar(x.detach(), None, c, s, TableRows(1)), tables
    )


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
def test_strides_change_no_bit(dtype):
    """Tokens before heads, channels apart, a negative bit, a gradient that is expanded."""
    cos, sin = oracles.tables(8, 12)
    dense, delta = torch.randn(2, 3, 5, 12).to(dtype), -torch.rand(3, 12)
    wanted = polar(dense, delta, cos, sin, TableRows())
    forms = [
        dense.transpose(1, 2).contiguous().transpose(1, 2),
        torch.stack((dense, dense), -1)[..., 0],
        torch._neg_view(-dense),
    ]
    g = torch.randn(1, 1, 1, 24).to(dtype).expand_as(wanted)
    wanted_grad = _gradient(dense, delta, cos, sin, g.contiguous())
    # Torch's functions of float64 differ by an ulp where they are not vectorized.
    room = 2**-50 if dtype is torch.float64 and not native.available else 0.0
    same = partial(torch.testing.assert_close, rtol=room, atol=0.0)
    for x in forms:
        same(polar(x, delta, cos, sin, TableRows()), wanted)
        for got, grad in zip(_gradient(x, delta, cos, sin, g), wanted_grad, strict=True):
            torch.testing.assert_close(got, grad, rtol=1e-5, atol=1e-6)
    tables = [torch.stack((t, t), -1)[..., 0] for t in (cos, sin)]
    same(polar(dense, delta, *tables, TableRows()), wanted)


def _gradient(x, delta, cos, sin, g):
    leaf, phase = x.detach().requires_grad_(), delta.clone().requires_grad_()
    return torch.autograd.grad(polar(leaf, phase, cos, sin, TableRows()), (leaf, phase), g)


def test_a_token_has_the_same_bits_in_a_prompt_as_alone():
    cos, sin = oracles.tables(40, 24)
    x, delta = torch.randn(2, 3, 40, 24), -torch.rand(3, 24)
    whole = polar(x, delta, cos, sin, TableRows())
    for t in (0, 17, 39):
        alone = polar(x[:, :, t : t + 1], delta, cos, sin, TableRows(t))
        assert torch.equal(alone, whole[:, :, t : t + 1])


def test_the_gradient_of_delta_has_the_same_bits_each_time():
    """Threads have fixed shares."""
    cos, sin = oracles.tables(32, 32)
    x, g = torch.randn(16, 16, 32, 32), torch.randn(16, 16, 32, 64)
    first = _gradient(x, -torch.ones(16, 32), cos, sin, g)
    again = _gradient(x, -torch.ones(16, 32), cos, sin, g)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4)])
def test_empty_tensors(shape):
    cos, sin = oracles.tables(4, 4)
    x, delta = torch.randn(shape, requires_grad=True), torch.zeros(shape[1], 4, requires_grad=True)
    y = polar(x, delta, cos, sin, TableRows())
    assert y.shape == (*shape[:3], 8)
    y.sum().backward()
    assert x.grad.shape == shape
    assert not delta.grad.any()


@pytest.mark.parametrize("learned", [False, True], ids=["queries", "keys"])
def test_the_op_is_registered_as_torch_wants_it(learned):
    cos, sin = oracles.tables(6, 4)
    x = torch.randn(2, 3, 4, 4, requires_grad=True)
    delta = (-torch.rand(3, 4)).requires_grad_() if learned else None
    positions = torch.randint(0, 6, (2, 4)) if learned else None
    torch.library.opcheck(
        torch.ops.posenc.polar.default, (x, delta, cos, sin, positions, 0 if learned else 2)
    )


@pytest.mark.parametrize(
    "change",
    [
        {"x": torch.zeros(2, 3, 4)},
        {"cos": torch.zeros(6, 3)},
        {"sin": torch.zeros(5, 4)},
        {"delta": torch.zeros(2, 4)},
        {"positions": torch.zeros(2, 3, dtype=torch.int64)},
        {"start": 3},
        {"positions": torch.full((2, 4), 6)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_the_op_refuses_what_it_would_read_out_of_bounds(change):
    given = {
        "x": torch.zeros(2, 3, 4, 4),
        "delta": None,
        "cos": torch.zeros(6, 4),
        "sin": torch.zeros(6, 4),
        "positions": None,
        "start": 0,
    }
    arguments = {**given, **change}.values()
    with pytest.raises(ValueError, match="must be"):
        polar_op.overload(*arguments)


@pytest.mark.slow
def test_a_compiled_step_has_the_eager_gradients():
    cos, sin = oracles.tables(6, 8)
    x, delta = torch.randn(2, 2, 6, 8), -torch.rand(2, 8)
    g = torch.randn(2, 2, 6, 16)
    leaf, phase = x.clone().requires_grad_(), delta.clone().requires_grad_()
    compiled = torch.compile(
        lambda x, delta: polar(x, delta, cos, sin, TableRows()), fullgraph=True
    )
    found = torch.autograd.grad(compiled(leaf, phase), (leaf, phase), g)
    for got, wanted in zip(found, _gradient(x, delta, cos, sin, g), strict=True):
        assert torch.equal(got, wanted)


def test_transforms_of_torch_func():
    cos, sin = oracles.tables(4, 3)
    x, delta = torch.randn(5, 2, 2, 4, 3), -torch.rand(2, 3)
    batched = torch.func.vmap(lambda x: polar(x, delta, cos, sin, TableRows()))(x)
    one_by_one = torch.stack([polar(each, delta, cos, sin, TableRows()) for each in x])
    torch.testing.assert_close(batched, one_by_one, rtol=1e-6, atol=1e-7)
    wide = x[0].double()
    forward = torch.func.jacfwd(lambda x: polar(x, delta, cos, sin, TableRows()))(wide)
    torch.testing.assert_close(
        forward, torch.func.jacrev(lambda x: polar(x, delta, cos, sin, TableRows()))(wide)
    )
