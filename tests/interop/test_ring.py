"""Attention over a sequence on several ranks. What the ranks do is in support/ring.py."""

import pytest
import torch

from posenc.interop.ring import ring_attention
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


def test_attention_without_ranks_names_what_is_missing():
    x = torch.randn(1, 2, 4, 8)
    with pytest.raises(RuntimeError, match="Call init_process_group first"):
        ring_attention(x, x, x)
