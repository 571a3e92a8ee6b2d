"""Keys and values in a cache, against float64: norm, rotation, scale, and one rounding."""

import itertools

import pytest
import torch

from oracles import tables
from posenc.ops.rotation.spec import CacheTarget, CacheWrite, Norm, Spec, TableRows
from support.caches import (
    BACKENDS,
    GIVEN,
    LARGEST,
    assert_holds,
    assert_nearest,
    exact_rows,
    values_of,
)
from support.rotations import CUT, DTYPES, GPU, instruction_sets

LAYOUTS = list(itertools.product((True, False), (True, False)))
SPANS = {"all": (20, 0), "first": (17, 0), "last": (17, 6)}
CACHES = {"same": None, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.int8}
SLOTS = torch.tensor([[11, 0, -1, 5, 7], [1, 2, -1, 3, 10]])
AT = torch.tensor([[0, 3, 1, 8, 2], [5, 5, 0, 1, 7]])
TABLES = {pairs: tables(9, pairs) for pairs, _ in SPANS.values()}
NAMES = {run: name for name, run in BACKENDS.items()}
# C writes caches in the dtype of the keys only.
OF_8_BITS = [name for name in BACKENDS if name != "c"]
NORMS = {"none": (0, Norm()), "head": (1, Norm(1e-5)), "all-heads": (2, Norm(1e-6, 1.0))}


def rows_at(cache, slots):
    """The rows of ``[pages, H, page, ...]`` in these slots, ``[tokens, H, ...]``."""
    return cache.transpose(1, 2).flatten(0, 1)[slots]


def untouched(cache):
    """The bytes of all rows but those of `SLOTS`."""
    rest = [s for s in range(12) if s not in SLOTS.flatten().tolist()]
    return rows_at(cache.view(torch.uint8), rest)


def noise(shape, dtype):
    """Memory that was used before."""
    size = torch.empty((), dtype=dtype).element_size()
    return torch.randint(0, 64, (*shape[:-1], shape[-1] * size), dtype=torch.uint8).view(dtype)


def check(run, x, v, weights, spec, norm, cache_dtype, kind):
    """Run ``run`` with caches of one layout for keys and of another for values."""
    (q, k), (batch, _, length, _), heads = x, x[1].shape, x[1].shape[1]
    dtype, wide = cache_dtype or k.dtype, 2.0**-52 if k.element_size() > 2 else 2.0**-23
    caches = [noise((3, 4, heads, k.shape[3]), dtype).transpose(1, 2),
              noise((4, heads, 3, v.shape[3]), dtype)]  # fmt: skip
    before = [untouched(cache) for cache in caches]
    worked_out = kind == "worked-out"
    given = [None if worked_out else GIVEN[kind](batch, length, heads) for _ in caches]
    expanded = [None if g is None else g.expand(batch, length, heads).mT for g in given]
    scales = [torch.full(cache.shape[:3], -1.0) if worked_out else None for cache in caches]
    stores = [CacheTarget(*parts) for parts in zip(caches, expanded, scales, strict=True)]
    cos, sin = TABLES[spec.pairs]
    write = CacheWrite(q, k, v, SLOTS, *stores, *weights, norm)
    rotated = run(write, cos, sin, TableRows(0, AT), spec.spec)
    ulps = CUT.get((NAMES[run], k.dtype), 0.51)

    exact, magnitude = exact_rows(q, weights[0], cos, sin, AT, spec.spec, norm)
    assert_holds(rotated, exact, magnitude, None, wide, ulps)
    keys = exact_rows(k, weights[1], cos, sin, AT, spec.spec, norm)
    stored = SLOTS >= 0
    for cache, (exact, magnitude), scale, store, old in zip(
        caches, (keys, (v.double(), v.double().abs())), expanded, stores, before, strict=True
    ):
        assert torch.equal(untouched(cache), old)
        exact, magnitude = (t.transpose(1, 2)[stored] for t in (exact, magnitude))
        divisor = torch.ones(exact.shape[:2])
        if scale is not None:
            divisor = scale.mT[stored]
        elif worked_out:
            divisor = rows_at(store.scales, SLOTS[stored])
            wanted = exact.abs().amax(-1) / LARGEST[dtype]
            torch.testing.assert_close(divisor.double(), wanted, rtol=2e-6, atol=0)
            assert (store.scales == -1).sum() == 4 * heads
        got = rows_at(cache, SLOTS[stored])
        assert_holds(got, exact, magnitude, divisor.unsqueeze(-1), wide, ulps)
    return rotated, caches


