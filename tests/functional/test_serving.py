"""`rotate_and_cache`: what it refuses, and that a refusal changes nothing."""

import pytest
import torch

from posenc.functional import rotate_and_cache, rotate_qk

T, H, HK, D = 5, 4, 2, 8
SLOTS = torch.tensor([11, 0, -1, 5, 7])


def example(dtype=torch.float32, cache_dtype=None):
    """Arguments that fit: 5 tokens, 3 pages of 4."""
    q, k, v = (torch.randn(T, heads, D, dtype=dtype) for heads in (H, HK, HK))
    cos, sin = torch.randn(2, 9, D // 2).double()
    k_cache, v_cache = torch.zeros(2, 3, 4, HK, D).to(cache_dtype or dtype)
    names = "q k v cos sin k_cache v_cache slot_mapping".split()
    values = q, k, v, cos, sin, k_cache, v_cache, SLOTS
    return dict(zip(names, values, strict=True))


def test_queries_are_returned_and_keys_and_values_are_in_their_slots():
    arguments = example()
    q, k, v, cos, sin, k_cache, v_cache, _ = arguments.values()
    rotated = rotate_and_cache(**arguments, offset=3)
    wanted_q, wanted_k = rotate_qk(q[None], k[None], cos, sin, seq_dim=1, offset=3)
    torch.testing.assert_close(rotated, wanted_q[0], rtol=0, atol=0)
    stored = SLOTS >= 0
    for cache, wanted in ((k_cache, wanted_k[0]), (v_cache, v)):
        rows = torch.zeros(12, HK, D).index_copy(0, SLOTS[stored], wanted[stored])
        torch.testing.assert_close(cache.flatten(0, 1), rows, rtol=0, atol=0)


def test_as_many_tokens_as_heads_with_strided_channels():
    """A copy of such a tensor must not take tokens for heads."""
    results = []
    for strided in (False, True):
        torch.manual_seed(0)
        arguments = example() | {"slot_mapping": SLOTS[:HK]}
        for name in "qkv":
            x = arguments[name][:HK, :HK]
            arguments[name] = torch.stack((x, x), -1)[..., 0] if strided else x
        results.append((rotate_and_cache(**arguments), arguments["k_cache"], arguments["v_cache"]))
    assert all(map(torch.equal, *results))


# A call that does not fit: what differs from the one that does, and what the error says.
REFUSED = {
    "slot-past-the-cache": ({"slot_mapping": SLOTS + 1}, r"must be in \[0, 12\).* got 12"),
    "slot-below-minus-one": ({"slot_mapping": SLOTS - 1}, r"must be in \[0, 12\).* got -2"),
    "slot-that-wraps": ({"slot_mapping": SLOTS + (2**63 - 12)}, "slot_mapping must be in"),
    "slots-of-floats": ({"slot_mapping": SLOTS.double()}, "slot_mapping must be an int64"),
    "slots-of-two-axes": ({"slot_mapping": SLOTS[None]}, r"shape \(5,\)"),
    "slots-elsewhere": ({"slot_mapping": SLOTS.to("meta")}, "slot_mapping must be on cpu"),
    "rows-past-the-table": ({"offset": 5}, "positions must stay below"),
    "positions-past-the-table": ({"position_ids": torch.full((T,), 9)}, "positions must stay"),
    "q-of-two-axes": ({"q": torch.zeros(T, D)}, "q must have shape"),
    "k-of-another-dtype": ({"k": torch.zeros(T, HK, D).double()}, "one dtype"),
    "v-of-fewer-tokens": ({"v": torch.zeros(T - 1, HK, D)}, "v must have the batch and length"),
    "v-without-channels": ({"v": torch.zeros(T, HK, 0)}, "at least one channel"),
    "v-with-a-batch": ({"v": torch.zeros(1, T, HK, D)}, "v must have shape"),
    "cache-of-another-dtype": ({"k_cache": torch.zeros(3, 4, HK, D).half()}, "k_cache must be"),
    "cache-of-another-layout": ({"cache_layout": "HND"}, r"\(pages, 2, page, 8\)"),
    "cache-layout-unknown": ({"cache_layout": "NDH"}, "cache_layout must be"),
    "cache-of-other-heads": ({"v_cache": torch.zeros(3, 4, 1, D)}, "v_cache must be"),
    "cache-of-another-width": ({"v_cache": torch.zeros(3, 4, HK, 6)}, "v_cache must be"),
    "caches-of-other-lengths": ({"v_cache": torch.zeros(3, 5, HK, D)}, "one number of slots"),
    "cache-strided-by-channel": ({"v_cache": torch.zeros(3, 4, D, HK).mT}, "dense along"),
    "cache-elsewhere": ({"v_cache": torch.zeros(3, 4, HK, D, device="meta")}, "on cpu"),
    "cache-expanded": ({"v_cache": torch.zeros(1, 4, HK, D).expand(3, -1, -1, -1)}, "itself"),
    "scale-of-a-wide-cache": ({"k_scale": torch.tensor(2.0)}, "need a cache of 8 bits"),
    "weight-of-another-width": ({"q_weight": torch.ones(6)}, "q_weight must have shape"),
    "eps-of-zero": ({"k_weight": torch.ones(D), "eps": 0.0}, "eps must be"),
    "cache-negated": ({"k_cache": torch._neg_view(torch.zeros(3, 4, HK, D))}, "negative bit"),
    "gradient": ({"k_weight": torch.ones(D, requires_grad=True)}, "require a gradient"),
    "gradient-of-tables": ({"cos": torch.ones(9, 4, requires_grad=True)}, "require a gradient"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "says"), REFUSED.values(), ids=REFUSED)
def test_a_call_that_does_not_fit_is_refused_and_changes_nothing(changes, says):
    arguments = {**example(), **changes}
    caches = [arguments[name] for name in ("k_cache", "v_cache") if arguments[name].is_cpu]
    before = [cache.clone() for cache in caches]
    with pytest.raises((ValueError, TypeError), match=says):
        rotate_and_cache(**arguments)
    assert all(map(torch.equal, caches, before))


REFUSED_SCALES = {
    "a-bool": ({"k_scale": True}, "k_scale must be a number"),
    "zero": ({"k_scale": 0.0}, "k_scale must be finite and above zero"),
    "infinite": ({"v_scale": float("inf")}, "v_scale must be finite and above zero"),
    "a-text": ({"k_scale": "1"}, "k_scale must be a number or a float32 tensor"),
    "a-number-for-each-row": ({"v_scale_cache": 1.0}, "v_scale_cache must be a float32"),
    "float64": ({"k_scale": torch.ones(()).double()}, "must be a number or a float32 tensor"),
    "two-kinds": ({"k_scale": torch.ones(()), "k_scale_cache": torch.ones(3, 4, HK)}, "exclude"),
    "not-broadcast": ({"k_scale": torch.ones(T)}, "must broadcast"),
    "four-axes": ({"k_scale": torch.ones(1, 1, 1, 1)}, "must broadcast"),
    "scale-cache-of-heads": ({"v_scale_cache": torch.ones(3, HK, 4)}, "must have shape"),
    "elsewhere": ({"v_scale_cache": torch.ones(3, 4, HK, device="meta")}, "scales must be on"),
    "negated": ({"v_scale_cache": torch.zeros(3, 4, HK).cfloat().conj().imag}, "negative bit"),
    "none-of-keys": ({"k_scale": None}, "k_cache of 8 bits needs k_scale or k_scale_cache"),
    "none-of-values": ({"v_scale": None}, "v_cache of 8 bits needs v_scale or v_scale_cache"),
}


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize(("changes", "says"), REFUSED_SCALES.values(), ids=REFUSED_SCALES)
def test_a_scale_that_does_not_fit_is_refused(changes, says, dtype):
    """Nor may one be forgotten: int8 would keep integers, and a cache of scales stay zero."""
    one = torch.ones(())
    scales = {} if "v_scale_cache" in changes else {"v_scale": one}
    arguments = {**example(cache_dtype=dtype), "k_scale": one, **scales, **changes}
    with pytest.raises((ValueError, TypeError), match=says):
        rotate_and_cache(**arguments)
    assert not any(arguments[name].view(torch.uint8).any() for name in ("k_cache", "v_cache"))


@pytest.mark.parametrize("shape", [(), (HK,), (1, HK), (T, 1), (T, HK)], ids=str)
@pytest.mark.parametrize("as_tokens", [True, False], ids=["tokens", "batch"])
def test_a_scale_may_be_for_the_tensor_each_head_each_token_or_both(shape, as_tokens):
    arguments = example(torch.float64, torch.int8)
    scale = 0.01 + torch.rand(shape)
    if not as_tokens:
        # Two sequences of tokens before heads, the second of which is not stored.
        for name in ("q", "k", "v", "slot_mapping"):
            arguments[name] = torch.stack(2 * [arguments[name]])
        arguments["slot_mapping"][1] = -1
        given = scale if len(shape) < 2 else torch.stack([scale, 0 * scale])
        rotate_and_cache(**arguments, seq_dim=1, k_scale=torch.ones(()), v_scale=given)
    else:
        rotate_and_cache(**arguments, k_scale=torch.ones(()), v_scale=scale)
    v = arguments["v"] if as_tokens else arguments["v"][0]
    wanted = (v / scale.double().expand(T, HK).unsqueeze(-1)).clamp(-127, 127).round()
    kept = SLOTS >= 0
    assert torch.equal(arguments["v_cache"].flatten(0, 1)[SLOTS[kept]].double(), wanted[kept])


@pytest.mark.parametrize("start", [0, 4], ids=["one-cache", "slices-that-overlap"])
def test_caches_that_share_elements_are_refused(start):
    """A value would be written over a part of its key."""
    arguments, memory = example(), torch.zeros(3, 4, HK, D + 4)
    arguments["k_cache"], arguments["v_cache"] = memory[..., :D], memory[..., start : start + D]
    with pytest.raises(ValueError, match="k_cache and v_cache must not share memory"):
        rotate_and_cache(**arguments)


def test_one_cache_for_the_scales_of_keys_and_values_is_refused():
    scales = torch.zeros(3, 4, HK)
    with pytest.raises(ValueError, match="v_scale_cache must not share memory"):
        rotate_and_cache(
            **example(cache_dtype=torch.int8), k_scale_cache=scales, v_scale_cache=scales
        )
    assert not scales.any()


# Where q, k and v may lie: (2, heads, 5, 8) each, made from one packed tensor or not.
MEMORY = {
    "packed": lambda: torch.randn(2, 5, H + 2 * HK, D).transpose(1, 2).split((H, HK, HK), 1),
    "packed-by-head": lambda: [x.transpose(1, 2) for x in torch.randn(2, 5, H, 3, D).unbind(3)],
    "heads-first": lambda: [torch.randn(2, heads, 5, D) for heads in (H, HK, HK)],
    "channels-not-dense": lambda: [torch.randn(2, n, D, 5).transpose(2, 3) for n in (H, HK, HK)],
    "expanded": lambda: [torch.randn(2, n, 1, D).expand(2, n, 5, D) for n in (H, HK, HK)],
    "no-sequence": lambda: [torch.randn(0, heads, 5, D) for heads in (H, HK, HK)],
    "no-token": lambda: [torch.randn(2, heads, 0, D) for heads in (H, HK, HK)],
    "no-query-head": lambda: [torch.randn(2, heads, 5, D) for heads in (0, HK, HK)],
}
# Caches of 12 rows of (heads, D), as (pages, heads, page, D): the layout word, and the memory.
CACHES = {
    "NHD": lambda heads: torch.zeros(3, 4, heads, D),
    "HND": lambda heads: torch.zeros(3, heads, 4, D),
    "NHD-in-HND-memory": lambda heads: torch.zeros(3, heads, 4, D).transpose(1, 2),
    "NHD-with-gaps": lambda heads: torch.zeros(6, 5, heads, D + 3)[::2, 1:, :, 2 : D + 2],
    "HND-contiguous": lambda heads: torch.zeros(1, heads, 12, D),
}


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("memory", MEMORY)
def test_any_strides_give_the_same_rows(memory, cache):
    """Against the rotation of contiguous copies, and rows copied one by one."""
    q, k, v = MEMORY[memory]()
    batch, length = q.shape[0], q.shape[2]
    slots = torch.randperm(12)[: batch * length].view(batch, length).int()
    at = torch.randint(0, 9, (batch, length))
    cos, sin = torch.randn(2, 9, 3).double()
    caches = [CACHES[cache](x.shape[1]) for x in (k, v)]
    how = {"position_ids": at, "interleaved": False, "last": True}
    layout = {"cache_layout": cache[:3]}
    rotated = rotate_and_cache(q, k, v, cos, sin, *caches, slots, **layout, **how)
    wanted = rotate_qk(q.contiguous(), k.contiguous(), cos, sin, **how)
    torch.testing.assert_close(rotated, wanted[0], rtol=0, atol=0)
    for got, rows in zip(caches, (wanted[1], v), strict=True):
        expected = torch.zeros(12, rows.shape[1], D)
        for b in range(batch):
            for t in range(length):
                expected[slots[b, t]] = rows[b, :, t]
        got = got.transpose(1, 2) if layout["cache_layout"] == "HND" else got
        assert torch.equal(got.flatten(0, 1), expected)


def test_a_cache_may_hold_a_latent_and_one_rotated_head():
    """DeepSeek: one row holds 4 groups of the latent in 8 bits, their scales, and the key."""
    tokens, group, width = 5, 32, 16
    row = 4 * group + 4 * 4 + 2 * width
    memory = torch.zeros(3, 4, row, dtype=torch.uint8)
    before = memory.clone()
    parts = memory.split((4 * group, 16, 2 * width), dim=2)
    latents = parts[0].view(torch.float8_e4m3fn).unflatten(2, (4, group))
    scales, keys = parts[1].view(torch.float32), parts[2].view(torch.bfloat16).unsqueeze(2)
    q, k = (torch.randn(tokens, heads, width).bfloat16() for heads in (6, 1))
    latent = torch.randn(tokens, 4, group).bfloat16()
    cos, sin = torch.randn(2, 9, width // 2).double()
    rotate_and_cache(q, k, latent, cos, sin, keys, latents, SLOTS, v_scale_cache=scales)
    _, wanted = rotate_qk(q[None], k[None], cos, sin, seq_dim=1)
    kept = SLOTS >= 0
    assert torch.equal(keys.flatten(0, 1)[SLOTS[kept]], wanted[0][kept])
    back = latents.float() * scales.unsqueeze(-1)
    off = (back.flatten(0, 1)[SLOTS[kept]] - latent[kept].float()).abs()
    # e4m3 has 3 bits of fraction, and 2^-9 below its least exponent.
    largest = latent[kept].float().abs().amax(-1, keepdim=True)
    assert (off <= latent[kept].float().abs() / 16 * 1.01 + largest / 448 * 2.0**-10).all()
    rest = [slot for slot in range(12) if slot not in SLOTS.tolist()]
    assert torch.equal(memory.flatten(0, 1)[rest], before.flatten(0, 1)[rest])


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "checked"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_a_scale_may_be_a_number(dtype, plain):
    """Engines keep a scale of the whole cache as a Python float."""
    arguments = example(cache_dtype=dtype)
    if not plain:
        arguments["offset"] = torch.tensor([0])
        for name in ("q", "k", "v", "slot_mapping"):
            arguments[name] = arguments[name][None]
        arguments["seq_dim"] = 1
    again = arguments | {name: arguments[name].clone() for name in ("k_cache", "v_cache")}

    got = rotate_and_cache(**arguments, k_scale=0.37, v_scale=2)
    wanted = rotate_and_cache(**again, k_scale=torch.tensor(0.37), v_scale=torch.tensor(2.0))

    assert torch.equal(got, wanted)
    for name in ("k_cache", "v_cache"):
        stored = arguments[name].view(torch.uint8)
        assert stored.any()
        assert torch.equal(stored, again[name].view(torch.uint8))


def test_a_lazily_negated_scale_is_read_by_its_values():
    """As ``z.conj().imag`` is: a bit says that memory holds the other sign."""
    arguments = example(cache_dtype=torch.int8)
    again = arguments | {name: arguments[name].clone() for name in ("k_cache", "v_cache")}
    scales = {"k_scale": 0.01 + torch.rand(HK), "v_scale": 0.01 + torch.rand(T, 1)}
    negated = {name: torch.complex(x, -x).conj().imag for name, x in scales.items()}
    assert all(scale.is_neg() for scale in negated.values())

    rotate_and_cache(**arguments, **scales)
    rotate_and_cache(**again, **negated)

    assert torch.equal(again["k_cache"], arguments["k_cache"])
    assert torch.equal(again["v_cache"], arguments["v_cache"])


def test_caches_of_inference_mode_are_written_in_inference_mode_only():
    with torch.inference_mode():
        arguments = example()
        rotate_and_cache(**arguments)
        assert arguments["k_cache"].any()
    with torch.no_grad(), pytest.raises(ValueError, match="inference tensor"):
        rotate_and_cache(**arguments)


def test_meta_tensors_have_a_shape_only():
    one = torch.ones(())
    arguments = example(cache_dtype=torch.int8) | {"k_scale": one, "v_scale": one}
    arguments = {name: x.to("meta") for name, x in arguments.items()}
    assert rotate_and_cache(**arguments).shape == (T, H, D)


def test_an_exported_program_consists_of_torch_operations():
    """It must run where this package is not."""

    class Step(torch.nn.Module):
        def forward(self, q, k, v, cos, sin, k_cache, v_cache, slots):
            return rotate_and_cache(q, k, v, cos, sin, k_cache, v_cache, slots)

    arguments, again = example(), example()
    again.update({name: arguments[name].clone() for name in arguments})
    with torch.no_grad():
        program = torch.export.export(Step(), tuple(arguments.values()))
        rotated = program.module()(*arguments.values())
        assert torch.equal(rotated, rotate_and_cache(**again))
    assert torch.equal(arguments["k_cache"], again["k_cache"])
    assert "posenc" not in program.graph_module.code
