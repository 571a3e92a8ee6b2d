"""Calls of RoPE that are like the one before: checked once, and never wrong for it."""

import copy
import pickle
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from posenc import RoPE, scaling
from tokens import assert_as_if_first, token


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, nullcontext])
@pytest.mark.parametrize("size", [32, None], ids=["sized", "growing"])
@pytest.mark.parametrize(
    "rule", [None, scaling.YaRN(4.0, 16), scaling.DynamicNTK(4.0, 16)], ids=str
)
def test_token_by_token(rule, size, mode):
    rope = RoPE(8, size, scaling=rule)
    for offset in (*range(20), 31, 3):
        with mode():
            assert_as_if_first(rope, *token(), offset)
            assert_as_if_first(rope, *token(), position_ids=torch.tensor([[offset], [3]]))
            assert_as_if_first(rope, *token(), position_ids=torch.tensor([offset]))
            assert_as_if_first(rope, *token(), torch.tensor([offset, 31 - offset]))
    # A rule that asks for the length is asked each time.
    assert (rope._checked is None) == isinstance(rule, scaling.DynamicNTK)


@torch.no_grad()
def test_whatever_differs_is_looked_at():
    rope = RoPE(8, 32)
    rope(*token())
    for q, k in (token(heads=4), token(torch.bfloat16), (token()[0], token(torch.float64)[1])):
        assert_as_if_first(rope, q, k, 5)
        assert_as_if_first(rope, *token(), 5)
    assert_as_if_first(rope, *token(), torch.tensor([3, 4]))
    assert_as_if_first(rope, *token(), position_ids=torch.tensor([7]))
    assert_as_if_first(rope, *token(), 2, seq_len=9)


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("base", 500.0), ("interleaved", False), ("interleaved_out", False), ("rotary_dim", 4),
        ("last", True), ("scaling", scaling.Linear(2.0)), ("max_seq_len", 16),
        ("cos_cached", torch.ones(32, 3, dtype=torch.float64)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_changed_argument_is_heard(name, value):
    rope = RoPE(8, 32, rotary_dim=6)
    q, k = token()
    before = rope(q, k, 5)[0]
    setattr(rope, name, value)
    assert_as_if_first(rope, q, k, 5)
    if name != "max_seq_len":
        assert not torch.equal(rope(q, k, 5)[0], before)


@torch.no_grad()
def test_what_is_written_into_a_table_is_heard():
    rope = RoPE(8, 32)
    q, k = token()
    rope(q, k, 5)
    rope.cos_cached.zero_()
    rope.sin_cached.zero_()
    assert not rope(q, k, 5)[0].any()


@torch.no_grad()
@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda t: t.bfloat16(), ("cos_cached", "sin_cached")),
        (lambda t: t[:6].clone(), ("cos_cached", "sin_cached")),
        (lambda t: t.bfloat16(), ("sin_cached",)),
        (lambda t: t[:6].clone(), ("sin_cached",)),
        (lambda t: t[:, :2].clone(), ("sin_cached",)),
        (lambda t: t[:, :2], ("cos_cached",)),
        (lambda t: t[:, :2], ("sin_cached",)),
        (lambda t: t.view(torch.float32), ("cos_cached",)),
        (lambda t: t.view(torch.float32), ("sin_cached",)),
    ],
    ids=[
        "dtype",
        "rows",
        "dtype-of-one",
        "rows-of-one",
        "columns-of-one",
        "columns-of-cosines",
        "columns-of-sines",
        "bits-of-cosines",
        "bits-of-sines",
    ],
)
def test_tables_that_were_changed_underneath_are_made_again(change, names):
    """As DistributedDataParallel does for mixed precision."""
    rope = RoPE(8, 32)
    q, k = token()
    wanted = rope(q, k, 9)[0]
    for name in names:
        table = getattr(rope, name)
        table.data = change(table)
    assert torch.equal(rope(q, k, 9)[0], wanted)


def test_tables_that_do_not_fit_are_never_read():
    """Whether the call was checked before or not."""
    q, k = token()
    for bad in (torch.ones(32, 7), torch.ones(32, 32, 4)):
        rope = RoPE(8, 32)
        rope(q, k, 5)
        rope.cos_cached, rope.sin_cached = bad.double(), bad.double()
        with pytest.raises((ValueError, AssertionError)):
            rope(q, k, 5)
    rope = RoPE(8, 32)
    wanted = rope(q, k, 5)[0]
    rope.cos_cached, rope.sin_cached = (torch.ones(16, 4).double() for _ in range(2))
    assert torch.equal(rope(q, k, 5)[0], wanted), "too short, so made again"


def test_tables_made_under_a_fake_mode_are_made_again():
    q, k = token()
    with FakeTensorMode():
        rope = RoPE(8, 32)
    assert torch.equal(rope(q, k, 5)[0], RoPE(8, 32)(q, k, 5)[0])


