"""DTensors over processes that gloo joins. What the ranks do is in sharded.py."""

import subprocess
import sys

import pytest

from support.processes import assert_passed, run


@pytest.mark.parametrize(
    ("world", "job"),
    [
        pytest.param(2, "layouts", id="2-ranks"),
        pytest.param(4, "more_layouts", id="4-ranks", marks=pytest.mark.slow),
    ],
)
def test_every_layout_is_one_process_to_the_last_bit(world, job, tmp_path):
    """Wrong rows are the trap: a shard of the sequence does not begin at row zero."""
    assert_passed(run(world, f"support.sharded:{job}", tmp_path))


def test_a_dtensor_before_the_import_names_it():
    """A DTensor that met our op without its rule would be told of torch's internals."""
    script = """
import torch, posenc
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, init_device_mesh
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
x = DTensor.from_local(torch.ones(1, 1, 2, 8), init_device_mesh("cpu", (1,)), [Replicate()])
for call in (lambda: posenc.RoPE(8)(x, x), lambda: posenc.SinusoidalPE(8, 8)(x[0, 0])):
    try:
        call()
    except TypeError as error:
        print(error)
dist.destroy_process_group()
"""
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, timeout=120, capture_output=True, text=True
    )
    assert done.stdout.count("Run `import posenc.interop.distributed` first.") == 2
