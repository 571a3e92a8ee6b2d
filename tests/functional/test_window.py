"""Sliding windows: what they cost, and in modules, matrices and mods."""

import itertools
from functools import partial

import pytest
import torch

import posenc
from posenc import attention
from posenc.attention import RowBias, Slopes, biased_attention, relative_bias
from posenc.ops.attention import rows as by_rows
from support.assertions import compilations
from support.attention import written_down
from support.modules import DIM, HEADS, MODULES, TOKENS, attended, gated

H = 4


@pytest.fixture(autouse=True)
def _few_rows(monkeypatch):
    monkeypatch.setattr(by_rows, "SCORES", 2**12)


def test_keys_outside_cost_nothing():
    """Of 4,096 keys, queries with a window of 64 meet a hundred at a time."""
    q = torch.randn(1, 2, 4096, 16)
    met = []

    def rows(own, index):
        met.append(len(index))
        return torch.zeros(1, 2, own.shape[1], len(index))

    biased_attention(q, q, q, RowBias(rows), causal=True, window=64)
    assert max(met) <= 128
    assert len(met) < 4096


def test_pieces_keep_their_bound_wherever_the_queries_are():
    q, k = torch.randn(1, 2, 40, 16), torch.randn(1, 2, 400, 16)
    sizes = []

    def rows(own, index):
        sizes.append(2 * own.shape[1] * len(index))
        return torch.zeros(1, 2, own.shape[1], len(index))

    for offset, window in itertools.product((7, torch.tensor([7])), (1, 8, 300)):
        biased_attention(q, k, k, RowBias(rows), causal=True, window=window, query_offset=offset)
    assert max(sizes) <= 2**12


BIASED = [name for name, use in MODULES.items() if use.call in (attended, gated)]
BIASED = [name for name in BIASED if not name.startswith(("SelfExtend", "DualChunk"))]


@pytest.mark.parametrize("name", BIASED)
def test_every_module_takes_a_window_a_mask_and_dropout(name):
    """A window is the same as a mask of that window."""
    torch.manual_seed(0)
    module = MODULES[name].build().double()
    q, k, v = torch.randn(3, 2, HEADS, TOKENS, DIM).double().unbind()
    k.requires_grad_()
    x = torch.randn(2, TOKENS, HEADS * DIM).double()
    given = (q, k, v, x) if MODULES[name].call is gated else (q, k, v)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    distance = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
    for window, seen in ((2, distance.abs() < 2), ((1, 3), (distance <= 1) & (-distance <= 3))):
        got, wanted = module(*given, window=window), module(*given, attn_mask=seen)
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-11)
        assert not torch.allclose(got, module(*given))
        of = [k, *module.parameters()]
        for a, b in zip(*(torch.autograd.grad(y.sum(), of) for y in (got, wanted)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)
    assert not torch.equal(module(*given, dropout_p=0.5), module(*given))


@pytest.mark.parametrize("seq_dim", [-2, 1])
def test_pope_takes_windows_documents_and_offsets(seq_dim):
    """The same as attention to the encoded queries and keys of the whole sequence."""
    torch.manual_seed(0)
    keys, queries = 12, 4
    pope = posenc.PoPE(8, num_kv_heads=2, init="uniform", seq_dim=seq_dim).double()
    q, k, v = (torch.randn(2, h, keys, 8).double() for h in (4, 2, 2))
    ids = torch.tensor([[0] * 5 + [1] * 7, [-1] * 2 + [3] * 10])
    polar = posenc.PoPE(8, num_kv_heads=2).double()
    polar.load_state_dict(pope.state_dict())

    def attend(q, k, v, **options):
        if seq_dim == 1:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        made = pope.attention(q, k, v, **options)
        return made.transpose(1, 2) if seq_dim == 1 else made

    for offset in (None, 3, torch.tensor([0, 8])):
        start = torch.as_tensor(keys - queries if offset is None else offset).reshape(-1, 1)
        own = (start + torch.arange(queries)).expand(2, -1)
        some = q.gather(2, own[:, None, :, None].expand(2, 4, -1, 8))
        how = {"query_offset": offset, "document_ids": ids, "window": (3, 1)}
        got = attend(some, k, v, causal=False, **how)
        both = polar(q, k)
        polar_q = both[0].gather(2, own[:, None, :, None].expand(2, 4, -1, 16))
        exact = {"own": own, "scale": 8**-0.5, "causal": False, "documents": ids, "window": (3, 1)}
        wanted, _ = written_down(polar_q, both[1], v, None, "none", **exact)
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-11)
    # All tokens, without any of these, go to SDPA.
    torch.testing.assert_close(attend(q, k, v), attend(q, k, v, window=keys))


def test_matrices_and_mods_hide_the_same_keys():
    slopes, (queries, keys), window = torch.rand(H), (5, 9), (3, 1)
    i, j = torch.arange(queries)[:, None] + keys - queries, torch.arange(keys)
    seen = (i - j <= 3) & (j - i <= 1)
    how = {"causal": False, "window": window}
    bias = posenc.functional.alibi_bias(slopes, queries, keys, **how)
    assert torch.equal(bias.isfinite(), seen.expand(H, -1, -1))
    ids = torch.zeros(keys, dtype=torch.int64)
    assert torch.equal(bias, posenc.functional.alibi_bias(slopes, 5, 9, document_ids=ids, **how))
    torch.testing.assert_close(relative_bias(Slopes(slopes), queries, keys, **how), bias)
    torch.testing.assert_close(
        posenc.ALiBi(H, causal=False).bias(5, 9, window=4)[0, 0, 5:],
        posenc.ALiBi(H, causal=False).bias(5, 9)[0, 0, 5:].where(j[5:] < 8, -torch.inf),
    )
    grid = torch.tensor(0), torch.tensor(0), torch.arange(queries)[:, None], torch.arange(keys)
    assert torch.equal(attention.alibi_mask_mod(queries, keys, **how)(*grid), seen)
    score = torch.zeros(queries, keys)
    for mod in (
        attention.alibi_score_mod(slopes, queries, keys, **how),
        attention.relative_score_mod(Slopes(slopes), queries, keys, **how),
    ):
        torch.testing.assert_close(mod(score, *grid), bias[0])
    mask = attention.alibi_block_mask(
        slopes, 256, score_bound=float("inf"), dtype=torch.float32, window=100, block=64
    )
    assert mask.to_dense()[0, 0].tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [1, 1, 1, 0],
        [0, 1, 1, 1],
    ]


def test_one_graph_serves_windows_of_every_length(monkeypatch):
    """By rows too: a compiled call has one piece."""
    monkeypatch.setattr(by_rows, "SCORES", 2**21)
    bias = posenc.RelativeKeys(DIM, max_distance=3)
    torch.nn.init.normal_(bias.weight)
    calls = [torch.randn(3, 1, 2, n, DIM).unbind() for n in (90, 91, 130, 200)]
    attend = partial(bias, window=20)
    assert compilations(attend, calls, dynamic=True, backend="eager") == 1


@pytest.mark.parametrize(
    ("window", "error"),
    [(0, ValueError), (True, TypeError), (2.5, TypeError), ((1,), ValueError),
     ((-2, 0), ValueError), ((1, "2"), TypeError), ("ab", TypeError)],
)  # fmt: skip
def test_a_window_that_is_none_is_refused(window, error):
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(error, match="biased_attention: window must"):
        biased_attention(q, q, q, causal=True, window=window)
