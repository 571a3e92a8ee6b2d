"""The interpreter runs what Triton's compiler would refuse; so the compiler is asked too."""

from pathlib import Path

import pytest

from support.processes import python


def compiled(folder, cases):
    """Compile the kernels of the cases for a GPU that is not here, and return their names."""
    script = Path(__file__).parent / "compile_launches_for_hopper.py"
    code, log = python(str(script), *cases, TRITON_CACHE_DIR=str(folder), limit=400)
    assert code == 0, log[-2000:]
    return {tuple(line.split(": ")) for line in log.splitlines()}


ATTENTION = {"forward", "to_queries", "to_keys", "split", "combine"}
PRODUCTS = {"forward", "to_queries", "to_keys", "to_bias", "at_ends", "fold", "lines_of"}
PRODUCTS |= {"logs_of", "to_network", "count_gates", "split", "combine", "with_all"}
CASES = {
    "rotation split": {"_rotate", "_forward", "_backward"},
    "rotation heads": {"_rotate", "_forward", "_backward"},
    "rotation rest": {"_rotate", "_forward", "_backward"},
    "rotation double": {"_rotate", "_forward", "_backward"},
    "rotation one-pair": {"_rotate", "_forward", "_backward"},
    "pope bfloat16": {"_forward", "_backward"},
    "pope float32": {"_forward", "_backward"},
    "write float8_e4m3fn half": {"write_cache"},
    "write float8_e5m2 interleaved": {"write_cache"},
    "write int8 interleaved": {"write_cache"},
    "bias slopes 64": ATTENTION,
    "bias table 80": ATTENTION | {"to_bias"},
    "bias sums 128": ATTENTION,
    "bias table 256": ATTENTION | {"to_bias"},
    "bias table 128 float32": ATTENTION | {"to_bias"},
    "products 64": PRODUCTS,
    "products 256 float32": PRODUCTS,
    "hooks": {"add"},
}
QUICK = ["rotation rest", "write float8_e4m3fn half", "hooks"]
KINDS = ["rotation", "pope", "write", "bias", "products"]


def groups():
    """Cases that one process compiles."""
    yield pytest.param(QUICK, id="quick")
    for kind in KINDS:
        cases = [case for case in CASES if case.startswith(kind) and case not in QUICK]
        yield pytest.param(cases, id=kind, marks=pytest.mark.slow)


@pytest.mark.parametrize("cases", [*groups()])
def test_kernels_compile_for_a_gpu_that_is_not_here(cases, tmp_path):
    wanted = {(case, kernel) for case in cases for kernel in CASES[case]}
    assert compiled(tmp_path, cases) >= wanted