class Span:
    """A rotation of some pairs."""

    def __init__(self, inner, outer, pairs, first):
        self.pairs, self.spec = pairs, Spec(inner, outer, first)


def interpreted(backend):
    return backend == "triton" and GPU == "cpu"


def combinations():
    """All of them; Triton's interpreter, that takes a second for each, gets one that is quick."""
    for backend, dtype, cache, every in itertools.product(BACKENDS, DTYPES, CACHES, (False, True)):
        if backend not in OF_8_BITS and cache != "same":
            continue
        if every or not interpreted(backend) or (dtype, cache) == ("fp16", "e4m3"):
            marks = [pytest.mark.slow] if every else []
            yield pytest.param(backend, dtype, cache, every, marks=marks)


@pytest.mark.parametrize(("backend", "dtype", "cache_dtype", "every"), [*combinations()])
def test_caches_hold_what_float64_says_rounded_once(backend, dtype, cache_dtype, every):
    """Every layout and norm, with every part of a head and kind of scale, or one in turn.

    Triton compiles or interprets each: four of them have every layout, norm and part.
    """
    packed = torch.randn(2, 5, 3 + 2 + 2, 40).to(DTYPES[dtype]).transpose(1, 2)
    q, k, v = packed.split((3, 2, 2), dim=1)
    kinds = ["none"] if cache_dtype == "same" else [*GIVEN, "worked-out"]
    others = list(itertools.product(SPANS.values(), kinds))
    cases = itertools.product(NORMS.values(), LAYOUTS)
    for i, ((heads, norm), layout) in enumerate(cases):
        sizes = ((), (40, 40), (3 * 40, 2 * 40))[heads]
        weights = [torch.randn(size).to(DTYPES[dtype]) for size in sizes] or (None, None)
        if backend == "triton" and not every and i % 6 not in (1, 2):
            continue
        all_others = every and not interpreted(backend)
        for span, kind in others if all_others else [others[5 * i % len(others)]]:
            rotation, to = Span(*layout, *span), CACHES[cache_dtype]
            check(BACKENDS[backend], (q, k), v[..., 3:], weights, rotation, norm, to, kind)


@pytest.mark.parametrize("run", BACKENDS.values(), ids=BACKENDS)
def test_keys_are_written_without_queries(run):
    q, k, v = torch.randn(2, 6, 5, 40).split((0, 3, 3), dim=1)
    rotated, _ = check(run, (q, k), v, (None, None), Span(True, True, 20, 0), Norm(), None, "none")
    assert rotated.shape == q.shape


@pytest.mark.parametrize("backend", OF_8_BITS)
@pytest.mark.parametrize("name", ["e4m3", "e5m2", "int8"])
def test_numbers_near_a_tie_are_rounded_to_the_nearest(backend, name):
    values = values_of(CACHES[name])
    ties = (values[1:] + values[:-1]) / 2
    x = torch.cat(
        [ties, ties * (1 + 2**-18), ties * (1 - 2**-18), values, 1e3 * values, 1e-30 * values]
    )
    x = x.float()
    width = len(x) + len(x) % 2
    x = torch.nn.functional.pad(x, (0, width - len(x))).view(1, 1, 1, width)
    got = stored(BACKENDS[backend], x, CACHES[name])
    assert_nearest(got, x.flatten().double(), torch.zeros(()))
    # Exactly in the middle, the neighbour whose last bit is zero is stored.
    assert not (got[: len(ties)].view(torch.uint8) & 1).any()


