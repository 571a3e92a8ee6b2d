"""RoPE as models use it: rules, parts of a head, in place, and what it refuses."""

import warnings

import pytest
import torch

import oracles
from posenc import RoPE
from posenc.functional import rotary as functional_rotary
from posenc.functional import rotary_pos_embedding
from posenc.nn import rope as nn_rope
from posenc.ops import native
from support.assertions import COMPILERS, compilations
from support.rules import ALL, BY_LENGTH, LONG, assert_rotated_by


@ALL
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_rule_decides_rates_and_gain(rule, dtype):
    rope = RoPE(8, 256, scaling=rule)
    q, k = torch.randn(2, 3, 10, 8).to(dtype), torch.randn(2, 1, 10, 8).to(dtype)
    for offset in (0, 3, 40):
        at, seq_len = torch.arange(offset, offset + 10), offset + 10
        rates, gain = rope.scaled_inv_freq(seq_len), rope.attention_factor(seq_len)
        for got, x in zip(rope(q, k, offset), (q, k), strict=True):
            assert_rotated_by(got, x, at, rates, gain)


@COMPILERS
def test_one_graph_serves_lengths_on_both_sides_of_a_rules_length(backend):
    ropes = [RoPE(8, 256, scaling=rule) for rule in BY_LENGTH]

    def rotated(q, k):
        return [rope(q, k) for rope in ropes]

    calls = [(torch.randn(2, 3, n, 8), torch.randn(2, 1, n, 8)) for n in (4, 16, 17, 64)]
    assert compilations(rotated, calls, dynamic=True, backend=backend) == 1


@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
def test_part_of_a_head_rotates_and_the_rest_passes(last):
    rope, x = RoPE(16, 64, rotary_dim=8, last=last), torch.randn(1, 2, 5, 16)
    got = rope.rotate(x, 3)
    rotated, rest = (slice(8, 16), slice(0, 8)) if last else (slice(0, 8), slice(8, 16))
    assert torch.equal(got[..., rest], x[..., rest])
    assert torch.equal(got[..., rotated], RoPE(8, 64).rotate(x[..., rotated], 3))


def test_deepseek_goes_in_interleaved_and_comes_out_in_halves():
    x = torch.randn(1, 2, 5, 8)
    got = RoPE(8, 64, interleaved_out=False).rotate(x, 3)
    plain = RoPE(8, 64).rotate(x, 3)
    assert torch.equal(got, torch.cat((plain[..., 0::2], plain[..., 1::2]), dim=-1))


def test_tables_serve_every_layer():
    from posenc.functional import rotate_qk

    rope, q, k = RoPE(8, 64, scaling=LONG), torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    ids = torch.tensor([[0, 1, 2, 3, 4], [20, 21, 22, 23, 24]])
    cos, sin = rope.tables(ids)
    for got, wanted in zip(rotate_qk(q, k, cos, sin), rope(q, k, position_ids=ids), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda r, x: r.rerotate(x, [0], torch.arange(3)), TypeError, "from_positions must be"),
        (lambda r, x: r.rerotate(x, torch.arange(3), torch.arange(2)), ValueError, "to_positions"),
        (lambda r, x: r.shift(x, 1.5), TypeError, "by must be an int"),
        (
            lambda r, x: r.shift(x, torch.arange(5)),
            ValueError,
            "by must be an int, or an integer tensor of shape",
        ),
        (lambda r, x: r.rotate(x, 63), ValueError, "below max_seq_len=64"),
        (lambda r, x: r(x, None), TypeError, "Call rotate for one tensor"),
        (lambda r, x: r.apply(x), TypeError, "Call rotate for one tensor"),
        (lambda r, x: r(x, torch.arange(3)), TypeError, "positions as position_ids="),
        (lambda r, x: r(x, x, torch.arange(3)), ValueError, "tokens as position_ids="),
        (lambda r, x: r(x, x, torch.arange(3)[None]), ValueError, "tokens as position_ids="),
        (lambda r, x: r.rotate(x[..., :4]), ValueError, "head_dim of x must be 8"),
        (lambda r, x: r.tables([1, 2]), TypeError, "position_ids must be a tensor"),
        (lambda r, x: r.rotate(x, 1, position_ids=torch.rand(3)), ValueError, "exclude each other"),
        (lambda r, x: r.scaled_inv_freq(2.5), TypeError, "seq_len must be an int"),
        (lambda r, x: RoPE(8, rotary_dim=10), ValueError, "rotary_dim must be at most head_dim=8"),
        (lambda r, x: RoPE(8, axes="mrope"), TypeError, "axes must be of type Axes"),
    ],
)
def test_bad_input_is_refused(call, error, text):
    rope = RoPE(8, 64, scaling=LONG)
    with pytest.raises(error, match=text):
        call(rope, torch.randn(1, 1, 3, 8))


