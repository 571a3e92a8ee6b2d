import itertools

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


def thd_positions(lengths, rank, world):
    """TransformerEngine's rule of ``thd``, token by token: halves of each sequence's share."""
    found = []
    for length in lengths:
        half = length // world // 2
        for token in range(2 * half):
            first = rank if token < half else 2 * (world - 1) - rank
            found.append(token + half * first)
    return found


@pytest.mark.parametrize("lengths", [[8, 24, 16], [0, 8, 0, 0, 8], [32], [0], []], ids=str)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_packed_sequences_are_each_cut_by_themselves(world, lengths):
    """As TransformerEngine cuts them, and so that all ranks together hold every token."""
    cu, total = torch.tensor([0, *lengths]).cumsum(0), sum(lengths)
    of_ranks = {}
    for zigzag in (False, True):
        how = {"zigzag": zigzag, "cu_seqlens": cu.int()}
        shards = [positions.context_parallel(total, r, world, **how).tolist() for r in range(world)]
        of_ranks[zigzag] = shards
        together = sorted(itertools.chain.from_iterable(shards))
        assert together == sorted(p for n in lengths for p in range(n))
    assert of_ranks[True] == [thd_positions(lengths, rank, world) for rank in range(world)]
    runs = [[range(r * n // world, (r + 1) * n // world) for n in lengths] for r in range(world)]
    assert of_ranks[False] == [[p for run in each for p in run] for each in runs]


def test_one_packed_sequence_is_cut_as_one_sequence():
    for rank, zigzag in itertools.product(range(3), (False, True)):
        alone = positions.context_parallel(24, rank, 3, zigzag=zigzag)
        cu = torch.tensor([0, 24])
        packed = positions.context_parallel(24, rank, 3, zigzag=zigzag, cu_seqlens=cu)
        assert torch.equal(packed, alone)


@pytest.mark.parametrize("zigzag", [False, True], ids=["contiguous", "zigzag"])
def test_one_rank_holds_any_sequence_in_order(zigzag):
    """There is nothing to cut, so nothing to pad."""
    assert positions.context_parallel(7, 0, 1, zigzag=zigzag).tolist() == list(range(7))
    cu = torch.tensor([0, 3, 3, 8])
    packed = positions.context_parallel(8, 0, 1, zigzag=zigzag, cu_seqlens=cu)
    assert torch.equal(packed, positions.from_cu_seqlens(cu))


@COMPILERS
def test_packed_sequences_are_cut_inside_a_compiled_function(backend):
    """Lengths are not read, so one graph serves all; those that do not fit are refused."""

    def cut(cu):
        return positions.context_parallel(16, 1, 2, zigzag=True, cu_seqlens=cu)

    compiled = torch.compile(cut, fullgraph=True, dynamic=True, backend=backend)
    for cu in ([0, 4, 16], [0, 8, 12, 16]):
        assert torch.equal(compiled(torch.tensor(cu)), cut(torch.tensor(cu)))
    for cu in ([0, 3, 16], [4, 8, 16], [0, 8, 4, 16], [0, 4, 12]):
        with pytest.raises(RuntimeError, match="from 0 to length=16 by multiples of 4"):
            compiled(torch.tensor(cu))
        with pytest.raises(ValueError, match="from 0 to length=16 by multiples of 4"):
            cut(torch.tensor(cu))


_TEXT = {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "intermediate_size": 16,
    "vocab_size": 200,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
}
_TOWER = {"depth": 1, "num_heads": 2, "intermediate_size": 16}
_TOWERS = {
    "Qwen2VL": {**_TOWER, "embed_dim": 16, "hidden_size": 16},
    "Qwen2_5_VL": {**_TOWER, "hidden_size": 16, "out_hidden_size": 16, "tokens_per_second": 25},
    "Qwen3VL": {
        **_TOWER,
        "hidden_size": 16,
        "out_hidden_size": 16,
        "deepstack_visual_indexes": [],
        "num_position_embeddings": 16,
    },
}


def positions_of_transformers(name, spans, grids=None):
    """Positions of texts, images and videos, (frames, rows, columns, seconds), by a model.

    ``grids`` are those of the videos, if they are not those of the spans.
    """
    import transformers

    config = getattr(transformers, f"{name}Config")(text_config=_TEXT, vision_config=_TOWERS[name])
    model = getattr(transformers, f"{name}Model")(config)
    kinds, images, videos, seconds = [], [], [], []
    for span in spans:
        if isinstance(span, int):
            kinds += [0] * span
            continue
        frames, rows, columns, *apart = span
        kinds += [2 if apart else 1] * (frames * rows * columns)
        # A model is told the patches before it merges them 2 by 2.
        (videos if apart else images).append([frames, 2 * rows, 2 * columns])
        seconds += apart
    at, delta = model.get_rope_index(
        torch.zeros(1, len(kinds), dtype=torch.int64),
        mm_token_type_ids=torch.tensor([kinds], dtype=torch.int32),
        image_grid_thw=torch.tensor(images) if images else None,
        video_grid_thw=torch.tensor(grids or videos) if videos else None,
        attention_mask=torch.ones(1, len(kinds), dtype=torch.int64),
        **({"second_per_grid_ts": seconds} if name == "Qwen2_5_VL" else {}),
    )
    # A reply continues at the largest position plus one, whatever the last token has.
    assert int(at.max()) + 1 == len(kinds) + int(delta)
    return at[:, 0]


def without_seconds(spans):
    return [span if isinstance(span, int) else span[:3] for span in spans]


_MIXED = {
    "no-patches": [5],
    "image": [3, (1, 2, 3), 2],
    "patches-first": [(1, 3, 2), 1, (2, 2, 2, 1.0), 4],
    "more-frames-than-rows": [1, (7, 2, 3, 1.0), 3],
    "several": [2, (1, 4, 2), 1, (9, 3, 2, 1.0), 2, (5, 1, 1, 0.5), 1, (1, 1, 1), 2],
    # 25 tokens a second: frames at 2/3 s are 16.67 tokens apart, others less than one.
    "between-whole-times": [1, (8, 2, 2, 2 / 3), 2, (50, 1, 1, 0.013), 1, (4, 5, 5, 1 / 30), 1],
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("spans", _MIXED.values(), ids=_MIXED)
def test_mrope_agrees_with_qwen2_vl(spans):
    expected = positions_of_transformers("Qwen2VL", spans)
    assert torch.equal(positions.mrope(without_seconds(spans), after="space"), expected)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("spans", _MIXED.values(), ids=_MIXED)
def test_mrope_agrees_with_qwen2_5_vl(spans):
    """Its frames are at the tokens of their time, 25 a second, rounded down."""
    stepped = [
        (*span[:3], 25 * span[3]) if isinstance(span, tuple) and len(span) == 4 else span
        for span in spans
    ]
    expected = positions_of_transformers("Qwen2_5_VL", spans)
    assert torch.equal(positions.mrope(stepped, after="space"), expected)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("after", ["largest", "space"])
def test_mrope_agrees_with_qwen3_vl(after):
    """Each frame of a video is a span of its own, after the text of its time."""
    spans = [3, (1, 3, 4), 2, *[(1, 2, 3, 1.0), 4] * 5, *[(1, 5, 1, 1.0), 3] * 2]
    expected = positions_of_transformers("Qwen3VL", spans, [[5, 4, 6], [2, 10, 2]])
    assert torch.equal(positions.mrope(without_seconds(spans), after=after), expected)


def test_positions_continue_after_the_largest_coordinate():
    """The paper's rule, which vLLM follows: what comes next begins past every time, row, column."""
    spans, expected, first = [1, (7, 2, 3, 1.25), 2, (2, 5, 1), (3, 2, 2, 4.0), 1], [], 0
    for span in spans:
        if isinstance(span, int):
            span_at = [[first + i] * 3 for i in range(span)]
        else:
            frames, rows, columns, step = (*span, 1.0)[:4]
            cells = itertools.product(range(frames), range(rows), range(columns))
            span_at = [[first + int(t * step), first + h, first + w] for t, h, w in cells]
        expected += span_at
        first = 1 + max(max(token) for token in span_at)
    assert positions.mrope(spans).T.tolist() == expected


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
        (lambda: positions.mrope([(2, 2, 2, 0.0)]), ValueError, "step must be finite and above"),
        (lambda: positions.mrope([(9, 2, 2, 1e9)]), ValueError, r"at most 2\*\*31, got 8e"),
        (lambda: positions.mrope([3], after="time"), ValueError, "'largest' or 'space'"),
    ],
)
def test_bad_input_is_refused(call, error, text):
    with pytest.raises(error, match=text):
        call()
