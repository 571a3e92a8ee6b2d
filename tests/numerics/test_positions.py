import pytest
import torch

from posenc import positions
from support.assertions import COMPILERS


def test_offsets_count_on():
    assert positions.from_offset(3, 7).tolist() == [7, 8, 9]
    offsets = torch.tensor([2, 0], dtype=torch.int32)
    assert positions.from_offset(2, offsets).tolist() == [[2, 3], [0, 1]]
    assert positions.from_offset(0).shape == (0,)


@pytest.mark.parametrize("lengths", [[3, 1, 4], [0, 2, 0, 0, 3], [5], [0]])
def test_packed_sequences_each_count_from_zero(lengths):
    cu = torch.tensor([0, *lengths]).cumsum(0)
    expected = [p for length in lengths for p in range(length)]
    assert positions.from_cu_seqlens(cu).tolist() == expected
    assert positions.from_cu_seqlens(cu.int(), sum(lengths)).tolist() == expected


@pytest.mark.parametrize(
    ("cu", "expected"),
    [
        ([0, 3, 5], [0, 1, 2, 0, 1, 2, 3, 4]),
        ([0, 8], [0, 1, 2, 3, 4, 5, 6, 7]),
        ([0, 5, 5], [0, 1, 2, 3, 4, 0, 1, 2]),
        ([0], [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
    ids=str,
)
def test_tokens_past_the_last_end_count_on(cu, expected):
    """The room at the end of a buffer is no sequence of its own."""
    assert positions.from_cu_seqlens(torch.tensor(cu), total=8).tolist() == expected


@COMPILERS
def test_packed_positions_are_computed_inside_a_compiled_function(backend):
    """With ``total`` nothing has to be read; what does not fit is refused when the program runs."""
    how = {"fullgraph": True, "dynamic": True, "backend": backend}
    compiled = torch.compile(positions.from_cu_seqlens, **how)
    for cu, total in (([0, 3, 5], 5), ([0, 2, 2, 7], 9)):
        wanted = positions.from_cu_seqlens(torch.tensor(cu), total=total)
        assert torch.equal(compiled(torch.tensor(cu), total=total), wanted)
    for cu in ([1, 3, 5], [0, 3, 2], [0, 3, 6]):
        with pytest.raises(RuntimeError, match="cu_seqlens must begin with 0, never decrease"):
            compiled(torch.tensor(cu), total=5)


def test_left_padding_counts_from_the_first_real_token():
    mask = torch.tensor([[0, 1, 1], [0, 0, 0], [1, 1, 1]])
    expected = [[0, 0, 1], [0, 0, 0], [0, 1, 2]]
    assert positions.from_left_padding(mask).tolist() == expected
    assert positions.from_left_padding(mask.bool()).tolist() == expected


def test_a_grid_is_read_row_by_row():
    at = positions.grid(2, 2, 3)
    assert at.shape == (3, 12)
    expected = [[t, h, w] for t in range(2) for h in range(2) for w in range(3)]
    assert at.T.tolist() == expected


@pytest.mark.parametrize("zigzag", [False, True], ids=["contiguous", "zigzag"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_shards_are_the_sequence(world, zigzag):
    shards = [positions.context_parallel(16, r, world, zigzag=zigzag) for r in range(world)]
    assert torch.cat(shards).sort().values.tolist() == list(range(16))
    if zigzag:
        # The work of causal attention, the sum of positions, is the same for all.
        assert len({int(shard.sum()) for shard in shards}) == 1


@pytest.mark.filterwarnings("ignore")
def test_mrope_agrees_with_qwen2_vl():
    """Text, an image of 1 x 4 x 4 patches merged 2 by 2, text, a video of 2 x 4 x 2 merged."""
    from transformers import Qwen2VLConfig
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel

    text = {
        "hidden_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "intermediate_size": 16,
        "vocab_size": 200,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
    }
    vision = {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 16}
    special = {"image_token_id": 100, "video_token_id": 101, "vision_start_token_id": 102}
    model = Qwen2VLModel(Qwen2VLConfig(text_config=text, vision_config=vision, **special))
    ids = [1, 2, 102, *[100] * 4, 3, 102, *[101] * 4, 4, 5]
    kinds = [{100: 1, 101: 2}.get(token, 0) for token in ids]
    at, _ = model.get_rope_index(
        torch.tensor([ids]),
        mm_token_type_ids=torch.tensor([kinds], dtype=torch.int32),
        image_grid_thw=torch.tensor([[1, 4, 4]]),
        video_grid_thw=torch.tensor([[2, 4, 2]]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
    )
    ours = positions.mrope([3, (1, 2, 2), 2, (2, 2, 1), 2])
    assert torch.equal(at[:, 0], ours)


def test_no_patches_take_no_positions():
    assert torch.equal(positions.mrope([2, (0, 2, 2), 1]), positions.mrope([3]))


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: positions.from_offset(-1), ValueError, "length must be at least 0"),
        (lambda: positions.from_offset(3, 1.5), TypeError, "offset must be an int"),
        (lambda: positions.from_cu_seqlens([0, 3]), TypeError, "cu_seqlens must be an integer"),
        (lambda: positions.from_cu_seqlens(torch.tensor([1, 3])), ValueError, "begin with 0"),
        (lambda: positions.from_cu_seqlens(torch.tensor([0, 3, 2])), ValueError, "never decrease"),
        (lambda: positions.from_cu_seqlens(torch.tensor([0, 3]), 2), ValueError, "total or before"),
        (lambda: positions.from_cu_seqlens(torch.tensor([]).long(), 2), ValueError, "begin with 0"),
        (lambda: positions.from_left_padding(torch.ones(2, 2)), TypeError, "mask must be a bool"),
        (lambda: positions.from_left_padding(torch.ones(2).long()), ValueError, "shape"),
        (lambda: positions.grid(), ValueError, "one or more"),
        (lambda: positions.context_parallel(8, 2, 2), ValueError, "rank must be below"),
        (lambda: positions.context_parallel(9, 0, 2), ValueError, "multiple of 2"),
        (lambda: positions.mrope([(1, 2)]), ValueError, "frames, rows, columns"),
    ],
)
def test_bad_input_is_refused(call, error, text):
    with pytest.raises(error, match=text):
        call()