def test_the_farthest_position_has_a_table():
    rope, at = RoPE(8, None), torch.tensor([2**31])
    x = torch.randn(1, 1, 1, 8)
    exact, _ = oracles.exact_cos_sin([2**31], 8)
    assert (rope.tables(at)[0] - exact).abs().max() < 1e-14
    rotated = rope.rotate(x, position_ids=at)
    assert torch.equal(rope.rerotate(rotated, at, at), rotated)


def test_floating_positions_may_require_a_gradient():
    at = torch.arange(3.0).requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RoPE(8, None).rotate(torch.ones(1, 1, 3, 8), position_ids=at).sum().backward()
    assert at.grad is not None


def test_integer_queries_or_keys_are_refused_when_a_gradient_is_recorded():
    x = torch.randn(1, 1, 3, 8, requires_grad=True)
    for name, q, k in (("q", x.long(), x), ("k", x, x.long()), ("q", x.int(), x)):
        with pytest.raises(TypeError, match=f"{name} must be a float16"):
            RoPE(8, 32)(q, k)


def test_queries_of_inference_mode_may_come_with_keys_that_require_a_gradient():
    k = torch.randn(1, 1, 3, 8, requires_grad=True)
    with torch.inference_mode():
        q = torch.randn(1, 1, 3, 8, dtype=torch.float64)
    for rope in (RoPE(8, 32), RoPE(8, None)):
        rope(q, k)[1].sum().backward()
        assert torch.allclose(k.grad, rope.unrotate(torch.ones(1, 1, 3, 8)), atol=1e-6)
        k.grad = None


def test_keywords_override_the_config():
    rope = RoPE.from_config({"head_dim": 64}, head_dim=128)
    assert (rope.head_dim, rope.rotary_dim) == (128, None)
    assert RoPE.from_config({"head_dim": 64}, head_dim=32).scaled_inv_freq().shape == (16,)


def test_no_position_is_past_two_to_the_31():
    rope, x = RoPE(8, None), torch.randn(2, 1, 4, 8)
    far = 2**31 - 3
    wanted = rope(x, x, position_ids=far + torch.arange(4))[0]
    for offset in (far, torch.tensor([far, far])):
        # The second call is like the first, and is not checked again.
        for _ in range(2):
            assert torch.equal(rope(x, x, offset)[0], wanted)
            with pytest.raises(
                ValueError, match=r"positions must be at most 2\*\*31, got 2147483649"
            ):
                rope(x, x, offset + 1)
    with pytest.raises(ValueError, match="must be finite and at most 2"):
        rope(x, x, position_ids=torch.tensor([0.0, 1.0, 2.0, 2.0**32]))


@pytest.mark.parametrize("size", [64, None], ids=["sized", "growing"])
def test_in_place_is_the_same_rotation(size):
    rope = RoPE(8, size, rotary_dim=4, interleaved=False)
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    for where in ({"offset": 3}, {"position_ids": torch.tensor([3, 1, 4, 1, 5])}, {}):
        wanted, (a, b) = rope(q, k, **where), (q.clone(), k.clone())
        found = rope.forward_(a, b, **where)
        assert found[0] is a
        assert found[1] is b
        assert torch.equal(a, wanted[0])
        assert torch.equal(b, wanted[1])
    before = q.clone()
    with pytest.raises(ValueError, match=r"negative|below max_seq_len"):
        rope.forward_(q, k, position_ids=torch.tensor([0, -1, 2, 3, 64]))
    assert torch.equal(q, before)


@pytest.mark.skipif(not native.available, reason="Python checks what it computes")
@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize(
    "where",
    [
        {"offset": 3},
        {"offset": torch.tensor([3, 4])},
        {"position_ids": torch.arange(5)},
        {"position_ids": torch.arange(10).view(2, 5)},
    ],
    ids=["offset", "offsets", "ids", "ids-of-each"],
)
def test_an_ordinary_call_is_checked_once(monkeypatch, where, last):
    """By the op: what checks in words, for users, is for calls that it refuses."""
    rope, q, k = (
        RoPE(8, 64, rotary_dim=4, last=last),
        torch.randn(2, 3, 5, 8),
        torch.ones(2, 1, 5, 8),
    )
    caches, slots = torch.zeros(2, 1, 10, 1, 8), torch.arange(10).view(2, 5)
    cos, sin = rope.tables(torch.arange(64))
    expected = rope(q, k, **where)

    def refuse(*arguments, **keywords):
        raise AssertionError("checked again")

    for module in (functional_rotary, nn_rope):
        monkeypatch.setattr(module, "check_heads", refuse)
    for rotated in (
        rope(q, k, **where),
        rope.forward_(q.clone(), k.clone(), **where),
        (rope.rotate(q, **where), rope.rotate(k, **where)),
        functional_rotary.rotate_qk(q, k, cos, sin, last=last, **where),
        (rope.rotate_and_cache(q, k, k, *caches, slots, **where), expected[1]),
    ):
        assert all(torch.equal(a, b) for a, b in zip(rotated, expected, strict=True))
    with pytest.raises(AssertionError, match="checked again"):
        rope(q, k[..., :4], **where)


