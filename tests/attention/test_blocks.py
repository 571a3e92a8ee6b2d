import itertools

import pytest
import torch

from posenc.attention import alibi_block_mask
from posenc.functional import alibi_bias, alibi_slopes

HEADS = 4


def listed(counts, indices, columns):
    """How often each block is in the lists, ``[B, H, rows, columns]``."""
    found = torch.zeros(*counts.shape, columns, dtype=torch.int)
    for place in itertools.product(*map(range, counts.shape)):
        for column in indices[place][: counts[place]].tolist():
            found[(*place, column)] += 1
    return found


def tiles(x, block, outside):
    """``[..., Q, K]`` cut into blocks ``[..., rows, columns, block * block]``."""
    pad = (0, -x.shape[-1] % block, 0, -x.shape[-2] % block)
    x = torch.nn.functional.pad(x.int(), pad, value=outside).bool()
    x = x.unflatten(-1, (-1, block)).unflatten(-3, (-1, block)).transpose(-3, -2)
    return x.flatten(-2)


@pytest.mark.parametrize("bound", [0.5, 4.0, float("inf")])
@pytest.mark.parametrize("place", ["aligned", "documents", "offsets"])
@pytest.mark.parametrize(("queries", "keys"), [(96, 96), (70, 70), (3, 90), (30, 100)], ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "symmetric"])
def test_the_lists_hold_what_is_needed_once_and_mask_what_must_be(
    causal, queries, keys, place, bound
):
    """Against the matrix, which the mask itself never makes."""
    block, slopes, options = 16, alibi_slopes(HEADS, bias_max=3.0), {}
    if place == "documents":
        options["document_ids"] = torch.stack(
            [torch.rand(keys).lt(0.05).cumsum(0), torch.arange(keys) // 40]
        )
    if place == "offsets":
        options["query_offset"] = torch.tensor([0, (keys - queries) // 2])

    mask = alibi_block_mask(
        slopes, queries, keys, score_bound=bound, dtype=torch.bfloat16, causal=causal,
        block=block, **options,
    )  # fmt: skip

    bias = alibi_bias(slopes, queries, keys, causal=causal, dtype=torch.float64, **options)
    bias = bias if bias.dim() == 4 else bias[None]
    seen = bias > float("-inf")
    # A weight of this much or more of the own key's, with scores as unlike as the bound allows.
    counted = (2 * bound + bias).exp() > torch.finfo(torch.bfloat16).eps
    rows, columns = -(-queries // block), -(-keys // block)
    partial = listed(mask.kv_num_blocks, mask.kv_indices, columns)
    full = listed(mask.full_kv_num_blocks, mask.full_kv_indices, columns)
    visited = partial + full
    assert visited.max() == 1
    assert visited.bool()[tiles(seen & counted, block, 0).any(-1)].all()
    # Queries past the last do not count, keys past the last do.
    unseen = torch.nn.functional.pad(~seen, (0, 0, 0, -queries % block), value=False)
    assert not full[tiles(unseen, block, 1).any(-1)].any()
    back = listed(mask.q_num_blocks, mask.q_indices, rows).mT
    full_back = listed(mask.full_q_num_blocks, mask.full_q_indices, rows).mT
    assert torch.equal(back, partial)
    assert torch.equal(full_back, full)


def test_windows_leave_blocks_out():
    slopes = alibi_slopes(8)
    counts = [
        int(alibi_block_mask(slopes, 4096, score_bound=s, dtype=torch.bfloat16).to_dense().sum())
        for s in (1.0, 8.0, float("inf"))
    ]
    assert counts[0] < counts[1] < counts[2] == 8 * 32 * 33 // 2


def test_a_causal_mask_has_one_list_for_all_heads():
    """So its size is that of the counts, heads times blocks, not heads times blocks squared."""
    mask = alibi_block_mask(alibi_slopes(32), 65536, score_bound=8.0, dtype=torch.bfloat16)
    lists = [mask.kv_indices, mask.full_kv_indices, mask.q_indices, mask.full_q_indices]
    assert [x.shape for x in lists] == [(1, 32, 512, 512)] * 4
    assert all(x.untyped_storage().nbytes() == 4 * 512 * 512 for x in lists)
    assert mask.kv_num_blocks.is_contiguous()


def test_a_stride_of_heads_is_that_of_the_lists_also_with_one_head():
    """The kernels step over sequences by it."""
    documents = torch.stack([torch.arange(64) // 20, torch.arange(64) // 30])
    mask = alibi_block_mask(
        alibi_slopes(1), 64, score_bound=1.0, dtype=torch.bfloat16, document_ids=documents, block=16
    )
    assert mask.kv_num_blocks.stride() == (4, 4, 1)
    assert mask.kv_indices.stride() == (16, 16, 4, 1)


def test_bad_arguments_are_named():
    slopes = alibi_slopes(2)
    options = {"dtype": torch.bfloat16}
    for bound in (-1.0, float("nan"), torch.tensor([1.0, -1.0])):
        with pytest.raises(ValueError, match="score_bound must not be negative or NaN"):
            alibi_block_mask(slopes, 4, score_bound=bound, **options)
    with pytest.raises(TypeError, match="score_bound must be a number or a tensor"):
        alibi_block_mask(slopes, 4, score_bound="8", **options)
    with pytest.raises(ValueError, match="k_len must be at least q_len=4, got 3"):
        alibi_block_mask(slopes, 4, 3, score_bound=1.0, **options)
    with pytest.raises(ValueError, match="q_len must be at least 1"):
        alibi_block_mask(slopes, 0, score_bound=1.0, **options)
    with pytest.raises(TypeError, match="dtype must be one of"):
        alibi_block_mask(slopes, 4, score_bound=1.0, dtype=torch.int8)