def stored(run, x, dtype, **store):
    """The row ``x`` of (1, 1, 1, D) as a cache of ``dtype`` holds it; it is turned by zero."""
    cache = torch.full((1, 1, 1, x.shape[3]), 77.0).to(dtype)
    still = torch.ones(1, 1).double(), torch.zeros(1, 1).double()
    values = CacheTarget(torch.zeros_like(cache))
    write = CacheWrite(x, x, x, torch.zeros(1, 1).long(), CacheTarget(cache, **store), values)
    run(write, *still, TableRows(), Spec())
    assert torch.equal(cache.view(torch.uint8), values.cache.view(torch.uint8)) or store
    return cache.flatten()


SPECIAL = [pair for pair in itertools.product(OF_8_BITS, DTYPES)
           if not interpreted(pair[0]) or pair[1] in ("fp16", "fp32")]  # fmt: skip


@pytest.mark.parametrize(("backend", "dtype"), SPECIAL)
@pytest.mark.parametrize("name", ["e4m3", "e5m2", "int8"])
def test_special_numbers_saturate_and_nan_does_not_spread(backend, dtype, name):
    """NaN, which int8 has not, is 0 there, and does not count for a scale."""
    inf, nan, most = float("inf"), float("nan"), LARGEST[CACHES[name]]
    row = [6e4, -6e4, inf, -inf, nan, 1.0, 0.0, -0.0]
    x = torch.tensor(row).to(DTYPES[dtype]).view(1, 1, 1, 8)
    got = stored(BACKENDS[backend], x, CACHES[name]).double()
    none = 0.0 if name == "int8" else nan
    wanted = torch.tensor([most, -most, most, -most, none, 1, 0, 0]).double()
    torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)

    x[..., :4] = 2.0
    scales = torch.zeros(1, 1, 1)
    got = stored(BACKENDS[backend], x, CACHES[name], scales=scales).double()
    torch.testing.assert_close(scales.item(), 2 / most, rtol=1e-7, atol=0)
    assert (got[:4] == most).all()
    scales = torch.zeros(1, 1, 1)
    assert (
        not stored(BACKENDS[backend], 0 * x[..., 5:7], CACHES[name], scales=scales).double().any()
    )
    assert scales.item() == 1


@pytest.mark.skipif("c" not in BACKENDS, reason="the extension is not built")
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_every_instruction_set_and_number_of_threads_stores_the_same_rows(dtype):
    """Threads take whole tokens. Sets may fuse other products, so each is checked by itself."""
    q, k, v = (torch.randn(2, heads, 5, 40).to(DTYPES[dtype]) for heads in (3, 2, 2))
    span = Span(False, False, 17, 0)
    for _ in instruction_sets():
        for weights in ([None] * 2, [torch.randn(40) for _ in range(2)]):
            check(BACKENDS["c"], (q, k), v, weights, span, Norm(), None, "none")
    long = [torch.randn(1, heads, 700, 128).to(DTYPES[dtype]) for heads in (2, 1, 1)]
    at, slots = torch.arange(700) % 9, torch.randperm(700)
    how = *tables(9, 64), TableRows(0, at[None]), Spec(False, False)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            caches = [torch.zeros(7, 1, 100, 128).to(k.dtype) for _ in "kv"]
            write = CacheWrite(
                *long, slots[None], *map(CacheTarget, caches), *[torch.ones(128)] * 2
            )
            rotated = BACKENDS["c"](write, *how)
            results.append([t.view(torch.uint8) for t in (rotated, *caches)])
    finally:
        torch.set_num_threads(threads)
    assert all(map(torch.equal, *results))
