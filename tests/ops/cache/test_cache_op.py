"""The op of `rotate_and_cache`: what it writes, what it refuses, and how it compiles."""

import pytest
import torch

from oracles import tables
from posenc.functional import rotate_and_cache
from support.assertions import compilations

GPU = "cuda" if torch.cuda.is_available() else "cpu"
OP = torch.ops.posenc.rotate_and_cache.default
SLOTS = torch.tensor([[11, 0, -1, 5, 7], [1, 2, 3, -1, 4]])


def call(op=OP, device=GPU, **changes):
    """Call the op: 2 sequences of 5 tokens, caches of 3 pages of 4."""
    cos, sin = tables(9, 3, device)
    q, k, v = (torch.randn(2, heads, 5, 8, device=device).bfloat16() for heads in (4, 2, 2))
    arguments = {
        "q": q,
        "k": k,
        "v": v,
        "k_cache": torch.zeros(3, 4, 2, 8, device=device).to(torch.int8).transpose(1, 2),
        "v_cache": torch.zeros(3, 2, 4, 8, device=device).bfloat16(),
        "k_scales": torch.zeros(3, 2, 4, device=device),
        "v_scales": None,
        "slots": SLOTS.to(device),
        "q_weight": torch.ones(8, device=device),
        "k_weight": torch.ones(16, device=device),
        "k_scale": None,
        "v_scale": None,
        "cos": cos,
        "sin": sin,
        "positions": torch.tensor([[3], [1]], device=device),
        "start": 0,
        "layout": 5,
        "eps": 1e-6,
        "shift": 1.0,
    }
    assert set(changes) <= set(arguments)
    return op(*{**arguments, **changes}.values())


@pytest.mark.parametrize("given", [False, True], ids=["scales-worked-out", "scale-given"])
def test_the_op_passes_opcheck(given):
    """The schema names the caches, and the scales that are worked out, as what it writes."""

    def check(*arguments):
        torch.library.opcheck(OP, arguments)

    scale = torch.full((2, 2, 1), 0.5, device=GPU).expand(2, 2, 5)
    call(check, **({"k_scale": scale, "k_scales": None} if given else {}))


def test_the_op_increments_the_version_of_what_it_writes():
    cache = torch.zeros(3, 2, 4, 8, device=GPU).bfloat16()
    before = cache._version
    call(v_cache=cache)
    assert cache._version > before


X, CACHE, ONES = (2, 2, 5, 8), (3, 2, 4, 8), torch.ones(2, 2, 5)
HOSTILE = {
    "k-of-another-dtype": {"k": torch.ones(X)},
    "v-of-another-dtype": {"v": torch.ones(X)},
    "v-of-fewer-tokens": {"v": torch.ones(2, 2, 4, 8).bfloat16()},
    "v-of-fewer-sequences": {"v": torch.ones(1, 2, 5, 8).bfloat16()},
    "v-of-three-axes": {"v": torch.ones(2, 2, 5).bfloat16()},
    "v-elsewhere": {"v": torch.ones(X, device="meta").bfloat16()},
    "slots-of-fewer-tokens": {"slots": SLOTS[:, :4]},
    "slots-of-one-axis": {"slots": SLOTS[0]},
    "slots-of-16-bits": {"slots": SLOTS.short()},
    "slots-elsewhere": {"slots": SLOTS.to("meta")},
    "slot-past-the-caches": {"slots": SLOTS + 1},
    "slot-below-minus-one": {"slots": SLOTS - 1},
    "slot-that-wraps": {"slots": SLOTS + (2**63 - 12)},
    "positions-past-the-table": {"positions": torch.tensor([[3], [5]])},
    "weight-of-another-width": {"q_weight": torch.ones(16)},
    "weight-of-two-axes": {"q_weight": torch.ones(1, 8)},
    "cache-of-other-heads": {"v_cache": torch.ones(3, 1, 4, 8).bfloat16()},
    "cache-of-another-width": {"v_cache": torch.ones(3, 2, 4, 6).bfloat16()},
    "cache-of-another-dtype": {"v_cache": torch.ones(CACHE)},
    "cache-of-three-axes": {"v_cache": torch.ones(3, 8, 8).bfloat16()},
    "cache-strided-by-channel": {"v_cache": torch.ones(3, 2, 8, 4).bfloat16().mT},
    "cache-expanded": {"v_cache": torch.ones(1, 2, 4, 8).bfloat16().expand(CACHE)},
    "caches-of-other-lengths": {"v_cache": torch.ones(2, 2, 4, 8).bfloat16()},
    "scales-of-another-shape": {"k_scales": torch.ones(3, 4, 2)},
    "scales-of-another-dtype": {"k_scales": torch.ones(3, 2, 4).double()},
    "scale-and-scales": {"k_scale": ONES},
    "scale-of-a-wide-cache": {"v_scale": ONES},
    "scale-of-more-heads": {"k_scale": torch.ones(7), "k_scales": None},
}  # fmt: skip


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("changes", HOSTILE.values(), ids=HOSTILE)
def test_the_op_refuses_what_a_kernel_would_access_out_of_bounds(changes, cache_dtype):
    """Anyone can call an op, and a C kernel takes addresses and strides."""
    caches = {
        "k_cache": torch.zeros(CACHE).to(cache_dtype),
        "v_cache": torch.zeros(CACHE).bfloat16(),
    }
    scales = {} if cache_dtype.itemsize == 1 else {"k_scales": None}
    with pytest.raises(ValueError, match="must"):
        call(device="cpu", **{**caches, **scales, **changes})
    assert not any(cache.float().any() for cache in caches.values())


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_one_graph_serves_all_lengths_and_writes_the_caches_themselves(backend):
    """Both caches are views of one tensor, as latent attention has them."""

    def step(q, k, v, both, cos, sin, slots, at):
        both.zero_()
        caches = both[..., :8], both[..., 8:]
        rotated = rotate_and_cache(q, k, v, cos, sin, *caches, slots, position_ids=at)
        return 2 * rotated, both.clone()

    def arguments(tokens):
        q, k, v = (torch.randn(tokens, heads, width) for heads, width in ((4, 8), (1, 8), (1, 24)))
        slots, at = torch.randperm(12)[:tokens] - 1, torch.randint(0, 9, (tokens,))
        return q, k, v, torch.zeros(3, 4, 1, 32), *tables(9, 4), slots, at

    assert compilations(step, map(arguments, (5, 9, 3)), dynamic=True, backend=backend) == 1
