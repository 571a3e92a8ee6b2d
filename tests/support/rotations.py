"""Every implementation of the rotation, and the check that all of them have to pass."""

import pytest
import torch

import oracles
from posenc.ops import native
from posenc.ops.rotation import reference, rotation
from posenc.ops.rotation.spec import TableRows, flatten
from support.assertions import assert_within_ulps
from support.plans import planned

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
LAYOUTS = pytest.mark.parametrize(
    ("inner", "outer"),
    [(True, True), (False, False), (True, False), (False, True)],
    ids=["interleaved", "half", "interleaved-to-half", "half-to-interleaved"],
)
GPU = "cuda" if torch.cuda.is_available() else "cpu"


def by_reference(xs, ys, *arguments):
    for x, y in zip(xs, ys, strict=True):
        y.copy_(reference.rotate(x, *arguments))


def by_triton(xs, ys, *arguments):
    rotate(planned, xs, ys, *arguments)


def by_c(xs, ys, *arguments):
    """Native code, which raises RuntimeError where it cannot run."""
    rotate(lambda op, *call: op.native(*call), xs, ys, *arguments)


def rotate(run, xs, ys, cos, sin, rows, spec):
    """Call the op for these tensors by ``run``."""
    how = cos, sin, *flatten(rows, spec)
    if xs[0] is ys[0]:
        op = rotation.rotate_in_place_op if len(xs) == 1 else rotation.rotate_qk_in_place_op
        run(op, *xs, *how)
        return
    op = rotation.rotate_op if len(xs) == 1 else rotation.rotate_qk_op
    results = run(op, *xs, *how)
    for y, result in zip(ys, [results] if torch.is_tensor(results) else results, strict=True):
        y.copy_(result)


BACKENDS = {"reference": (by_reference, "cpu"), "triton": (by_triton, GPU)}
if native.available:
    BACKENDS["c"] = (by_c, "cpu")
# Triton's interpreter cuts bfloat16 off where a GPU rounds it.
CUT = {("triton", torch.bfloat16): 1.0} if GPU == "cpu" else {}


def expected(x, cos, sin, index, spec):
    """Rotation of ``x`` in float64 by complex numbers, and the magnitude of each result."""
    cos, sin = (t.cpu()[index].unsqueeze(-3) for t in (cos, sin))
    pairs = cos.shape[-1]
    span = slice(spec.first_channel, spec.first_channel + 2 * pairs)
    x = x.cpu().double()
    exact, size = x.clone(), x.abs()
    rotated = oracles.rotate(
        x[..., span], cos, -sin if spec.transposed else sin, interleaved=spec.interleaved
    )
    length = oracles.pair_magnitude(rotated, pairs, interleaved=spec.interleaved)
    if spec.interleaved and not spec.interleaved_out:
        rotated, length = (torch.cat((t[..., 0::2], t[..., 1::2]), -1) for t in (rotated, length))
    elif spec.interleaved_out and not spec.interleaved:
        rotated, length = (
            t.unflatten(-1, (2, pairs)).transpose(-1, -2).flatten(-2) for t in (rotated, length)
        )
    exact[..., span], size[..., span] = rotated, length
    return exact, size


def check(name, xs, cos, sin, rows, spec, index):
    run, device = BACKENDS[name]
    xs = [x.to(device) for x in xs]
    ys = [torch.full_like(x, float("nan")) for x in xs]
    moved = None if rows.positions is None else rows.positions.to(device)
    run(xs, ys, cos.to(device), sin.to(device), TableRows(rows.start, moved), spec)
    for x, y in zip(xs, ys, strict=True):
        exact, size = expected(x, cos, sin, index, spec)
        ulps = 4 if x.dtype == torch.float64 else CUT.get((name, x.dtype), 0.501)
        assert_within_ulps(y.cpu(), exact, ulps, size)
        assert y.stride() == x.stride() or not x.is_contiguous()


def instruction_sets():
    """Have the C kernels use each instruction set that runs here, one after the other."""
    from posenc.ops.native import _native

    best = _native.isa()
    try:
        for name in ("avx512", "avx2", "neon", "baseline"):
            try:
                _native.set_isa(name)
            except ValueError:
                continue
            yield name
    finally:
        _native.set_isa(best)
