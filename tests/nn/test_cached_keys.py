"""RoPE of fewer queries than keys: those of a cache that holds keys as they were projected."""

import pytest
import torch

from posenc import RoPE, axes, scaling

RULES = {"plain": None, "by-length": scaling.DynamicNTK(2.0, 6), "gain": scaling.YaRN(4.0, 8)}


@pytest.mark.parametrize("queries", [0, 1, 3, 9], ids=lambda n: f"{n}-queries")
@pytest.mark.parametrize(
    "where",
    [
        {},
        {"offset": 5},
        {"offset": torch.tensor([0, 7])},
        {"position_ids": torch.arange(9).flip(0)},
        {"position_ids": torch.stack((torch.arange(9), torch.arange(9) * 2))},
        {"position_ids": torch.linspace(-1, 1, 9)},
    ],
    ids=["start", "offset", "offsets", "ids", "ids-of-each", "floats"],
)
@pytest.mark.parametrize("rule", RULES)
def test_the_last_query_is_at_the_last_key(rule, where, queries):
    for seq_dim, length in ((-2, 64), (1, None)):
        rope = RoPE(8, length, scaling=RULES[rule], seq_dim=seq_dim)
        whole, k = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 9, 8)
        if seq_dim == 1:
            whole, k = whole.transpose(1, 2), k.transpose(1, 2)
        q = whole.narrow(seq_dim, 9 - queries, queries)
        got, keys = rope.rotate_queries_with_cached_keys(q, k, **where)
        wanted, same = rope(whole, k, **where)
        assert torch.equal(keys, same)
        assert torch.equal(got, wanted.narrow(seq_dim, 9 - queries, queries))


def test_coordinates_of_the_keys_serve_both():
    rope, q, k = RoPE(8, axes=axes.Axial(2)), torch.randn(1, 2, 3, 8), torch.randn(1, 2, 6, 8)
    at = torch.randn(2, 6)
    got, _ = rope.rotate_queries_with_cached_keys(q, k, position_ids=at)
    assert torch.equal(got, rope.rotate(q, position_ids=at[:, 3:]))


def test_more_queries_than_keys_are_refused():
    rope, q, k = RoPE(8), torch.randn(1, 2, 6, 8), torch.randn(1, 2, 5, 8)
    with pytest.raises(ValueError, match="must agree in batch, length"):
        rope.rotate_queries_with_cached_keys(q, k)
    with pytest.raises(ValueError, match="must stay below max_seq_len=16"):
        RoPE(8, 16).rotate_queries_with_cached_keys(q[:, :, :2], k, 12)


@pytest.mark.slow
def test_one_graph_for_every_length():
    rope = RoPE(8, None)
    rotate = rope.rotate_queries_with_cached_keys
    compiled = torch.compile(rotate, fullgraph=True, dynamic=True, backend="aot_eager")
    for queries, keys in ((2, 7), (3, 9)):
        q, k = torch.randn(1, 2, queries, 8), torch.randn(1, 2, keys, 8)
        for got, wanted in zip(compiled(q, k), rotate(q, k), strict=True):
            assert torch.equal(got, wanted)
