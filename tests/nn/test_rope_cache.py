"""`RoPE.rotate_and_cache`: the rotation of the module, and its tables, with a cache."""

import pytest
import torch

from posenc import RoPE, axes, scaling
from posenc.cache import PagedCache

AT = torch.tensor([[4, 9, 0, 33, 7]])
SLOTS = torch.tensor([[11, 0, 3, 5, 7]])


def cached(rope, q, k, v, slots=SLOTS, **where):
    caches = [torch.zeros(3, 4, x.shape[1], x.shape[3], dtype=x.dtype) for x in (k, v)]
    return rope.rotate_and_cache(q, k, v, *caches, slots, **where), *caches


def example(width=8, dtype=torch.float32):
    return [torch.randn(1, heads, 5, width, dtype=dtype) for heads in (4, 2, 2)]


@pytest.mark.parametrize(
    ("rope", "where"),
    [
        pytest.param(RoPE(8), {"offset": 7}, id="offset"),
        pytest.param(RoPE(8, max_seq_len=None), {"position_ids": AT}, id="tables-that-grow"),
        pytest.param(RoPE(8, rotary_dim=4, last=True), {"position_ids": AT}, id="partial"),
        pytest.param(RoPE(8, interleaved=False), {"offset": torch.tensor([3])}, id="half"),
        pytest.param(
            RoPE(8, scaling=scaling.DynamicNTK(2.0, original_length=4)),
            {"offset": 7, "seq_len": 30},
            id="length",
        ),
        pytest.param(RoPE(8), {"position_ids": AT / 2}, id="between-positions"),
        pytest.param(RoPE(8, axes=axes.Axial(2)), {"position_ids": AT.expand(2, 1, 5)}, id="axes"),
    ],
)
def test_queries_and_cached_keys_are_those_of_forward(rope, where):
    q, k, v = example()
    rotated, k_cache, v_cache = cached(rope, q, k, v, **where)
    wanted_q, wanted_k = rope(q, k, **where)
    assert torch.equal(rotated, wanted_q)
    for cache, wanted in ((k_cache, wanted_k), (v_cache, v)):
        assert torch.equal(cache.flatten(0, 1)[SLOTS[0]], wanted[0].transpose(0, 1))


def test_tokens_and_tokens_before_heads_are_taken_too():
    rope, (q, k, v) = RoPE(8), example()
    wanted, *caches = cached(rope, q, k, v, position_ids=AT)
    for tokens_first, strip in ((RoPE(8, seq_dim=1), False), (rope, True)):
        turned = [x.transpose(1, 2)[0] if strip else x.transpose(1, 2) for x in (q, k, v)]
        again = [torch.zeros_like(cache) for cache in caches]
        slots, at = (t[0] if strip else t for t in (SLOTS, AT))
        rotated = tokens_first.rotate_and_cache(*turned, *again, slots, position_ids=at)
        assert torch.equal(rotated, wanted.transpose(1, 2)[0] if strip else wanted.transpose(1, 2))
        assert all(map(torch.equal, caches, again))


def test_a_position_out_of_range_changes_no_cache():
    rope, (q, k, v) = RoPE(8, max_seq_len=16), example()
    caches = torch.zeros(2, 3, 4, 2, 8)
    with pytest.raises(
        ValueError, match=r"rotate_and_cache: positions must stay below max_seq_len=16"
    ):
        rope.rotate_and_cache(q, k, v, *caches, SLOTS, position_ids=AT)
    with pytest.raises(ValueError, match=r"rotate_and_cache: head_dim of q must be 8"):
        rope.rotate_and_cache(*example(6), *caches, SLOTS)
    assert not caches.any()


@pytest.mark.parametrize("where", [{}, {"offset": 3}], ids=["nothing", "offset"])
def test_tokens_need_their_positions(where):
    """They may be of several sequences, and counting on from one to the next would be wrong."""
    q, k, v = (x[0].transpose(0, 1) for x in example())
    caches = torch.zeros(2, 3, 4, 2, 8)
    with pytest.raises(ValueError, match=r"rotate_and_cache: tokens \(T, H, D\) need position_ids"):
        RoPE(8).rotate_and_cache(q, k, v, *caches, SLOTS[0], **where)
    assert not caches.any()


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=["int8", "float8"])
@pytest.mark.parametrize("scales", [False, True], ids=["no-scales", "scales"])
def test_the_scales_of_a_paged_cache_cannot_be_forgotten(dtype, scales):
    """Rows would be read back as zeros by the scales of the cache, or as integers without."""
    cache = PagedCache(3, page_size=4, num_kv_heads=2, head_dim=8, dtype=dtype, scales=scales)
    slots = cache.slot_mapping("a", cache.allocate("a", 5))[None]
    with pytest.raises(ValueError, match=r"rotate_and_cache: k_cache of 8 bits needs k_scale"):
        RoPE(8).rotate_and_cache(*example(), cache.k[0], cache.v[0], slots)
    assert not cache.k.view(torch.uint8).any()


def test_norm_and_scales_reach_the_kernel():
    rope, (q, k, v) = RoPE(8), example()
    caches, weight = torch.zeros(2, 3, 4, 2, 8).to(torch.int8), torch.rand(8)
    scales = torch.zeros(3, 4, 2)
    how = {"k_scale_cache": scales, "v_scale": torch.tensor(0.1)}
    rope.rotate_and_cache(q, k, v, *caches, SLOTS, k_weight=weight, eps=1e-5, **how)
    normed = torch.nn.functional.rms_norm(k, (8,), weight, 1e-5)
    wanted = rope.rotate(normed)[0].transpose(0, 1)
    got = (caches[0] * scales[..., None]).flatten(0, 1)[SLOTS[0]]
    # Half a step of each row, and the rounding of the norm to float32.
    step = wanted.abs().amax(-1, keepdim=True) / 127
    assert ((got - wanted).abs() <= 0.5001 * step).all()