def test_tokens_may_come_before_heads():
    plain, swapped = RoPE(8, 64), RoPE(8, 64, seq_dim=1)
    q, k = torch.randn(2, 5, 4, 8), torch.randn(2, 5, 2, 8)
    wanted = [y.transpose(1, 2) for y in plain(q.transpose(1, 2), k.transpose(1, 2), 3)]
    found = swapped(q, k, 3)
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])
    assert found[0].is_contiguous()
    assert torch.equal(swapped.rotate(q, 3), wanted[0])
    assert torch.allclose(swapped.unrotate(found[0], 3), q, atol=1e-6)
    old, new = torch.arange(5) + 3, torch.arange(5) + 9
    assert torch.allclose(swapped.rerotate(found[1], old, new), swapped.rotate(k, 9), atol=1e-6)
    assert torch.allclose(swapped.shift(found[1], 6), swapped.rotate(k, 9), atol=1e-6)
    swapped.forward_(q, k, 3)
    assert torch.equal(q, found[0])
    with pytest.raises(ValueError, match="seq_dim must be -2"):
        RoPE(8, seq_dim=0)


def test_tables_are_rounded_once_to_the_dtype_that_is_asked_for():
    rope, at = RoPE(8, None), torch.arange(50)
    exact = rope.tables(at)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for got, wanted in zip(rope.tables(at, dtype=dtype), exact, strict=True):
            assert got.dtype == dtype
            nearest = [oracles.rounded(x, dtype) for x in wanted.flatten().tolist()]
            assert got.flatten().tolist() == nearest
    with pytest.raises(TypeError, match="dtype must be one of"):
        rope.tables(at, dtype=torch.int64)


def test_rope_is_precomputed_and_never_rebuilt():
    rope = RoPE(8)
    assert rope.cos_cached.shape == (2048, 4)
    before = rope.cos_cached.data_ptr()
    q = torch.randn(1, 1, 4, 8)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        rope.apply(q.to(dtype), q.to(dtype), offset=2044)
    assert rope.cos_cached.data_ptr() == before


def test_calling_and_applying_are_the_same():
    rope, q, k = RoPE(8), torch.randn(2, 3, 4, 8), torch.randn(2, 1, 4, 8)
    ids = torch.tensor([[0, 1, 2, 3], [5, 4, 3, 2]])
    for a, b in zip(rope(q, k, 3), rope.apply(q, k, offset=3), strict=True):
        assert torch.equal(a, b)
    for x, got in zip((q, k), rope.apply(q, k, position_ids=ids), strict=True):
        assert torch.equal(got, rotary_pos_embedding(x, ids))


def test_a_models_own_apply_still_reaches_every_module():
    """`model.apply(init)` calls `apply` of each child with a function: RoPE must pass it on."""
    model, seen = torch.nn.Sequential(torch.nn.Linear(2, 2), RoPE(8)), []
    model.apply(lambda module: seen.append(type(module).__name__))
    assert seen == ["Linear", "RoPE", "Sequential"]


@pytest.mark.parametrize(
    ("q_shape", "k_shape", "problem"),
    [
        ((1, 2, 3, 8), (1, 2, 4, 8), "agree in batch, length, head_dim and device"),
        ((2, 2, 3, 8), (1, 2, 3, 8), "agree in batch, length, head_dim and device"),
        ((1, 2, 3, 8), (1, 2, 3, 6), "head_dim of k must be 8, got 6"),
        ((1, 2, 3, 6), (1, 2, 3, 8), "head_dim of q must be 8, got 6"),
        ((2, 3, 8), (1, 2, 3, 8), r"q must have shape \(B, H, L, D\)"),
        ((1, 2, 3, 8), (3, 8), r"k must have shape \(B, H, L, D\)"),
    ],
)
def test_rope_refuses_shapes_that_do_not_belong_together(q_shape, k_shape, problem):
    with pytest.raises(ValueError, match=problem):
        RoPE(8).apply(torch.ones(q_shape), torch.ones(k_shape))


@COMPILERS
def test_one_graph_serves_every_form_of_positions(backend):
    rope = RoPE(8, 128)

    def rotated(q, k, ids, shared_ids, offsets):
        by_ids = [rope(q, k, position_ids=at) for at in (ids, shared_ids)]
        return *by_ids, rope(q, k, offsets)

    offsets, calls = torch.tensor([3, 100]), []
    for n in (5, 3, 17):
        q, k = torch.randn(2, 4, n, 8), torch.randn(2, 2, n, 8)
        calls.append((q, k, torch.randint(0, 128, (2, n)), torch.arange(n), offsets))
    assert compilations(rotated, calls, dynamic=True, backend=backend) == 1
