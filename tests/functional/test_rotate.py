"""Rotation by tables of the caller's own, and QK-norm with it."""

import pytest
import torch

import oracles
from oracles import tables
from posenc.functional import qk_norm_rope, rotate_, rotate_qk


def test_one_graph_normalises_every_length():
    cos, sin = tables(40, 4)
    for weight in (torch.rand(8), torch.rand(32)):
        compiled = torch.compile(qk_norm_rope, backend="aot_eager", fullgraph=True, dynamic=True)
        for length in (11, 13):
            q = torch.randn(3, 4, length, 8)
            wanted = qk_norm_rope(q, q, weight, weight, cos, sin)[0]
            assert torch.equal(compiled(q, q, weight, weight, cos, sin)[0], wanted)


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("form", ["float32", "of complex"])
def test_of_a_long_table_only_the_rows_that_are_needed_are_converted(form, batched):
    """All of these would take 64 GiB."""
    q, k, rows = torch.randn(2, 3, 4, 8), torch.randn(2, 1, 4, 8), 2**31
    row = torch.rand(2, 4).double()
    rotated = torch.complex(*row)
    parts = list(row.float()) if form == "float32" else [rotated.real, rotated.imag]
    cos, sin = (part.expand(2, rows, 4) if batched else part.expand(rows, 4) for part in parts)
    small = [part.double().expand(40, 4) for part in parts]
    wanted = rotate_qk(q, k, *small, offset=3)
    ids = torch.tensor([[5, rows - 1, 0, 7]])
    for at in ({"offset": rows - 4}, {"position_ids": ids}, {"position_ids": ids.expand(2, 4)}):
        for got, exact in zip(rotate_qk(q, k, cos, sin, **at), wanted, strict=True):
            assert torch.equal(got, exact)
    for at in ({"offset": rows - 3}, {"position_ids": ids + 1}, {"position_ids": ids - 1}):
        with pytest.raises(ValueError, match="positions must"):
            rotate_qk(q, k, cos, sin, **at)


def test_offsets_and_position_ids_give_the_same_rotation():
    q, k = torch.randn(2, 3, 4, 8), torch.randn(2, 1, 4, 8)
    cos, sin = tables(12, 4)
    offsets = torch.tensor([2, 7], dtype=torch.int32)
    ids = offsets[:, None] + torch.arange(4)
    by_offsets = rotate_qk(q, k, cos, sin, offset=offsets)
    for a, b in zip(by_offsets, rotate_qk(q, k, cos, sin, position_ids=ids), strict=True):
        assert torch.equal(a, b)


def test_deepseek_takes_interleaved_and_gives_halves():
    x = torch.randn(1, 2, 3, 8)
    cos, sin = tables(3, 4)
    got, _ = rotate_qk(x, x, cos, sin, interleaved=True, interleaved_out=False)
    halves = torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)
    wanted, _ = rotate_qk(halves, halves, cos, sin, interleaved=False)
    assert torch.equal(got, wanted)


def test_last_rotates_the_last_channels():
    x = torch.randn(1, 2, 3, 12)
    cos, sin = tables(3, 4)
    got, _ = rotate_qk(x, x, cos, sin, last=True)
    inner, _ = rotate_qk(x[..., 4:], x[..., 4:], cos, sin)
    assert torch.equal(got, torch.cat((x[..., :4], inner), dim=-1))


