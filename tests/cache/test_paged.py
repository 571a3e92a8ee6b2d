import copy
import io
import pickle

import pytest
import torch
from torch.nn.attention.experimental._paged_attention import PagedAttention
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

import posenc
from posenc.cache import OutOfPages, PagedCache

FLOAT8 = torch.float8_e4m3fn


def filled(lengths, *, page=4, pages=16, heads=2, width=8, **how):
    """A cache with a sequence of each length, and random rows at every slot."""
    cache = PagedCache(pages, page_size=page, num_kv_heads=heads, head_dim=width, **how)
    cache.k.copy_(torch.randn(cache.k.shape))
    cache.v.copy_(torch.randn(cache.v.shape))
    for name, length in lengths.items():
        cache.allocate(name, length)
    return cache


def state(cache):
    """All that a call may change."""
    tensors = cache.k, cache.v, cache.k_scales, cache.v_scales
    names = cache.sequences
    tables = [table.tolist() for table in (*cache.block_table(names), *cache.flex_tables(names))]
    return names, tables, cache.free_pages, [None if x is None else x.tolist() for x in tensors]


def read(cache, x, name):
    """The rows of a sequence, ``(layers, T, heads, width)``, by its block table."""
    table, lengths = cache.block_table([name])
    x = x.transpose(2, 3) if cache.cache_layout == "HND" else x
    return x[:, table[0].long()].flatten(1, 2)[:, : lengths[0]]


def fails(k, by):
    raise RuntimeError("no shift")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        pytest.param(lambda c: c.allocate("a", 18), "5 more pages must be free", id="grow"),
        pytest.param(lambda c: c.allocate("new", 17), "got 4 free pages", id="start"),
        pytest.param(lambda c: c.allocate("a", -1), "at least 0", id="fewer-than-none"),
        pytest.param(lambda c: c.fork("a", "b"), "new sequence", id="fork-onto-another"),
        pytest.param(lambda c: c.fork("a", "a"), "new sequence", id="fork-onto-itself"),
        pytest.param(lambda c: c.fork("a", "c", 8), "at most the length 7", id="fork-too-long"),
        pytest.param(lambda c: c.truncate("a", 8), "at most the length 7", id="truncate-too-long"),
        pytest.param(lambda c: c.free("c"), "never allocated", id="free"),
        pytest.param(lambda c: c.fork("c", "d"), "one of `sequences`", id="fork"),
        pytest.param(lambda c: c.truncate("c", 0), "one of `sequences`", id="truncate"),
        pytest.param(lambda c: c.evict("c", drop=4, shift=None), "one of `sequences`", id="evict"),
        pytest.param(
            lambda c: c.slot_mapping(["a", "c"], [[0], [0]]), "one of `sequences`", id="slots"
        ),
        pytest.param(lambda c: c.block_table(["a", "c"]), "one of `sequences`", id="block-table"),
        pytest.param(lambda c: c.slot_mapping("a", [7]), r"in \[0, 7\)", id="past-the-end"),
        pytest.param(lambda c: c.slot_mapping("a", [-1]), r"in \[0, 7\)", id="before-the-start"),
        pytest.param(lambda c: c.slot_mapping("a", 3), "Pass range", id="one-position"),
        pytest.param(lambda c: c.slot_mapping("a", [0.5]), "must be a range", id="half"),
        pytest.param(lambda c: c.slot_mapping(["a", "b"], [[0]]), "1 for 2", id="one-for-two"),
        pytest.param(lambda c: c.block_table("ab"), r"Pass \['ab'\]", id="letters"),
        pytest.param(lambda c: c.flashinfer_tables("ab"), "must be a list", id="flashinfer"),
        pytest.param(lambda c: c.flex_tables("ab"), "must be a list", id="flex"),
        pytest.param(lambda c: c.block_table(["b"], width=2), "at least 3", id="narrow"),
        pytest.param(
            lambda c: c.evict("a", drop=3, shift=None),
            "multiple of page_size=4",
            id="part-of-a-page",
        ),
        pytest.param(
            lambda c: c.evict("a", drop=4, keep_first=4, shift=None), "length 7", id="too-much"
        ),
        pytest.param(lambda c: c.evict("b", drop=4, shift=fails), "no shift", id="no-shift"),
        pytest.param(
            lambda c: c.evict("b", drop=4, keep_first=1, shift=lambda k, by: k[:, :1]),
            "shift must return",
            id="wrong-shift",
        ),
    ],
)
def test_an_error_changes_nothing(call, words):
    """A server goes on after it, with the sequences that it has."""
    cache = filled({"a": 7, "b": 12}, pages=9)
    before = state(cache)

    with pytest.raises((ValueError, TypeError, RuntimeError), match=words):
        call(cache)

    assert state(cache) == before


