"""Rules that depend on the length of the sequence, and keys of a cache, rotated or not."""

import pytest
import torch

import oracles
from posenc import RoPE, axes, scaling
from support.assertions import assert_within_ulps
from support.rules import ALL, DEPENDENT, FIXED, assert_rotated_by, name

BY_NAME = {
    "plain": None,
    "by-length": scaling.DynamicNTK(2.0, original_length=6),
    "gain": scaling.YaRN(4.0, original_length=8),
}


@DEPENDENT
def test_the_rotation_depends_on_the_length_and_not_on_earlier_calls(rule):
    rope, fresh = RoPE(8, 256, scaling=rule), RoPE(8, 256, scaling=rule)
    x = torch.randn(1, 1, 4, 8)
    rope(x, x, 100)
    assert torch.equal(rope.rotate(x), fresh.rotate(x))
    assert not torch.equal(rope.rotate(x, 2, seq_len=100), rope.rotate(x, 2))
    ids = torch.tensor([0, 5, 99, 3])
    assert torch.equal(
        rope.rotate(x, position_ids=ids), rope.rotate(x, position_ids=ids, seq_len=100)
    )


@DEPENDENT
def test_each_sequence_may_have_its_own_length(rule):
    rope, x = RoPE(8, 256, scaling=rule), torch.randn(3, 2, 4, 8)
    lengths = [8, 17, 90]
    got = rope.rotate(x, 2, seq_len=torch.tensor(lengths))
    for b, length in enumerate(lengths):
        alone = rope.rotate(x[b : b + 1], 2, seq_len=length)
        assert torch.allclose(got[b : b + 1], alone, rtol=0, atol=1e-6)


class TestCachedKeys:
    """Keys in a cache are moved by one rotation more."""

    @ALL
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
    @pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "half"])
    def test_rerotating_is_rotating_from_scratch(self, rule, dtype, interleaved):
        """The first rounding is rotated too: up to 0.71 ulp in a channel, and 0.5 of its own."""
        rope = RoPE(8, 256, scaling=rule, interleaved=interleaved)
        k = torch.randn(2, 3, 6, 8).to(dtype)
        old = torch.tensor([[0, 1, 2, 9, 10, 11], [3, 4, 5, 6, 7, 8]])
        new = torch.tensor([[0, 1, 2, 3, 4, 5], [40, 41, 42, 43, 44, 45]])
        cached = rope.rotate(k, position_ids=old, seq_len=12)
        got = rope.rerotate(cached, old, new, from_seq_len=12, to_seq_len=46)
        rates, gain = rope.scaled_inv_freq(46), rope.attention_factor(46)
        assert_rotated_by(got, k, new, rates, gain, ulps=1.21, interleaved=interleaved)

    @pytest.mark.parametrize("rule", FIXED, ids=name)
    @pytest.mark.parametrize("by", [-3, 0, 17])
    def test_shifting_is_rotating_at_other_positions(self, rule, by):
        rope, k = RoPE(8, 256, scaling=rule), torch.randn(2, 1, 5, 8)
        got = rope.shift(rope.rotate(k, 10), by)
        at = torch.arange(10 + by, 15 + by)
        assert_rotated_by(got, k, at, rope.scaled_inv_freq(), rope.attention_factor(), ulps=1.21)

    def test_each_sequence_shifts_by_its_own(self):
        rope, k = RoPE(8, 256), torch.randn(2, 1, 5, 8)
        got = rope.shift(rope.rotate(k, 10), torch.tensor([-10, 5]))
        at = torch.stack((torch.arange(5), torch.arange(15, 20)))
        assert_rotated_by(got, k, at, rope.scaled_inv_freq(), ulps=1.21)

    @ALL
    def test_unrotating_gives_the_keys_back(self, rule):
        rope, k = RoPE(8, 256, scaling=rule), torch.randn(2, 1, 5, 8)
        for keywords in ({"offset": 7}, {"position_ids": torch.tensor([3, 50, 2, 0, 9])}):
            back = rope.unrotate(rope.rotate(k, **keywords), **keywords)
            size = oracles.pair_magnitude(k, 4, interleaved=True)
            assert_within_ulps(back, k.double(), 1.21, size)

    def test_deepseek_keys_stay_in_halves(self):
        rope, k = RoPE(8, 64, interleaved_out=False), torch.randn(1, 1, 5, 8)
        assert torch.allclose(rope.shift(rope.rotate(k, 3), 4), rope.rotate(k, 7), atol=1e-6)
        assert torch.allclose(rope.unrotate(rope.rotate(k, 3), 3), k, atol=1e-6)


@DEPENDENT
@pytest.mark.parametrize("lengths", [[9], [9, 20], [9, 20, 40, 80]], ids=str)
def test_there_is_one_length_for_each_sequence(rule, lengths):
    """Tables of fewer sequences than there are would be read past their end."""
    rope, x = RoPE(8, scaling=rule), torch.randn(3, 2, 4, 8)
    at = torch.arange(4)
    for call in (
        lambda n: rope.rotate(x, seq_len=n),
        lambda n: rope.shift(x, 1, seq_len=n),
        lambda n: rope.rerotate(x, at, at, to_seq_len=n),
    ):
        with pytest.raises(
            ValueError, match=r"seq_len must be an int, or an integer tensor of shape \(3,\)"
        ):
            call(torch.tensor(lengths))
        with pytest.raises(ValueError, match="seq_len must be at least 0"):
            call(torch.tensor([3, -5, 4]))


