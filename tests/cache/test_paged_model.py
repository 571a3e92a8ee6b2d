"""`PagedCache` against a dictionary of lists, under random calls."""

import random
from collections import Counter

import pytest
import torch

from posenc.cache import OutOfPages, PagedCache

PAGES, PAGE, LAYERS, HEADS, WIDTH, V_WIDTH = 9, 4, 2, 3, 2, 5


def rows(number, width):
    """The row of a token in all layers; no other token, layer, head or channel has its numbers."""
    return 1000.0 * number + torch.arange(LAYERS * HEADS * width).view(LAYERS, HEADS, width)


def pages_of(tokens):
    return -(-tokens // PAGE)


class Model:
    """Each sequence is a list of (key, value): what it should read, and nothing about pages."""

    def __init__(self, seed, **how):
        sizes = {"layers": LAYERS, "v_head_dim": V_WIDTH, "dtype": torch.float64}
        self.cache = PagedCache(
            PAGES, page_size=PAGE, num_kv_heads=HEADS, head_dim=WIDTH, **sizes, **how
        )
        self.random = random.Random(seed)
        self.wanted, self.written, self.done = {}, 0, Counter()

    def tensors(self):
        """Keys and values as ``(layers, pages, page, heads, width)``."""
        hnd = self.cache.cache_layout == "HND"
        return [x.transpose(2, 3) if hnd else x for x in (self.cache.k, self.cache.v)]

    def step(self):
        calls = [self.allocate, self.allocate, self.fork, self.truncate, self.evict, self.free]
        call = self.random.choice(calls) if self.wanted else self.allocate
        try:
            call()
            self.done[call.__name__] += 1
        except OutOfPages:
            self.done["out of pages"] += 1

    def any(self):
        return self.random.choice(sorted(self.wanted))

    def allocate(self):
        name = self.random.choice("abcd")
        had, count = self.wanted.get(name, []), self.random.randint(0, 9)
        try:
            new = self.cache.allocate(name, count)
        except OutOfPages:
            # The last page may need a copy.
            assert self.cache.free_pages < pages_of(len(had) + count) - pages_of(len(had)) + 1
            raise
        assert new == range(len(had), len(had) + count)
        self.wanted[name] = list(had)
        for slot in self.cache.slot_mapping(name, new).tolist():
            self.written += 1
            token = rows(self.written, WIDTH), rows(-self.written, V_WIDTH)
            for memory, row in zip(self.tensors(), token, strict=True):
                memory[:, slot // PAGE, slot % PAGE] = row
            self.wanted[name].append(token)

    def fork(self):
        parent, child = self.any(), self.random.choice("abcd")
        length = len(self.wanted[parent])
        tokens = self.random.choice([None, self.random.randint(0, length)])
        if child in self.wanted:
            with pytest.raises(ValueError, match="new sequence"):
                self.cache.fork(parent, child, tokens)
            return
        self.cache.fork(parent, child, tokens)
        self.wanted[child] = self.wanted[parent][:tokens]

    def truncate(self):
        name = self.any()
        tokens = self.random.randint(0, len(self.wanted[name]))
        self.cache.truncate(name, tokens)
        self.wanted[name] = self.wanted[name][:tokens]

    def evict(self):
        name, shift = self.any(), self.random.choice([None, lambda k, by: k + by / 64])
        had = self.wanted[name]
        if len(had) < PAGE:
            return
        drop = PAGE * self.random.randint(1, len(had) // PAGE)
        keep = self.random.randint(0, len(had) - drop)
        try:
            self.cache.evict(name, drop=drop, keep_first=keep, shift=shift)
        except OutOfPages:
            assert self.cache.free_pages < pages_of(len(had) - drop)
            raise
        by = drop / 64 if shift else 0
        self.wanted[name] = had[:keep] + [(k - by, v) for k, v in had[keep + drop :]]

    def free(self):
        name = self.random.choice("abcd")
        if name not in self.wanted:
            with pytest.raises(ValueError, match="never allocated"):
                self.cache.free(name)
            return
        self.cache.free(name)
        del self.wanted[name]

    def check(self):
        names = list(self.wanted)
        table, lengths = self.cache.block_table(names)
        assert lengths.tolist() == [len(self.wanted[name]) for name in names]
        for which, memory in enumerate(self.tensors()):
            for name, pages in zip(names, table.tolist(), strict=True):
                wanted = [token[which] for token in self.wanted[name]]
                read = memory[:, pages].flatten(1, 2)[:, : len(wanted)]
                assert torch.equal(read, torch.stack(wanted, 1) if wanted else read)
        used = set(self.cache.flashinfer_tables(names)[1].tolist())
        assert self.cache.free_pages == PAGES - len(used)
        if len(names) == 1:
            # A sequence that shares nothing has no page too many.
            assert len(used) == pages_of(len(self.wanted[names[0]]))


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({}, id="NHD"),
        pytest.param({"cache_layout": "HND"}, id="HND"),
        pytest.param({"joined": True}, id="joined"),
    ],
)
def test_every_sequence_reads_what_was_written_to_it(how):
    """Whatever was allocated, forked, cut, evicted and freed in between, by anyone."""
    done = Counter()
    for seed in range(6):
        model = Model(seed, **how)
        for _ in range(80):
            model.step()
            model.check()
        for name in model.wanted:
            model.cache.free(name)
        assert model.cache.free_pages == PAGES
        done += model.done
    # The calls were there, and some found no page.
    assert min(done.values()) >= 5, done
    assert len(done) == 6
