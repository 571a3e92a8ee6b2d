"""Each private name of Triton that the library uses still does what it relies on."""

import ast
from pathlib import Path

import pytest

pytest.importorskip("triton")
import torch

from support.processes import python

SOURCE = Path(__file__).parents[2] / "src" / "posenc"
# Compiled in a process without the interpreter, for a GPU that need not be there.
COMPILED = """
from typing import Any, NamedTuple
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from posenc._contract import triton_private

class Rows(NamedTuple):
    pointer: Any
    step: Any
    hook: Any
    absent: Any

@triton.jit
def twice(x):
    return x * 2.0

@triton.jit
def kernel(x, rows, start, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    if rows.absent is not None:
        i += tl.load(rows.absent)
    tl.store(x + start + i, rows.hook(tl.load(rows.pointer + i * rows.step)))

rows = Rows("*fp32", "i32", "constexpr", "constexpr")
signature = {"x": "*fp32", "rows": rows, "start": "i32", "SIZE": "constexpr"}
aligned = {(0,): [["tt.divisibility", 16]], (1, 0): [["tt.divisibility", 16]]}
target, options = GPUTarget("cuda", 90, 32), {"num_warps": 2, "debug": True}
constants = {(3,): 64, (1, 2): twice, (1, 3): None}
made = triton_private.compile(kernel, signature, constants, aligned, target, options)
assert "arith.mulf" in made.asm["ttir"]
assert not triton_private.is_loaded(made)
assert made.asm["ptx"].count(".param") >= 4
found = made.metadata
assert (found.num_warps, found.num_ctas, found.target.warp_size) == (2, 1, 32)
assert found.shared == 0 and not found.launch_pdl and not found.launch_cooperative_grid
assert not found.global_scratch_size and not found.profile_scratch_size
# The start is not specialised: it is a parameter, and nothing is known of it.
assert made.asm["ttir"].count("tt.divisibility = 16") == 2
"""


def test_a_kernel_is_compiled_from_a_description_of_its_arguments(tmp_path):
    script = tmp_path / "compiled.py"
    script.write_text(COMPILED)
    code, log = python(str(script), TRITON_CACHE_DIR=str(tmp_path / "cache"))
    assert code == 0, log[-2000:]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_kernel_is_loaded_and_run():
    from posenc._contract import triton_private
    from posenc.ops import execute
    from posenc.ops.plan import Launch, plan_of
    from posenc.ops.rotation.rotation import rotate_op

    x, table = torch.ones(1, 1, 2, 8, device="cuda"), torch.zeros(2, 4, device="cuda")
    plan = plan_of(
        rotate_op, rotate_op.call(x, table, table, None, 0, 0), execute.target_of(x.device)
    )
    (step,) = plan.steps
    assert isinstance(step, Launch)
    kernel = execute.loaded(step, x.device)
    assert triton_private.is_loaded(kernel)
    about = triton_private.about(kernel)
    assert about.function
    assert about.threads >= 32
    assert torch.equal(execute.execute(plan, [x, table, table, None], 0)[0], torch.zeros_like(x))


def test_private_names_of_triton_are_in_one_file():
    """Names of its language and `triton.jit`, `cdiv` and `next_power_of_2` are its manual's."""
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("triton"):
                is_language = node.module == "triton" or node.module.startswith("triton.language")
                assert is_language or path.name == "triton_private.py", path
