import os
import subprocess
import sys
from pathlib import Path

import pytest


def compiled(folder, script, *arguments):
    """The lines of a script that compiles kernels."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder)
    command = [sys.executable, str(Path(__file__).parent / script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("titles", "count"),
    [
        pytest.param(("interleaved to half", "norm", "norm backward"), 4, id="some"),
        pytest.param((), 14, id="every", marks=pytest.mark.slow),
    ],
)
def test_kernels_compile_for_a_gpu_that_is_not_here(titles, count, tmp_path):
    """The interpreter runs what Triton's compiler would refuse; so the compiler is asked too.

    The write to a cache is always among them.
    """
    assert len(compiled(tmp_path, "compile_for_hopper.py", *titles)) == count


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["slopes 64", "table 80", "sums 128", "table 256", "table 128 float32"]
)
def test_attention_compiles_for_a_gpu_that_is_not_here(case, tmp_path):
    lines = compiled(tmp_path, "compile_launches_for_hopper.py", "attention", *case.split())
    names = {line.partition(":")[0] for line in lines}
    assert names > {"forward", "to_queries", "to_keys", "split", "combine"}


@pytest.mark.slow
@pytest.mark.parametrize("case", ["64", "256 float32"])
def test_products_compile_for_a_gpu_that_is_not_here(case, tmp_path):
    lines = compiled(tmp_path, "compile_launches_for_hopper.py", "products", *case.split())
    names = {line.partition(":")[0] for line in lines}
    of_tiles = {"forward", "to_queries", "to_keys", "to_vectors"}
    assert names == of_tiles | {"at_ends", "fold", "lines_of", "logs_of", "to_network"}


@pytest.mark.slow
@pytest.mark.parametrize("case", ["float8_e5m2 interleaved", "int8 interleaved"])
def test_the_write_to_a_cache_compiles_for_a_gpu_that_is_not_here(case, tmp_path):
    lines = compiled(tmp_path, "compile_launches_for_hopper.py", "write", *case.split())
    assert lines == ["write_cache: compiled"]