@pytest.mark.parametrize("ids", [False, True])
def test_a_checkpoint_is_worked_out_again_after_the_table_has_grown(ids):
    rope = RoPE(8, None)

    def turn(q, k):
        where = {"position_ids": torch.arange(q.shape[2])} if ids else {}
        return rope(q, k, **where)[0].square().sum()

    xs = [torch.randn(1, 2, length, 8, requires_grad=True) for length in (4, 9, 30)]
    for x in xs:
        # Called once before, so that the short way is taken too.
        turn(x, x)
    rope.cos_cached = rope.sin_cached = None
    losses = [checkpoint(turn, x, x, use_reentrant=False) for x in xs]
    found = torch.autograd.grad(sum(losses), xs)
    wanted = torch.autograd.grad(sum(turn(x, x) for x in xs), xs)
    assert all(map(torch.equal, found, wanted))


def test_a_growing_table_is_taken_whole_where_nothing_is_recorded():
    """A launch on a GPU is found by the shape of the tables."""
    rope = RoPE(8, None)
    q, k = token()
    rope(q, k, 30)
    found = rope._again(rope._key(q, k), rope._checked, q, k, 5)
    assert found[0] is rope.cos_cached


@torch.no_grad()
def test_another_thread_changes_an_argument(monkeypatch):
    rope, check = RoPE(8, 32), RoPE._check

    def and_meanwhile(self, *arguments):
        self.base = 5.0
        check(self, *arguments)

    q, k = token()
    monkeypatch.setattr(RoPE, "_check", and_meanwhile)
    rope(q, k, 5)
    monkeypatch.undo()
    rope.base = 1e4
    assert_as_if_first(rope, q, k, 5)


@torch.no_grad()
@pytest.mark.parametrize(("name", "other"), [("interleaved", False), ("base", 5.0)])
def test_another_thread_changes_an_argument_and_back(name, other, monkeypatch):
    rope, remember, usual = RoPE(8, 32), RoPE._remember, getattr(RoPE(8, 32), name)
    key = RoPE._key

    def then_changed(self, *arguments):
        found = key(self, *arguments)
        setattr(self, name, other)
        return found

    def once_more(self, *arguments):
        remember(self, *arguments)
        setattr(self, name, usual)

    q, k = token()
    monkeypatch.setattr(RoPE, "_key", then_changed)
    monkeypatch.setattr(RoPE, "_remember", once_more)
    rope(q, k, 5)
    monkeypatch.undo()
    for _ in range(2):
        assert_as_if_first(rope, q, k, 5)


@torch.no_grad()
@pytest.mark.parametrize(
    "change",
    [
        lambda rope: rope.to("meta"),
        lambda rope: rope.rotate(torch.randn(1, 1, 900, 8)),
        lambda rope: setattr(rope, "cos_cached", None),
    ],
    ids=["moved", "grown", "taken-away"],
)
def test_no_tables_are_kept_for_it(change):
    rope = RoPE(8, None)
    q, k = token()
    rope(q, k)
    table = weakref.ref(rope.cos_cached)
    change(rope)
    assert table() is None
    assert_as_if_first(rope, q, k, 5)


def test_a_table_that_was_lent_can_be_copied_after():
    """One with a history is no leaf, and copies of it are refused."""
    rope = RoPE(8, 32)
    learned = rope.cos_cached * torch.ones((), dtype=torch.float64, requires_grad=True)
    torch.func.functional_call(rope, {"cos_cached": learned}, token())
    assert torch.equal(copy.deepcopy(rope).cos_cached, rope.cos_cached)


def test_a_table_that_became_another_kind_is_made_again():
    rope = RoPE(8, 32)
    q, k = token()
    wanted = rope(q, k, 3)[0]
    with FakeTensorMode():
        fake = torch.empty(32, 4, dtype=torch.float64)
    torch.utils.swap_tensors(rope.cos_cached, fake)
    assert torch.equal(rope(q, k, 3)[0], wanted)


@torch.no_grad()
def test_a_subclass_that_takes_other_rows_takes_them_always():
    class Later(RoPE):
        def _tables_for(self, who, x, offset, *rest, **keywords):
            return super()._tables_for(who, x, offset + 2, *rest, **keywords)

    class Back(RoPE):
        def _turn(self):
            return super()._turn().back()

    class Near(RoPE):
        def _tables_for(self, who, x, offset, *rest, **keywords):
            return super()._tables_for(who, x, min(offset, 7), *rest, **keywords)

    class Finite(RoPE):
        def _check(self, who, name, x):
            assert x.isfinite().all()

    q, k = token()
    rope, wanted = Later(8, 32), RoPE(8, 32)(q, k, 5)[0]
    for _ in range(3):
        assert torch.equal(rope(q, k, 3)[0], wanted)
    for kind in (Back, Near):
        rope = kind(8, 32)
        for offset in (3, 3, 9):
            assert_as_if_first(rope, q, k, offset)
    rope = Finite(8, 32)
    rope(q, k, 3)
    with pytest.raises(AssertionError):
        rope(q / 0, k, 3)


