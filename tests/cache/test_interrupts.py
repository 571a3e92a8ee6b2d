"""`PagedCache` after Ctrl-C, which a trace function stands in for at every instruction."""

import sys

import pytest
import torch

import posenc
from posenc.cache import PagedCache

PAGES, PAGE = 8, 2
SOURCE = posenc.cache.__file__


def used():
    """Three sequences, the first two of which share a page that has room; two pages are free."""
    cache = PagedCache(PAGES, page_size=PAGE, num_kv_heads=1, head_dim=1, layers=2)
    for x in (cache.k, cache.v):
        x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(0)))
    cache.allocate("a", 3)
    cache.fork("a", "b")
    cache.allocate("c", 7)
    return cache


def moved_back(k, by):
    return k + by


CALLS = {
    "allocate-with-a-copy": lambda cache: cache.allocate("b", 2),
    "free": lambda cache: cache.free("a"),
    "truncate": lambda cache: cache.truncate("b", 2),
    "fork": lambda cache: cache.fork("c", "d", 5),
    "evict-pages-only": lambda cache: cache.evict("c", drop=4, keep_first=2, shift=None),
    "reset": lambda cache: cache.reset(),
}
WRITES = {
    "evict-shift-and-keep-sinks": lambda cache: cache.evict(
        "c", drop=4, keep_first=1, shift=moved_back
    ),
    "evict-with-a-copy": lambda cache: cache.evict("b", drop=2, shift=moved_back),
}


def interrupted(call, cache, instruction):
    """Raise KeyboardInterrupt before that instruction of the call; False if it ends before."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        if frame.f_code.co_filename != SOURCE:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            if count == instruction:
                raise KeyboardInterrupt
            count += 1
        return trace

    before = sys.gettrace()
    # Python 3.12 reports instructions only if a frame asks for them before.
    sys._getframe().f_trace_opcodes = True
    sys.settrace(trace)
    try:
        call(cache)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def contents(cache):
    """What each sequence reads, in order."""
    found = {}
    for name in sorted(cache.sequences):
        (pages,), (length,) = (table.tolist() for table in cache.block_table([name]))
        rows = [x[:, pages].flatten(1, 2)[:, :length].tolist() for x in (cache.k, cache.v)]
        found[name] = length, rows
    return found


def assert_no_page_is_lost_or_had_twice(cache):
    """Pages that no sequence has can all be had, once."""
    owned = set(cache.flashinfer_tables(cache.sequences)[1].tolist())
    assert cache.free_pages == PAGES - len(owned)
    cache.allocate("rest", cache.free_pages * PAGE)
    rest = cache.flashinfer_tables(["rest"])[1].tolist()
    assert sorted([*owned, *rest]) == list(range(PAGES))
    cache.free("rest")
    for name in cache.sequences:
        cache.free(name)
    assert cache.free_pages == PAGES


@pytest.mark.parametrize("name", [*CALLS, *WRITES])
def test_ctrl_c_leaves_the_old_state_or_the_new_one(name):
    """A server or a notebook goes on with the same cache; no sequence gets another's pages."""
    call = {**CALLS, **WRITES}[name]
    old, new, freed = used(), used(), used()
    call(new)
    allowed = [contents(old), contents(new)]
    if name in WRITES:
        # While its rows are overwritten, they are those of no sequence.
        freed.free("b" if name == "evict-with-a-copy" else "c")
        allowed.append(contents(freed))
    seen, instruction, cache = set(), 0, used()

    while interrupted(call, cache, instruction):
        now = contents(cache)
        assert now in allowed
        seen.add(allowed.index(now))
        assert_no_page_is_lost_or_had_twice(cache)
        cache, instruction = used(), instruction + 1

    assert seen == set(range(len(allowed)))