@pytest.mark.parametrize("wrong", ["a", -1, 1.5, torch.tensor([5.0])], ids=str)
def test_a_length_is_checked_without_a_rule_too(wrong):
    with pytest.raises((TypeError, ValueError), match="seq_len must be"):
        RoPE(8).rotate(torch.randn(1, 1, 4, 8), seq_len=wrong)


@DEPENDENT
def test_the_length_of_cached_keys_is_that_of_their_positions(rule):
    rope, k, old = RoPE(8, scaling=rule), torch.randn(1, 1, 4, 8), torch.arange(4) + 30
    moved = rope.rerotate(rope.rotate(k, position_ids=old), old, old + 1)
    assert torch.allclose(moved, rope.rotate(k, position_ids=old + 1), atol=2e-6)
    with pytest.raises(ValueError, match="seq_len must be given"):
        rope.shift(k, 1)


@DEPENDENT
def test_a_sequence_rotates_as_it_would_in_a_batch_of_one(rule):
    """16 is the trained length: one is short, one long, and one longer."""
    rope, starts = RoPE(8, None, scaling=rule), torch.tensor([3, 20, 57])
    x, ids = torch.randn(3, 2, 4, 8), starts[:, None] + torch.tensor([1, 3, 0, 2])
    alone = torch.cat([rope.rotate(x[i : i + 1], int(starts[i])) for i in range(3)])
    assert torch.equal(rope.rotate(x, starts), alone)
    assert torch.equal(rope(x, x, starts)[1], alone)
    alone = [rope.rotate(x[i : i + 1], position_ids=ids[i : i + 1]) for i in range(3)]
    for at in (ids, ids.double()):
        assert torch.equal(rope.rotate(x, position_ids=at), torch.cat(alone))
        back = rope.unrotate(x[1:2], position_ids=at[1:2])
        assert torch.equal(rope.unrotate(x, position_ids=at)[1:2], back)
    # Far away it is the same up to float64's error in the angle.
    far, wide = torch.tensor([3, 20, 100_000]), x.double()
    alone = torch.cat([rope.rotate(wide[i : i + 1], int(far[i])) for i in range(3)])
    assert (rope.rotate(wide, far) - alone).abs().max() < 1e-10
    moved = rope.rerotate(x, ids, ids + 9)
    for i in range(3):
        each = rope.rerotate(x[i : i + 1], ids[i : i + 1], ids[i : i + 1] + 9)
        assert torch.equal(moved[i : i + 1], each)


@DEPENDENT
def test_an_empty_batch_gives_an_empty_result(rule):
    rope, x = RoPE(8, scaling=rule), torch.randn(0, 2, 4, 8)
    assert rope.rotate(x, torch.zeros(0, dtype=torch.long)).shape == x.shape
    assert rope.rotate(x, position_ids=torch.zeros(0, 4, dtype=torch.long)).shape == x.shape


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
@pytest.mark.parametrize("rule", BY_NAME)
def test_queries_of_a_cache_without_rotation_are_at_its_last_keys(rule, where, queries):
    for seq_dim, length in ((-2, 64), (1, None)):
        rope = RoPE(8, length, scaling=BY_NAME[rule], seq_dim=seq_dim)
        whole, k = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 9, 8)
        if seq_dim == 1:
            whole, k = whole.transpose(1, 2), k.transpose(1, 2)
        q = whole.narrow(seq_dim, 9 - queries, queries)
        got, keys = rope.rotate_queries_with_cached_keys(q, k, **where)
        wanted, same = rope(whole, k, **where)
        assert torch.equal(keys, same)
        assert torch.equal(got, wanted.narrow(seq_dim, 9 - queries, queries))


def test_coordinates_of_cached_keys_are_those_of_the_queries_too():
    rope, q, k = RoPE(8, axes=axes.Axial(2)), torch.randn(1, 2, 3, 8), torch.randn(1, 2, 6, 8)
    at = torch.randn(2, 6)
    got, _ = rope.rotate_queries_with_cached_keys(q, k, position_ids=at)
    assert torch.equal(got, rope.rotate(q, position_ids=at[:, 3:]))


@pytest.mark.parametrize("length", [None, 16])
def test_no_sequences_have_no_cached_keys(length):
    """A server's batch may be empty, with an offset for each sequence that there is not."""
    rope, at = RoPE(8, length), torch.zeros(0, dtype=torch.int64)
    q, k = torch.zeros(0, 4, 2, 8), torch.zeros(0, 2, 7, 8)
    for where in ({"offset": at}, {"position_ids": torch.zeros(0, 7, dtype=torch.int64)}, {}):
        got, keys = rope.rotate_queries_with_cached_keys(q, k, **where)
        assert (got.shape, keys.shape) == (q.shape, k.shape)


def test_more_queries_than_keys_are_refused():
    rope, q, k = RoPE(8), torch.randn(1, 2, 6, 8), torch.randn(1, 2, 5, 8)
    with pytest.raises(ValueError, match="must agree in batch, length"):
        rope.rotate_queries_with_cached_keys(q, k)
    with pytest.raises(ValueError, match="must stay below max_seq_len=16"):
        RoPE(8, 16).rotate_queries_with_cached_keys(q[:, :, :2], k, 12)
