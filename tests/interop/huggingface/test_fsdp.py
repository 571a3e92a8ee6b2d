"""Patched models under FSDP2. What the ranks do is in fsdp.py."""

import pytest

from support.processes import assert_passed, run


@pytest.mark.slow
def test_a_model_patched_on_meta_has_its_rates_on_every_rank(tmp_path):
    """`to_empty` leaves the model's own rates without numbers, and no checkpoint has them."""
    assert_passed(run(2, "support.hf_fsdp:patched_on_meta", tmp_path))
