"""FSDP2 and torch.distributed.checkpoint. What the ranks do is in fsdp.py."""

import pytest

from support.processes import assert_passed, run


@pytest.mark.slow
def test_a_model_born_on_meta_trains_and_loads_on_another_number_of_ranks(tmp_path):
    """Tables hold garbage after to_empty unless they are worked out again, on every rank."""
    assert_passed(run(2, "support.fsdp:train_and_save", tmp_path))
    assert_passed(run(4, "support.fsdp:load_elsewhere", tmp_path))
