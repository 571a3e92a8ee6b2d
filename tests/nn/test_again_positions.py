"""Positions in tensors of calls like the one before: never wrong for being checked once."""

import pytest
import torch

from posenc import RoPE
from tokens import assert_as_if_first, token


@torch.no_grad()
def test_a_number_is_no_position_ids_after_an_offset_either():
    rope = RoPE(8, 32)
    q, k = token()
    rope(q, k, 3)
    for bad in (5, 0, [3], 1.0):
        with pytest.raises(TypeError, match="position_ids must be an integer tensor"):
            rope(q, k, position_ids=bad)


@torch.no_grad()
def test_the_limit_holds_where_the_table_is_longer():
    big, q, k = RoPE(8, 64), *token()
    for at in ({"position_ids": torch.tensor([[3], [4]])}, {"offset": torch.tensor([3, 4])}):
        rope = RoPE(8, 32)
        rope(q, k, **at)
        rope.cos_cached, rope.sin_cached = big.cos_cached, big.sin_cached
        assert_as_if_first(rope, q, k, **at)
        ((name, where),) = at.items()
        with pytest.raises(ValueError, match="below max_seq_len=32, got 39"):
            rope(q, k, **{name: where + 36})


@torch.no_grad()
@pytest.mark.parametrize("size", [(2, 3, 0, 8), (0, 3, 2, 8), (2, 0, 2, 8)], ids=str)
def test_positions_of_nothing_are_looked_at_again(size):
    rope, q, k = RoPE(8, None), torch.randn(size), torch.randn(size).bfloat16()
    rope(q, k, position_ids=torch.arange(size[2]))
    assert rope._checked is None


@torch.no_grad()
@pytest.mark.parametrize("size", [32, None])
def test_an_empty_batch_has_empty_positions(size):
    q, k = torch.randn(0, 3, 5, 8), torch.randn(0, 1, 5, 8)
    none = torch.zeros(0, dtype=torch.int64)
    for at in ({"offset": none}, {"position_ids": none[:, None].expand(0, 5)}):
        a, b = RoPE(8, size)(q, k, **at)
        assert (a.shape, b.shape) == (q.shape, k.shape)


@torch.no_grad()
@pytest.mark.parametrize("size", [32, None], ids=["sized", "growing"])
@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("offset", 5), ("offset", torch.tensor([5, 9])),
        ("position_ids", torch.tensor([5])), ("position_ids", torch.tensor([[5], [9]])),
    ],
    ids=str,
)  # fmt: skip
def test_it_is_the_short_way(name, first, size, monkeypatch):
    rope = RoPE(8, size)
    q, k = token()
    rope(q, k, **{name: first})
    wanted = RoPE(8, 32)(q, k, **{name: first - 1})[0]
    monkeypatch.setattr(RoPE, "_tables_for", None)
    assert torch.equal(rope(q, k, **{name: first - 1})[0], wanted)
    with pytest.raises(TypeError):
        rope(q, k, seq_len=7, **{name: first})


@torch.no_grad()
@pytest.mark.parametrize("bad", [-1, 32, 2**40])
def test_positions_that_the_tables_lack_are_refused_as_ever(bad):
    rope = RoPE(8, 32)
    q, k = token()
    for good, wrong in (
        ({"position_ids": torch.tensor([[3], [4]])}, {"position_ids": torch.tensor([[3], [bad]])}),
        ({"offset": torch.tensor([3, 4])}, {"offset": torch.tensor([bad, 3])}),
    ):
        with pytest.raises(ValueError, match="RoPE: positions must") as first:
            RoPE(8, 32)(q, k, **wrong)
        rope(q, k, **good)
        with pytest.raises(ValueError, match="RoPE: positions must") as again:
            rope(q, k, **wrong)
        assert str(first.value) == str(again.value)
        assert_as_if_first(rope, q, k, **good)


@torch.no_grad()
def test_positions_past_a_growing_table_make_it_grow():
    rope = RoPE(8, None)
    q, k = token()
    rope(q, k, position_ids=torch.tensor([[3], [4]]))
    assert_as_if_first(rope, q, k, position_ids=torch.tensor([[3], [400]]))
    assert rope.cos_cached.shape[0] > 400
    with pytest.raises(ValueError, match="must not be negative"):
        rope(q, k, position_ids=torch.tensor([[3], [-1]]))


@torch.no_grad()
def test_offsets_are_not_taken_for_positions_of_the_same_shape():
    rope = RoPE(8, 32)
    q, k = token()
    rope(q, k, position_ids=torch.tensor([4]))
    with pytest.raises(ValueError, match=r"have shape \(2,\)"):
        rope(q, k, torch.tensor([4]))
    with pytest.raises(ValueError, match="exclude each other"):
        rope(q, k, 1, position_ids=torch.tensor([4]))
    square = torch.randn(2, 1, 2, 8)
    at = torch.tensor([4, 9])
    assert_as_if_first(rope, square, square, position_ids=at)
    assert_as_if_first(rope, square, square, at)
    assert_as_if_first(rope, square, square, position_ids=at[None])
    assert_as_if_first(rope, square, square, position_ids=at[:, None].expand(2, 2))
    assert_as_if_first(rope, square, square, position_ids=at.int())