def test_tables_with_a_lazy_sign_are_resolved():
    x = torch.randn(1, 1, 3, 8)
    cos, sin = tables(3, 4)
    backwards, _ = rotate_qk(x, x, cos, torch._neg_view(sin))
    there_and_back, _ = rotate_qk(backwards.double(), backwards.double(), cos, sin)
    torch.testing.assert_close(there_and_back, x.double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("whole", [False, True], ids=["each-head", "all-heads"])
def test_qk_norm_is_norm_then_rotation(whole):
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    cos, sin = tables(9, 4)
    weights = [torch.randn(x.shape[1] * 8 if whole else 8) for x in (q, k)]
    got = qk_norm_rope(q, k, *weights, cos, sin, offset=2, eps=1e-5, zero_centered=True)
    for x, weight, y in zip((q, k), weights, got, strict=True):
        wide = x.double()
        if whole:
            flat = wide.transpose(1, 2).flatten(2)
            normed = torch.nn.functional.rms_norm(flat, flat.shape[2:], 1 + weight.double(), 1e-5)
            normed = normed.unflatten(2, (-1, 8)).transpose(1, 2)
        else:
            normed = torch.nn.functional.rms_norm(wide, (8,), 1 + weight.double(), 1e-5)
        exact = oracles.rotate(normed, cos[2:7], sin[2:7], interleaved=True)
        torch.testing.assert_close(y.double(), exact, rtol=1e-6, atol=1e-7)


def test_bad_input_is_refused():
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    cos, sin = tables(6, 4)
    with pytest.raises(ValueError, match="rotate_qk: q and k must agree"):
        rotate_qk(q, k[:, :, :4], cos, sin)
    with pytest.raises(ValueError, match=r"x must have shape \(B, H, L, D\)"):
        rotate_(q[0], cos, sin)
    with pytest.raises(ValueError, match="cos and sin must have one shape"):
        rotate_qk(q, k, cos, sin[:5])
    with pytest.raises(ValueError, match="1 <= P <= 4"):
        rotate_qk(q, k, *tables(6, 5))
    with pytest.raises(ValueError, match=r"\(2, T, P\)"):
        rotate_qk(q, k, cos.expand(3, 6, 4), sin.expand(3, 6, 4))
    with pytest.raises(ValueError, match=r"below the rows of cos=6, got 6.\n.*seq_dim=1"):
        rotate_qk(q, k, cos, sin, offset=2)
    with pytest.raises(
        ValueError, match="rotate_qk: positions must stay below the rows of cos=6, got 9"
    ):
        rotate_qk(q, k, cos, sin, position_ids=torch.tensor([0, 1, 9, 2, 3]))
    with pytest.raises(
        ValueError, match=r"offset must be an int, or an integer tensor of shape \(2,\)"
    ):
        rotate_qk(q, k, cos, sin, offset=torch.tensor([1, 2, 3]))
    with pytest.raises(ValueError, match="exclude each other"):
        rotate_qk(q, k, cos, sin, offset=torch.tensor([0, 0]), position_ids=torch.arange(5))
    with pytest.raises(TypeError, match="cos must be a float16"):
        rotate_qk(q, k, cos.long(), sin.long())
    with pytest.raises(TypeError, match="last must be True or False"):
        rotate_qk(q, k, cos, sin, last=1)
    with pytest.raises(TypeError, match="last must be True or False"):
        rotate_qk(q, k, cos, sin, last=0)
    with pytest.raises(ValueError, match="seq_dim must be -2"):
        rotate_qk(q, k, cos, sin, seq_dim=True)
    with pytest.raises(ValueError, match="must not share memory with itself"):
        rotate_(q[:1].expand(2, 4, 5, 8), cos, sin)
    with pytest.raises(ValueError, match=r"q_weight must have shape \(8,\) or \(32,\)"):
        qk_norm_rope(q, k, torch.ones(7), torch.ones(8), cos, sin)
    with pytest.raises(ValueError, match="eps must be finite and above zero"):
        qk_norm_rope(q, k, torch.ones(8), torch.ones(8), cos, sin, eps=0.0)
    at = torch.tensor([0, 1, -1, 2, 3])
    with pytest.raises(ValueError, match="qk_norm_rope: positions must not be negative, got -1"):
        qk_norm_rope(q, k, torch.ones(8), torch.ones(8), cos, sin, position_ids=at)


def test_qk_norm_refuses_a_weight_on_another_device():
    x, weight = torch.randn(1, 2, 3, 8), torch.ones(8)
    tables = torch.ones(3, 4), torch.zeros(3, 4)
    with pytest.raises(ValueError, match="k_weight must be on the device of q and k, got meta"):
        qk_norm_rope(x, x, weight, weight.to("meta"), *tables)
