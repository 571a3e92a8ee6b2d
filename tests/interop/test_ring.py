"""Attention over a sequence on several ranks. What the ranks do is in support/ring.py."""

import pytest
import torch

from posenc.interop.ring import Plan, ring_attention, window_extents, with_documents
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


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both-sides"])
@pytest.mark.parametrize("zigzag", [False, True], ids=["contiguous", "zigzag"])
@pytest.mark.parametrize("windows", [None, (9, 30)], ids=["all", "near"])
@pytest.mark.parametrize("documents", [False, True], ids=["one", "documents"])
def test_each_visible_pair_is_in_one_block(causal, zigzag, windows, documents):
    """A pair that is computed twice counts twice, and one that is not is gone."""
    ranks, size, length = 4, 6, (8 if zigzag else 4) * 6
    index = torch.arange(length)
    distance = index[:, None] - index
    seen = distance >= 0 if causal else distance == distance
    plan = Plan(ranks, size, zigzag, causal, 2)
    if documents:
        ids = torch.tensor([0] * 11 + [1] * 8 + [-1] * 2 + [1] * (length - 21))
        plan = with_documents(plan, ids[None])
        run = torch.tensor([0] * 11 + [1] * 8 + [2] * 2 + [3] * (length - 21))
        seen = seen & (run[:, None] == run) & (ids >= 0)
    counts = seen.expand(2, -1, -1)
    if windows is not None:
        plan = plan._replace(extents=window_extents(torch.tensor([windows] * 8), size))
        counts = counts & (distance.abs() < torch.tensor(windows)[:, None, None])
    visits = torch.zeros(2, length, length, dtype=torch.long)
    for receiver in range(ranks):
        for sender in range(ranks):
            for piece in plan.pieces(receiver, sender):
                for block in piece.blocks:
                    rows = index[block.queries * size :][block.rows]
                    columns = index[block.keys * size :][block.columns]
                    assert piece.columns.start <= block.columns.start
                    assert block.columns.stop <= piece.columns.stop
                    assert set(block.heads) <= set(piece.heads)
                    for head in block.heads:
                        block_seen = seen[rows][:, columns].long()
                        assert block.queries == block.keys or block_seen.all()
                        visits[head, rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1] += (
                            block_seen
                        )
    assert (visits <= seen.long()).all()
    assert (visits >= counts.long()).all()


def test_attention_without_ranks_names_what_is_missing():
    x = torch.randn(1, 2, 4, 8)
    with pytest.raises(RuntimeError, match="Call init_process_group first"):
        ring_attention(x, x, x)
