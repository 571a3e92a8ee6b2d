"""DTensors over processes that gloo joins. What the ranks do is in sharded.py."""

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