def test_the_last_page_can_be_had_and_no_more():
    """Pages are counted exactly: out of pages means that none is left."""
    cache = PagedCache(3, page_size=4, num_kv_heads=1, head_dim=2)
    cache.allocate("a", 12)
    with pytest.raises(OutOfPages):
        cache.allocate("a", 1)
    cache.truncate("a", 8)
    assert cache.allocate("b", 4) == range(4)
    assert cache.free_pages == 0


def test_only_the_first_to_write_copies_a_shared_page():
    """The other is alone with the page then."""
    cache = filled({"a": 6}, pages=8)
    cache.fork("a", "b")
    assert cache.free_pages == 6
    cache.allocate("b", 1)
    assert cache.free_pages == 5
    cache.allocate("a", 1)
    assert cache.free_pages == 5


def test_nothing_is_copied_where_nothing_is_written():
    """Full pages stay shared, and so do all if a call adds no token."""
    cache = filled({"a": 8, "b": 6}, pages=8)
    cache.fork("a", "c")
    cache.fork("b", "d")
    cache.allocate("d", 0)
    assert cache.free_pages == 4
    cache.allocate("c", 1)
    assert cache.free_pages == 3


def test_eviction_without_a_shift_moves_no_memory():
    """Whole pages are dropped from the list of one sequence; a fork keeps them."""
    cache = filled({"a": 15})
    cache.fork("a", "b")
    memory, free = cache.k.clone(), cache.free_pages
    wanted = read(cache, cache.k, "b")[:, [0, 1, 2, 3, *range(12, 15)]]

    cache.evict("a", drop=8, keep_first=4, shift=None)

    assert torch.equal(cache.k, memory)
    assert cache.free_pages == free
    assert torch.equal(read(cache, cache.k, "a"), wanted)


