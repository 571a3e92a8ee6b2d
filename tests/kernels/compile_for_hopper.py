"""Compile the rotation and the norm for an H100 without having one: types and layouts show here.

With titles of `CASES` as arguments, these alone, and the write to a cache.
"""

import re
import sys
import warnings

import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from posenc.kernels.triton import norm, polar, rotate
from posenc.kernels.triton.launch import OPTIONS, Launch

POINTERS = {"q", "k", "q_out", "k_out", "x", "y", "g", "dx", "weight", "q_weight", "k_weight"}
ROTATE = {
    "Q_HEADS": 32, "K_HEADS": 8, "PAIRS": 64, "FIRST": 0, "REST": 0, "HAS_POSITIONS": False,
    "ADVANCES": True, "IN": 0, "OUT": 0, "TRANSPOSED": False, "WIDE": tl.float32,
    "INDEX": tl.int32, "BATCH_FIRST": False, "SPLIT": True, "EARLY": True, "LATE": True,
    "BLOCK_P": 64, "BLOCK_REST": 1, "BLOCK_H": 8, "BLOCK_T": 1,
}  # fmt: skip
ONE_PAIR = {**ROTATE, "Q_HEADS": 2, "K_HEADS": 0, "PAIRS": 1, "BLOCK_P": 1, "IN": 2, "OUT": 2}
NORM = {
    "EPS": 1e-6, "SHIFT": 0.0,
    "HEADS": 8, "WIDTH": 128, "PAIRS": 32, "FIRST": 0, "REST": 64, "HAS_POSITIONS": True,
    "ADVANCES": False, "IN": 2, "OUT": 0, "WEIGHT": 2, "TRANSPOSED": False, "ALL_HEADS": False,
    "WIDE": tl.float32, "BLOCK_P": 32, "BLOCK_REST": 64, "BLOCK_H": 8,
}  # fmt: skip
BOTH_NORMS = NORM | {
    "Q_HEADS": 8, "K_HEADS": 2, "Q_ALL": False, "K_ALL": False, "Q_BLOCK": 8, "K_BLOCK": 2,
}  # fmt: skip
POLAR = {
    "HEADS": 8, "WIDTH": 96, "HAS_POSITIONS": True, "ADVANCES": False, "TURNED": True,
    "WIDE": tl.float32, "INDEX": tl.int32, "BLOCK_H": 8, "BLOCK_T": 1, "BLOCK_D": 128,
}  # fmt: skip
CASES = {
    "loop over heads": (rotate._rotate, {**ROTATE, "SPLIT": False}, (), "bf16"),
    "interleaved to half": (rotate._rotate, {**ROTATE, "IN": 2, "SPLIT": False}, ("q_h",), "fp16"),
    "rest": (rotate._rotate, {**ROTATE, "REST": 16, "BLOCK_REST": 16}, (), "bf16"),
    "far apart": (rotate._rotate, {**ROTATE, "INDEX": tl.int64, "LATE": False}, (), "bf16"),
    "float64": (rotate._rotate, {**ROTATE, "IN": 1, "OUT": 1, "WIDE": tl.float64}, (), "fp64"),
    "strides of one": (rotate._rotate, ONE_PAIR, ("q_t", "k_t", "qo_t", "ko_t"), "bf16"),
    "norm": (norm._forward, BOTH_NORMS, (), "bf16"),
    "norm of all heads": (norm._forward, {**BOTH_NORMS, "Q_ALL": True}, (), "bf16"),
    "norm backward": (norm._backward, NORM, (), "bf16"),
    "norm of all heads backward": (norm._backward, {**NORM, "ALL_HEADS": True}, (), "bf16"),
    "polar": (polar._forward, POLAR, (), "bf16"),
    "polar in float64": (polar._forward, {**POLAR, "WIDE": tl.float64}, (), "fp32"),
    "polar backward": (polar._backward, POLAR, (), "bf16"),
}


def types(kernel, constants, ones, element):
    """Signature and constants as a launch would find them; ``ones`` are arguments that are 1."""
    known = {"cos": "*fp64", "sin": "*fp64", "partial": "*fp32", "positions": "*i64"}
    known |= {"phases": "*fp64", "shares": "*fp64"} if "TURNED" in constants else {}
    known |= dict.fromkeys(POINTERS, "*" + element)
    fixed = {**constants, **dict.fromkeys(ones, 1)}
    names = kernel.arg_names
    signature = {n: "constexpr" if n in fixed else known.get(n, "i32") for n in names}
    return signature, {(i,): fixed[n] for i, n in enumerate(names) if n in fixed}


if __name__ == "__main__":
    import compile_launches_for_hopper as launches

    warnings.simplefilter("error")
    # Triton builds syntax trees in a way that Python 3.13 warns of.
    warnings.simplefilter("ignore", DeprecationWarning)
    for title in sys.argv[1:] or CASES:
        kernel, constants, ones, element = CASES[title]
        signature, fixed = types(kernel, constants, ones, element)
        source = ASTSource(fn=kernel, signature=signature, constexprs=fixed)
        options = {"num_warps": 4, **OPTIONS}
        done = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        assert "ret;" in done.asm["ptx"]
        # What may be fused with a sum, or not, as the compiler sees fit.
        assert not re.findall(r"\bmul\.f(?:16|32|64)\b", done.asm["ptx"]), title
        assert "fma.rn.f" in done.asm["ptx"], title
        print(f"{title}: compiled")
    Launch.__call__ = launches.compiled
    launches.write("float8_e4m3fn", "half")