@torch.no_grad()
def test_what_was_wrong_is_still_wrong():
    rope = RoPE(8, 32)
    q, k = token()
    rope(q, k, 5)
    for offset, error in ((32, ValueError), (-1, ValueError), (True, TypeError), (1.0, TypeError)):
        with pytest.raises(error, match="RoPE"):
            rope(q, k, offset)
    for bad in (torch.randn(2, 1, 2, 8), torch.randn(2, 1, 1, 6), torch.zeros(2, 1, 1, 8).long()):
        with pytest.raises((ValueError, TypeError), match="RoPE"):
            rope(q, bad, 5)
    with pytest.raises(TypeError, match="RoPE"):
        rope(q, [1.0], 5)
    rope.max_seq_len = 4
    with pytest.raises(ValueError, match="max_seq_len=4"):
        rope(q, k, 5)


def test_forward_mode_and_transforms_go_their_own_way():
    rope = RoPE(8, 32)
    q, k = token()
    wanted = rope(q, k, 5)[0]
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, q)
        got = torch.autograd.forward_ad.unpack_dual(rope(dual, k, 5)[0])
        assert torch.equal(got.tangent, wanted)
    mapped = torch.func.vmap(lambda q, k: rope(q[None], k[None], 5)[0][0])(q, k)
    torch.testing.assert_close(mapped, wanted)
    with torch.inference_mode():
        assert torch.equal(rope(q, k, 5)[0], wanted)


def test_gradients_come_the_short_way_too(monkeypatch):
    rope = RoPE(8, 32)
    q, k = (x.requires_grad_() for x in token())
    wanted = torch.autograd.grad(sum(x.square().sum() for x in rope(q, k, 5)), (q, k))
    with torch.no_grad():
        rope(q, k, 5)
    monkeypatch.setattr(RoPE, "_tables_for", None)
    found = torch.autograd.grad(sum(x.square().sum() for x in rope(q, k, 5)), (q, k))
    assert all(map(torch.equal, found, wanted))
    with torch.no_grad():
        assert not rope(q, k, 5)[0].requires_grad
    # What was written into a table since is no longer what was rotated by.
    turned = rope(q, k, 5)[0]
    rope.cos_cached.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        turned.sum().backward()


def test_a_table_that_learns_gets_its_gradient():
    rope = RoPE(8, 32)
    q, k = token()
    rope(q, k, 5)
    rope.cos_cached.requires_grad_()
    rope(q, k, 5)[0].sum().backward()
    assert rope.cos_cached.grad[5].any()


def test_tables_of_inference_mode_are_made_again_for_a_gradient():
    rope = RoPE(8, 32)
    q, k = (x.requires_grad_() for x in token())
    wanted = rope(q, k, 5)[0]
    with torch.inference_mode():
        rope.cos_cached, rope.sin_cached = rope.cos_cached.clone(), rope.sin_cached.clone()
        rope(q, k, 5)
    turned = rope(q, k, 5)[0]
    assert torch.equal(turned, wanted)
    turned.sum().backward()


@torch.no_grad()
def test_a_shallow_copy_has_tables_of_its_own():
    rope = RoPE(8, 32)
    q, k = token()
    wanted = rope(q, k, 5)[0]
    other = copy.copy(rope)
    other.base = 50.0
    assert not torch.equal(other(q, k, 5)[0], wanted)
    assert torch.equal(rope(q, k, 5)[0], wanted)


@torch.no_grad()
def test_copies_and_pickles_go_on():
    rope = RoPE(8, 32)
    q, k = token()
    wanted = rope(q, k, 5)[0]
    for other in (copy.deepcopy(rope), pickle.loads(pickle.dumps(rope))):
        assert torch.equal(other(q, k, 5)[0], wanted)
        other.base = 50.0
        assert not torch.equal(other(q, k, 5)[0], wanted)
    assert torch.equal(rope(q, k, 5)[0], wanted)
    rope.to("meta").to_empty(device="cpu")
    assert torch.equal(rope(q, k, 5)[0], wanted)


def test_a_checkpoint_of_two_dtypes_is_made_again_after_the_table_grew():
    rope, q = RoPE(8, None), torch.randn(1, 1, 4, 8)
    k = torch.randn(1, 1, 4, 8).bfloat16().requires_grad_()
    for a, b in ((q, k), (k, q)):
        k.grad = None
        out = checkpoint(rope, a, b, use_reentrant=False)
        long = torch.randn(1, 1, 2 * rope.cos_cached.shape[0], 8)
        rope(long, long)
        sum(x.float().sum() for x in out).backward()
        assert k.grad is not None
