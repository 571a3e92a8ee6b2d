"""Compile kernels for an H100 without having one, as their launches would."""

import itertools
import re
import sys
import warnings

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from posenc.attention.biases import Call
from posenc.kernels.spec import Norm, Rows, Spec, Store, Write
from posenc.kernels.triton import attention, cache, cope, norm, polar, rotate, terms
from posenc.kernels.triton.launch import Launch

POINTERS = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float64: "*fp64"}
POINTERS |= {torch.int32: "*i32", torch.int64: "*i64", torch.uint8: "*u8", torch.float16: "*fp16"}
# What a launch decides by the GPU; these tensors are on a CPU.
BY_GPU = ("PTX", "NATIVE", "EARLY")


def compiled(self, tensors, start):
    """What a launch does, but for the launch."""
    given = [*tensors, start, *self.numbers]
    fixed = {name: name in BY_GPU or value for name, value in self.constants.items()}
    names = self.kernel.arg_names
    signature = {}
    for name, value in itertools.zip_longest(names, given):
        if name in fixed:
            signature[name] = "constexpr"
        elif isinstance(value, torch.Tensor):
            signature[name] = POINTERS[value.dtype]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
    constants = {(names.index(name),): value for name, value in fixed.items()}
    source = ASTSource(fn=self.kernel, signature=signature, constexprs=constants)
    options = {key: value for key, value in self.options.items() if value is not None}
    done = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert "ret;" in done.asm["ptx"]
    # More shared memory than a program of this GPU can have would stop the launch.
    assert done.metadata.shared <= 227 * 1024
    # Rotations state which product is fused with a sum; the compiler would choose one by shape.
    if self.kernel.__module__ in (rotate.__name__, norm.__name__, polar.__name__):
        assert not re.findall(r"\bmul\.f(?:16|32|64)\b", done.asm["ptx"])
        assert "fma.rn.f" in done.asm["ptx"]
    print(f"{case}: {self.kernel.__name__}")


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
    rows = Rows(0, torch.zeros(batch, length, dtype=torch.int64))
    for at in (Rows(), rows):
        rotate.rotate_into([q, k], [torch.empty_like(q), torch.empty_like(k)], cos, cos, at, spec)
    for size in (width, heads * width):
        weight = torch.empty(size)
        norm.norm_into(q, torch.empty_like(q), weight, cos, cos, rows, spec, Norm())
        norm.norm_backward_into(q, q, torch.empty_like(q), weight, cos, cos, rows, spec, Norm())


def pope(dtype):
    """PoPE and its gradient, with a phase."""
    x, cos = torch.empty(2, 8, 100, 96, dtype=getattr(torch, dtype)), torch.empty(100, 96)
    wide = torch.float64 if x.dtype == torch.float32 else torch.float32
    y, phases = torch.empty(2, 8, 100, 192, dtype=x.dtype), torch.empty(2, 8, 96, dtype=wide)
    polar.polar_into(x, y, phases, cos, cos, Rows())
    polar.polar_backward_into(y, x, torch.empty_like(x), phases, cos, cos, Rows())


def bias(kind, width, *others):
    """All kernels of a bias."""
    width, length = int(width), 1100
    dtype = torch.float32 if others else torch.bfloat16
    q, k, v = (torch.zeros(2, 4, length, width, dtype=dtype) for _ in range(3))
    values = {"slopes": torch.ones(1, 4), "table": torch.ones(4, 99)}.get(kind)
    if kind == "sums":
        values = torch.zeros(1, 4, length, dtype=torch.float64)
    call = Call(values, None, None, None, kind, 0, 0, 1.0, True, True)
    out, lse, ranges = attention.forward(q, k, v, call)
    attention.backward(out, None, (q, k, v, out, lse, ranges), call, values is not None)
    # One query: the keys of two sequences are in one part, those of one sequence in two.
    for n in (1, 2):
        attention.forward(q[:n, :, :1], k[:n], v[:n], call._replace(start=length - 1))


def products(width, *others):
    """All kernels of attention with a vector for each distance."""
    width, length = int(width), 300
    dtype = torch.float32 if others else torch.bfloat16
    q, k, v = (torch.zeros(2, 4, length, width, dtype=dtype) for _ in range(3))
    vectors = torch.zeros(99, 1, width, dtype=dtype)
    call = Call(None, None, None, None, "none", 0, 0, 1.0, False, False)
    network = torch.ones(2 + 4 + (2 + 4) * 32)
    for given in ((q, k, vectors, vectors, None), (None, None, None, None, network)):
        made = terms.TermLaunches(q, k, v, given, 49, call)
        made.backward(q, None, *made.forward())
    levels = torch.zeros(2, 4, length, 64)
    counted = cope.CountedLaunches(q, k, v, levels, call._replace(causal=True))
    counted.backward(q, None, *counted.forward())


def write(dtype, interleaved):
    """A write to caches of 8 bits, and one to caches in the dtype of the keys."""
    q, k, v = (torch.zeros(1, 4, 3, 80, dtype=torch.bfloat16) for _ in range(3))
    slots, weight, table = torch.zeros(1, 3).long(), torch.ones(80), torch.zeros(9, 32)
    scales = torch.zeros(2, 4, 16)
    stores = [
        Store(torch.zeros(2, 4, 16, 80).to(getattr(torch, dtype)), None, scales),
        Store(torch.zeros(2, 4, 16, 80, dtype=v.dtype)),
    ]
    spec = Spec(interleaved == "interleaved", True)
    write = Write(q, k, v, slots, *stores, weight)
    cache.cache_into(write, torch.empty_like(q), table, table, Rows(), spec)


if __name__ == "__main__":
    warnings.simplefilter("error")
    # Triton builds syntax trees in a way that Python 3.13 warns of.
    warnings.simplefilter("ignore", DeprecationWarning)
    Launch.__call__ = compiled
    for case in sys.argv[1:]:
        kind, *words = case.split()
        globals()[kind](*words)
