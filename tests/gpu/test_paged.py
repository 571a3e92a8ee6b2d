import pytest
import torch

from posenc.cache import PagedCache


def used(device, **how):
    """What a cache holds, and its tables, after the same calls on any device."""
    cache = PagedCache(12, page_size=4, num_kv_heads=2, head_dim=8, layers=2, device=device, **how)
    generator = torch.Generator().manual_seed(0)
    for x in (cache.k, cache.v, cache.k_scales, cache.v_scales):
        if x is not None:
            x.copy_(torch.rand(x.shape, generator=generator))
    cache.allocate("a", 14)
    cache.fork("a", "b")
    cache.allocate("b", 3)
    # The sign is exact in every dtype.
    cache.evict("a", drop=4, keep_first=3, shift=lambda k, by: -k)
    cache.allocate("a", 2)
    cache.fork("b", "c", 5)
    cache.free("b")
    names = ["c", "a"]
    tables = *cache.block_table(names), *cache.flashinfer_tables(names), *cache.flex_tables(names)
    slots = cache.slot_mapping(names, [range(5), range(12)])
    tensors = cache.k.float(), cache.v.float(), cache.k_scales, cache.v_scales
    return [x for x in (*tables, slots, *tensors) if x is not None]


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"dtype": torch.bfloat16}, id="bf16"),
        pytest.param({"dtype": torch.float8_e4m3fn, "cache_layout": "HND"}, id="fp8"),
        pytest.param({"dtype": torch.bfloat16, "joined": True}, id="joined"),
    ],
)
def test_pages_on_a_gpu_are_those_on_the_cpu(how):
    """Copies and shifts index memory, which is where devices differ."""
    wanted = used("cpu", **how)

    got = used("cuda", **how)

    assert all(x.is_cuda for x in got)
    assert all(map(torch.equal, (x.cpu() for x in got), wanted))
