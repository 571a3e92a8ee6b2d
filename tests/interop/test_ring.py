"""Attention over a sequence on several ranks. What the ranks do is in support/ring.py."""

import pytest
import torch
import torch.distributed as dist

from posenc.interop.ring import ring_attention, sharded_cumsum
from support.processes import assert_passed, run


@pytest.mark.parametrize(
    ("world", "job"),
    [
        pytest.param(3, "some", id="3-ranks"),
        pytest.param(2, "many", id="2-ranks", marks=pytest.mark.slow),
        pytest.param(4, "many", id="4-ranks", marks=pytest.mark.slow),
    ],
)
def test_attention_on_ranks_is_that_of_one_process(world, job, tmp_path):
    """A block at the wrong distance, or a gradient that did not come back, is silent."""
    assert_passed(run(world, f"support.ring:{job}", tmp_path))


def test_one_rank_takes_an_odd_number_of_tokens():
    """It has the whole sequence, and nothing to cut in zig-zag order."""
    q, k, v = torch.randn(3, 1, 2, 5, 8, dtype=torch.float64)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        out = ring_attention(q, k, v, causal=True, zigzag=True)
        sums = sharded_cumsum(q[0, 0, :, 0], zigzag=True)
    finally:
        dist.destroy_process_group()
    whole = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(sums, q[0, 0, :, 0].cumsum(0))


def test_ranks_compare_a_shape_once(tmp_path):
    """A comparison waits for every rank, and for the device."""
    assert_passed(run(2, "support.ring:repeated", tmp_path))


def test_attention_without_ranks_names_what_is_missing():
    x = torch.randn(1, 2, 4, 8)
    with pytest.raises(RuntimeError, match="Call init_process_group first"):
        ring_attention(x, x, x, causal=True)
