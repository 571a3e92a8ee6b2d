"""Compile the kernels of plans for an H100 without having one."""

import importlib.util
import re
import sys
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from triton.backends.compiler import GPUTarget

from posenc.ops import execute
from posenc.ops.attention.biases import (
    DistanceTable,
    LevelFields,
    NetworkFields,
    NoBias,
    RunningSum,
    Slopes,
    VectorFields,
)
from posenc.ops.attention.call import Call
from posenc.ops.attention.op import OPS, arguments
from posenc.ops.cache.cache import rotate_and_cache_op
from posenc.ops.plan import Constant, Launch
from posenc.ops.rotation.polar import polar_backward_op, polar_op
from posenc.ops.rotation.rotation import norm_rotate_backward_op, norm_rotate_op, rotate_qk_op
from posenc.ops.rotation.spec import Norm, Spec, TableRows, flatten
from support.plans import plan_for


def assert_passed(step, ptx):
    """What C passes to a kernel are its parameters: of these sizes, and two more for Triton."""
    entry = ptx[ptx.index(".entry") : ptx.index(")", ptx.index(".entry"))]
    wanted = [int(bits) // 8 for bits in re.findall(r"\.param \.[a-z](\d+)", entry)]
    passed = [size for _, size, _ in execute.described(step).parameters]
    assert [*passed, 8, 8] == wanted


def compile_plan(op, *call):
    """Compile what the plan of a call launches."""
    for step in plan_for(op, *call).steps:
        if not isinstance(step, Launch):
            continue
        request = execute.request_of(step)
        done = execute.compile_request(request, GPUTarget("cuda", 90, 32))
        assert "ret;" in done.asm["ptx"]
        assert_passed(step, done.asm["ptx"])
        # More shared memory than a program of this GPU can have would stop the launch.
        assert done.metadata.shared <= 227 * 1024
        # Rotations state which product is fused with a sum; the compiler would choose one by shape.
        room = step.kernel.__module__.rpartition(".")[2]
        if room in ("rotate", "norm", "polar") and step.kernel.__name__ not in EXACT:
            assert not re.findall(r"\bmul\.f(?:16|32|64)\b", done.asm["ptx"])
            assert "fma.rn.f" in done.asm["ptx"]
        print(f"{case}: {step.kernel.__name__}")


# Kernels that have no product and sum.
EXACT = ("_phases", "sum_rows")
ROTATIONS = {
    "split": (torch.bfloat16, (2, 8, 100, 128), 64, Spec(False, False), torch.float64),
    "heads": (torch.bfloat16, (1, 32, 20000, 128), 64, Spec(True, False), torch.float32),
    "rest": (torch.float16, (2, 8, 100, 144), 64, Spec(False, True, 16), torch.float64),
    "double": (torch.float64, (2, 8, 100, 128), 64, Spec(), torch.float64),
    "one-pair": (torch.bfloat16, (1, 2, 3, 2), 1, Spec(), torch.float64),
}


def rotation(title):
    """The rotation, RMSNorm with it, and the gradient of both."""
    dtype, (batch, heads, length, width), pairs, spec, of_table = ROTATIONS[title]
    q = torch.empty(batch, length, heads, width, dtype=dtype).transpose(1, 2)
    k, cos = q[:, : max(heads // 4, 1)], torch.empty(length, pairs, dtype=of_table)
    rows, norm = TableRows(0, torch.zeros(batch, length, dtype=torch.int64)), Norm()
    for at in (TableRows(), rows):
        compile_plan(rotate_qk_op, q, k, cos, cos, *flatten(at, spec))
    for size in (width, heads * width):
        how = torch.empty(size), cos, cos, *flatten(rows, spec), norm.eps, norm.shift
        compile_plan(norm_rotate_op, q, *how)
        compile_plan(norm_rotate_backward_op, q, q, *how)


def pope(dtype):
    """PoPE and its gradient, with a phase."""
    x, cos = torch.empty(2, 8, 100, 96, dtype=getattr(torch, dtype)), torch.empty(100, 96)
    y, delta = torch.empty(2, 8, 100, 192, dtype=x.dtype), torch.empty(8, 96)
    compile_plan(polar_op, x, delta, cos, cos, None, 0)
    compile_plan(polar_backward_op, y, x, delta, cos, cos, None, 0)


def compile_attention(inputs, call, both=True):
    """All kernels of a kind of bias, forward and backward."""
    ops, given = OPS[type(call.bias)], (*inputs, *arguments(call._replace(to_bias=True)))
    compile_plan(ops.forward, *given)
    if not both:
        return
    results = ops.forward.results(ops.forward.call(*given))
    compile_plan(ops.backward, inputs[0], None, *results, *given)


def bias(kind, width, *others):
    """All kernels of a bias of numbers."""
    width, length = int(width), 1100
    dtype = torch.float32 if others else torch.bfloat16
    q, k, v = (torch.zeros(2, 4, length, width, dtype=dtype) for _ in range(3))
    fields = {
        "none": NoBias(),
        "slopes": Slopes(torch.ones(1, 4)),
        "table": DistanceTable(torch.ones(4, 99)),
        "sums": RunningSum(torch.zeros(1, 4, length, dtype=torch.float64)),
    }[kind]
    call = Call.of(fields, start=0, scale=1.0, causal=True, prune=True)
    compile_attention((q, k, v), call)
    # One query: the keys of two sequences are in one part, those of one sequence in two.
    for n in (1, 2):
        one = arguments(call._replace(start=length - 1))
        compile_plan(OPS[type(fields)].forward, q[:n, :, :1], k[:n], v[:n], *one)


def products(width, *others):
    """All kernels of attention with a vector for each distance, with a network, and with levels."""
    width, length = int(width), 300
    dtype = torch.float32 if others else torch.bfloat16
    q, k, v = (torch.zeros(2, 4, length, width, dtype=dtype) for _ in range(3))
    vectors = torch.zeros(99, 1, width, dtype=dtype)
    own = q[:, :, :1]
    for fields, causal, queries in (
        (VectorFields(q, k, vectors, vectors, 49), False, q),
        (VectorFields(None, None, vectors, None, 49), True, q),
        (VectorFields(None, None, vectors, vectors, 49), True, own),
        (NetworkFields(torch.ones(2 + 4 + (2 + 4) * 32)), False, q),
        (NetworkFields(torch.ones(2 + 4 + (2 + 4) * 32)), True, own),
        (LevelFields(torch.zeros(2, 4, length, 64)), True, q),
        (LevelFields(torch.zeros(2, 4, 1, 64)), True, own),
    ):
        start = length - queries.shape[2]
        call = Call.of(fields, start=start, scale=1.0, causal=causal)
        compile_attention((queries, k, v), call, both=queries is q)


HOOK = """
import triton

@triton.jit
def add(scores):
    return scores {change}

@triton.jit
def kernel(bias):
    bias.hook(0.0)
"""


class Device(NamedTuple):
    """A bias of one hook."""

    hook: Any


def hooks():
    """A hook is part of the key of what is compiled: by its source, not by its name."""
    from triton.compiler import ASTSource

    found = set()
    for number, change in enumerate(("+ 1.0", "* 3.0", "* 3.0")):
        with TemporaryDirectory() as folder:
            file = Path(folder) / "hook.py"
            file.write_text(HOOK.format(change=change))
            spec = importlib.util.spec_from_file_location(f"hook{number}", file)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            launch = Launch(module.kernel, (1, 1, 1), (Device(Constant(module.add)),), {}, {})
            kernel, types, _, constants, _ = execute.request_of(launch)
            source = ASTSource(kernel, dict(zip(("bias",), types, strict=True)), dict(constants))
            found.add(source.hash())
    assert len(found) == 2, found
    print(f"{case}: add")


def write(dtype, interleaved):
    """A write to caches of 8 bits, and one to caches in the dtype of the keys."""
    q, k, v = (torch.zeros(1, 4, 3, 80, dtype=torch.bfloat16) for _ in range(3))
    slots, weight, table = torch.zeros(1, 3).long(), torch.ones(80), torch.zeros(9, 32)
    scales, v_cache = torch.zeros(2, 4, 16), torch.zeros(2, 4, 16, 80, dtype=v.dtype)
    caches = torch.zeros(2, 4, 16, 80).to(getattr(torch, dtype)), v_cache, scales, None
    how = flatten(TableRows(), Spec(interleaved == "interleaved", True))
    read = slots, weight, None, None, None
    compile_plan(rotate_and_cache_op, q, k, v, *caches, *read, table, table, *how, 1e-6, 0.0)


if __name__ == "__main__":
    warnings.simplefilter("error")
    # Triton builds syntax trees in a way that Python 3.13 warns of.
    warnings.simplefilter("ignore", DeprecationWarning)
    for case in sys.argv[1:]:
        kind, *words = case.split()
        globals()[kind](*words)