@pytest.mark.parametrize("seq_dim", [-2, 1])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("keep_first", [0, 3, 4, 9])
def test_evicted_keys_are_those_of_the_new_positions(keep_first, layout, seq_dim):
    """In every layer; two roundings of a number below 8 in float32, and values not at all."""
    rope = posenc.RoPE(8, None, interleaved=False, seq_dim=seq_dim)
    cache = filled({"other": 5, "a": 19}, layers=2, cache_layout=layout)
    keys = read(cache, cache.k, "a").double()
    at = posenc.RoPE(8, None, interleaved=False)
    slots = cache.slot_mapping("a", range(19))
    view = cache.k if layout == "NHD" else cache.k.transpose(2, 3)
    view[:, slots // 4, slots % 4] = at.rotate(keys.transpose(1, 2)).transpose(1, 2).float()
    other, values = read(cache, cache.k, "other"), read(cache, cache.v, "a")
    kept = [*range(keep_first), *range(keep_first + 8, 19)]

    cache.evict("a", drop=8, keep_first=keep_first, shift=rope.shift)

    wanted = at.rotate(keys[:, kept].transpose(1, 2)).transpose(1, 2)
    off = (read(cache, cache.k, "a") - wanted).abs().max()
    assert wanted.abs().max() < 8
    assert off <= 2 * 4 * torch.finfo(torch.float32).eps
    assert torch.equal(read(cache, cache.v, "a"), values[:, kept])
    assert torch.equal(read(cache, cache.k, "other"), other)


@pytest.mark.parametrize(
    ("dtype", "step"),
    [
        # Half a step at the largest number of a row, in units of it.
        pytest.param(FLOAT8, 2**-4, id="e4m3"),
        pytest.param(torch.float8_e5m2, 2**-3, id="e5m2"),
        pytest.param(torch.int8, 0.5 / 127, id="int8"),
    ],
)
def test_evicted_keys_of_8_bits_get_new_scales(dtype, step):
    """A rotation moves weight between channels: by the old scale a row could overflow."""
    rope = posenc.RoPE(8, None)
    cache = filled({"a": 11}, dtype=dtype, scales=True, layers=2)
    q, k, v = torch.randn(3, 2, 11, 2, 8)
    slots = cache.slot_mapping("a", range(11))
    for layer in range(2):
        how = {"k_scale_cache": cache.k_scales[layer], "v_scale_cache": cache.v_scales[layer]}
        cos, sin = rope.tables(torch.arange(11))
        rows = q[layer], k[layer], v[layer], cos, sin, cache.k[layer], cache.v[layer]
        posenc.functional.rotate_and_cache(*rows, slots, **how)
    kept = [0, 1, *range(6, 11)]
    old = [read(cache, x, "a")[:, kept] for x in (cache.v.float(), cache.v_scales[..., None])]

    cache.evict("a", drop=4, keep_first=2, shift=rope.shift)

    got = read(cache, cache.k.float(), "a") * read(cache, cache.k_scales[..., None], "a")
    exact = rope.rotate(k[:, kept].double().transpose(1, 2)).transpose(1, 2)
    # Of the pair, whose rounding the shift turns; and of what is stored then.
    largest = k[:, kept].double().unflatten(-1, (4, 2)).norm(dim=-1).amax(-1, keepdim=True)
    assert ((got - exact).abs() <= (1 + 2**0.5) * step * largest * (1 + 2**-20)).all()
    new = [read(cache, x, "a") for x in (cache.v.float(), cache.v_scales[..., None])]
    assert all(map(torch.equal, new, old))


def test_a_copied_page_has_its_scales():
    """Else a fork would read its rows by the scales of another."""
    cache = filled({"a": 6}, dtype=FLOAT8, scales=True)
    cache.k_scales.copy_(torch.rand(cache.k_scales.shape))
    cache.v_scales.copy_(torch.rand(cache.v_scales.shape))
    cache.fork("a", "b")
    cache.allocate("b", 1)

    for x in (cache.k.float(), cache.v.float(), cache.k_scales, cache.v_scales):
        assert torch.equal(read(cache, x, "a"), read(cache, x, "b")[:, :6])


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_slots_are_those_of_rotate_and_cache(layout):
    """Tokens of two sequences in one call; each reads its own, in order."""
    cache = filled({"a": 5, "b": 2, "c": 3}, cache_layout=layout)
    new = [cache.allocate("c", 4), cache.allocate("a", 1)]
    q, k, v = torch.randn(3, 5, 2, 8)
    turn = torch.zeros(1, 4), torch.ones(1, 4)  # a quarter turn at any position
    slots = cache.slot_mapping(["c", "a"], new)

    rows = q, k, v, *turn, cache.k[0], cache.v[0], slots
    how = {"position_ids": torch.zeros(5, dtype=torch.int64), "cache_layout": layout}
    posenc.functional.rotate_and_cache(*rows, **how)

    turned = torch.stack((-k[..., 1::2], k[..., ::2]), -1).flatten(-2)
    for x, wanted in ((cache.k, turned), (cache.v, v)):
        assert torch.equal(read(cache, x, "c")[0, 3:], wanted[:4])
        assert torch.equal(read(cache, x, "a")[0, 5:], wanted[4:])


def test_positions_may_be_ints_ranges_and_tensors():
    """In any order, more than once."""
    cache = filled({"x": 5, "a": 7})
    assert cache.slot_mapping("a", [6, 0, 0]).tolist() == [14, 8, 8]
    assert cache.slot_mapping("a", torch.tensor([6, 0])).tolist() == [14, 8]
    assert cache.slot_mapping(["a", "x"], [range(3, 5), []]).tolist() == [11, 12]
    assert cache.slot_mapping([], []).shape == (0,)


def test_tables_of_no_sequence_and_of_empty_ones():
    """A batch may be empty, and a sequence may have no token yet."""
    cache = filled({"a": 0, "b": 8})
    assert [x.shape for x in cache.block_table([])] == [(0, 0), (0,)]
    assert [x.tolist() for x in cache.block_table(["a", "b"], width=3)] == [
        [[0, 0, 0], [0, 1, 0]],
        [0, 8],
    ]
    assert [x.tolist() for x in cache.flashinfer_tables(["a", "b"])] == [[0, 0, 2], [0, 1], [0, 4]]
    assert [x.shape for x in cache.flex_tables([])] == [(0, 16), (0, 16)]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_reads_the_pages():
    """By torch's own PagedAttention, whose tables are replaced; one sequence is a fork."""
    cache = filled({"a": 20, "b": 33}, page=16, pages=8)
    cache.fork("a", "c")
    cache.allocate("c", 3)
    names, lengths = ["b", "c"], [33, 23]
    q = torch.randn(2, 4, 1, 8)
    paged = PagedAttention(8, 16, 2, device="cpu")
    paged.page_table, paged.physical_to_logical = cache.flex_tables(names)
    ends = torch.tensor(lengths)

    def seen(b, h, query, key):
        return key < ends[b]

    mask = create_block_mask(seen, 2, None, 1, 48, device="cpu", BLOCK_SIZE=(16, 16))
    mask = paged.convert_logical_block_mask(mask)
    k, v = (x[0].flatten(0, 1).transpose(0, 1).unsqueeze(0) for x in (cache.k, cache.v))
    got = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)

    for row, name in enumerate(names):
        keys, values = (read(cache, x, name).transpose(1, 2) for x in (cache.k, cache.v))
        wanted = scaled_dot_product_attention(q[row : row + 1], keys, values, enable_gqa=True)
        torch.testing.assert_close(got[row : row + 1], wanted, rtol=0, atol=1e-6)


def test_key_and_value_side_by_side():
    """As kernels for latent attention read them: the latent, then the rotary part."""
    cache = PagedCache(4, page_size=2, num_kv_heads=1, head_dim=4, v_head_dim=8, joined=True)
    cache.k.fill_(1)
    cache.v.fill_(2)
    assert cache.kv.shape == (1, 4, 2, 1, 12)
    assert cache.kv.flatten(0, -2).unique(dim=0).tolist() == [[2.0] * 8 + [1.0] * 4]


def saved(cache):
    buffer = io.BytesIO()
    torch.save(cache, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("joined", [False, True], ids=["apart", "joined"])
@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache)), saved],
    ids=["deepcopy", "pickle", "save"],
)
def test_a_copy_is_a_cache_of_its_own(copied, joined):
    """With the same sequences and rows; attention over kv reads what is written to k and v."""
    cache = filled({"a": 7, "b": 3}, joined=joined)
    before = state(cache)

    other = copied(cache)

    assert state(other) == before
    other.free("a")
    other.k.fill_(7)
    other.v.fill_(8)
    if joined:
        assert other.kv.unique().tolist() == [7, 8]
    assert state(cache) == before


def test_sequences_are_listed_and_reset_forgets_them():
    """A server that starts again must not have kept the names itself."""
    cache = filled({"a": 7, ("b", 1): 3}, pages=9)
    assert cache.sequences == ["a", ("b", 1)]
    cache.free("a")
    assert cache.sequences == [("b", 1)]

    cache.reset()

    assert cache.sequences == []
    assert cache.free_pages == 9
    assert cache.allocate(("b", 1), 36) == range(36)


def test_eviction_from_an_inference_tensor_is_refused_before_anything_is_written():
    """Torch would refuse the first write, when the sequence is given up already."""
    with torch.inference_mode():
        cache = filled({"a": 7})
    with pytest.raises(ValueError, match=r"PagedCache.evict: an inference tensor"):
        cache.evict("a", drop=4, shift=lambda k, by: k)
    assert cache.length("a") == 7


def test_eviction_that_fails_between_layers_frees_the_sequence():
    """Some of its keys are moved and others are not: nobody may read them."""
    cache = filled({"a": 7, "b": 3}, layers=2)
    other, calls = read(cache, cache.k, "b"), []

    def fails_later(k, by):
        calls.append(by)
        return k if len(calls) == 1 else fails(k, by)

    with pytest.raises(RuntimeError, match="no shift"):
        cache.evict("a", drop=4, shift=fails_later)

    assert cache.sequences == ["b"]
    assert cache.free_pages == 15
    assert torch.equal(read(cache, cache.k, "b"), other)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"num_pages": 0}, "num_pages must be at least 1"),
        ({"dtype": torch.int32}, "dtype must be that of a model"),
        ({"scales": True}, "scales need a dtype of 8 bits"),
        ({"cache_layout": "BHLD"}, "NHD"),
    ],
)
def test_arguments_of_the_constructor(how, words):
    with pytest.raises((ValueError, TypeError), match=words):
        PagedCache(**{"num_pages": 2, "page_size": 2, "num_kv_heads": 1, "head_dim": 2, **how})
