"""Self-Extend and Dual Chunk against dense attention by the papers' formulas."""

import copy
import pickle

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import oracles
import posenc
from posenc import DualChunk, RoPE, SelfExtend
from support.assertions import assert_exports

ROPE = RoPE(16, max_seq_len=None, interleaved=False)
CASES = {
    "self-extend": (SelfExtend(ROPE, group=3, window=8), oracles.self_extend, (3, 8)),
    "group-of-one": (SelfExtend(ROPE, group=1, window=5), oracles.self_extend, (1, 5)),
    "window-below-group": (SelfExtend(ROPE, group=7, window=2), oracles.self_extend, (7, 2)),
    "dual-chunk": (DualChunk(ROPE, chunk=11, window=4), oracles.dual_chunk, (11, 4)),
    "window-of-chunk": (DualChunk(ROPE, chunk=6, window=6), oracles.dual_chunk, (6, 6)),
    "chunks-of-one": (DualChunk(ROPE, chunk=1, window=1), oracles.dual_chunk, (1, 1)),
}
BOTH = [CASES["self-extend"][0], CASES["dual-chunk"][0]]
each = pytest.mark.parametrize("extend", BOTH, ids=["self-extend", "dual-chunk"])


def qkv(length, *, heads=(4, 2), batch=2, dtype=torch.float64, queries=None):
    made = torch.Generator().manual_seed(length)
    sizes = ((heads[0], queries or length), (heads[1], length), (heads[1], length))
    return [
        torch.randn(batch, n, tokens, 16, generator=made, dtype=torch.float64).to(dtype)
        for n, tokens in sizes
    ]


def wanted_of(extend, q, k, v):
    name = "self-extend" if isinstance(extend, SelfExtend) else "dual-chunk"
    _, oracle, numbers = CASES[name]
    return oracles.attention_at(q, k, v, oracle(k.shape[2], *numbers)[-q.shape[2] :])


def room_for(q, k, v, dtype):
    """The error of an output: of its scores, and of three roundings to ``dtype``.

    Rotated queries and keys are rounded once, to half an ulp of their pairs; a change ``d`` of all
    scores changes each weight by a factor of at most ``exp(2 d)``.
    """
    unit = torch.finfo(dtype).eps / 2
    longest = [x.double().norm(dim=-1).max() for x in (q, k)]
    sums = 2 * unit if dtype.itemsize == 2 else 16 * unit  # products are added in float32, say
    of_scores = longest[0] * longest[1] * 16**-0.5 * (2 * unit + sums)
    return float(v.double().abs().max() * (2 * of_scores + 3 * unit)) * 1.1


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("length", [1, 7, 40])
def test_relative_positions_are_those_of_the_paper(name, length):
    extend, oracle, numbers = CASES[name]
    assert torch.equal(extend.distances(length), oracle(length, *numbers))
    assert torch.equal(extend.distances(1, length), oracle(length, *numbers)[-1:])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("length", [1, 61])
def test_attention_is_dense_attention_at_these_positions(name, length):
    extend, oracle, numbers = CASES[name]
    q, k, v = qkv(length)
    wanted = oracles.attention_at(q, k, v, oracle(length, *numbers))
    assert (extend.attention(q, k, v) - wanted).abs().max() < room_for(q, k, v, torch.float64)


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_within_its_roundings(extend, dtype):
    q, k, v = qkv(50, dtype=dtype)
    got, wanted = extend.attention(q, k, v), wanted_of(extend, q, k, v)
    assert got.dtype == dtype
    assert (got.double() - wanted).abs().max() < room_for(q, k, v, dtype)


@each
def test_decode_with_a_cache_gives_the_rows_of_the_whole(extend):
    q, k, v = qkv(45)
    whole = extend.attention(q, k, v)
    room = 2 * room_for(q, k, v, torch.float64)
    for step in (11, 12, 33, 44):
        n = slice(step + 1)
        one = extend.attention(q[:, :, step : step + 1], k[:, :, n], v[:, :, n])
        assert (one - whole[:, :, step : step + 1]).abs().max() < room
    some = extend.attention(q[:, :, 20:31], k, v, query_offset=20)
    assert (some - whole[:, :, 20:31]).abs().max() < room
    places = torch.tensor([3, 30])
    chosen = torch.stack([q[0, :, 3:8], q[1, :, 30:35]])
    some = extend.attention(chosen, k, v, query_offset=places)
    rows = torch.stack([whole[0, :, 3:8], whole[1, :, 30:35]])
    assert (some - rows).abs().max() < room


@each
def test_every_document_is_a_sequence_of_its_own(extend):
    """Positions count from a document's first token; padding sees nothing and is not seen."""
    q, k, v = qkv(60)
    ids = torch.zeros(2, 60, dtype=torch.long)
    ids[0, :13], ids[1, 25:] = -1, 1
    ids[1, -4:] = -1
    got = extend.attention(q, k, v, document_ids=ids)
    room = room_for(q, k, v, torch.float64)
    for row, begin, end in ((0, 13, 60), (1, 0, 25), (1, 25, 56)):
        part = [x[row : row + 1, :, begin:end] for x in (q, k, v)]
        assert (got[row : row + 1, :, begin:end] - wanted_of(extend, *part)).abs().max() < room
    assert not got[0, :, :13].any()
    assert not got[1, :, 56:].any()


@each
def test_gradients_are_those_of_dense_attention(extend):
    inputs = [x.requires_grad_() for x in qkv(37, batch=1)]
    padded = torch.zeros(40, dtype=torch.long)
    padded[:3] = -1
    q, k, v = (torch.cat((torch.randn_like(x[:, :, :3]), x), 2) for x in inputs)
    out = extend.attention(q, k, v, document_ids=padded)[:, :, 3:]
    g = torch.randn_like(out)
    got = torch.autograd.grad(out, inputs, g)
    wanted = torch.autograd.grad(wanted_of(extend, *inputs), inputs, g)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(
    "extend",
    [SelfExtend(ROPE, group=4, window=64), DualChunk(ROPE, chunk=64, window=8)],
    ids=["self-extend", "dual-chunk"],
)
def test_short_sequences_are_those_of_the_model(extend):
    q, k, v = qkv(64, heads=(4, 4))
    plain = scaled_dot_product_attention(*ROPE(q, k), v, is_causal=True)
    torch.testing.assert_close(extend.attention(q, k, v), plain, rtol=0, atol=1e-13)


@each
def test_copies_casts_and_strides_change_nothing(extend):
    q, k, v = qkv(30, dtype=torch.float32)
    wanted = extend.attention(q, k, v)
    for other in (copy.deepcopy(extend), pickle.loads(pickle.dumps(extend)), extend.replace()):
        assert torch.equal(other.attention(q, k, v), wanted)
    assert torch.equal(copy.deepcopy(extend).half().attention(q, k, v), wanted)
    assert not extend.state_dict()
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    torch.testing.assert_close(extend.attention(*turned), wanted)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(extend.attention(q, k, v), wanted)
    none = [x[:, :, :0] for x in (q, k, v)]
    assert extend.attention(*none).shape == (2, 4, 0, 16)
    assert extend.attention(q[:, :, :0], k, v).shape == (2, 4, 0, 16)
    meta = [x.to("meta") for x in (q, k, v)]
    assert extend.attention(*meta).shape == q.shape
    torch.testing.assert_close(extend.attention(q, k, v, backend="dense"), wanted)


@each
@pytest.mark.slow
def test_batches_of_gradients_and_forward_mode(extend):
    q, k, v = qkv(30, heads=(2, 2))
    wanted = extend.attention(q, k, v)
    alone = torch.func.vmap(lambda *x: extend.attention(*(y[None] for y in x))[0])(q, k, v)
    torch.testing.assert_close(alone, wanted, rtol=0, atol=1e-13)
    _, change = torch.func.jvp(lambda x: extend.attention(x, k, v), (q,), (q,))
    near = (extend.attention(q * (1 + 1e-6), k, v) - extend.attention(q * (1 - 1e-6), k, v)) / 2e-6
    torch.testing.assert_close(change, near, rtol=1e-6, atol=1e-8)


def test_bad_arguments_are_refused():
    q, k, v = qkv(8)
    extend = BOTH[0]
    with pytest.raises(TypeError, match="rope must be a RoPE"):
        SelfExtend(64, group=2, window=4)
    dynamic = RoPE(16, scaling=posenc.scaling.DynamicNTK(2.0, original_length=64))
    with pytest.raises(ValueError, match="must not depend on the length"):
        SelfExtend(dynamic, group=2, window=4)
    with pytest.raises(ValueError, match=r"axes of rope must be None.*\n.*replace"):
        DualChunk(RoPE(16, axes=posenc.axes.Axial(2)), chunk=8, window=2)
    with pytest.raises(ValueError, match="seq_dim of rope must be -2"):
        DualChunk(RoPE(16, seq_dim=1), chunk=8, window=2)
    with pytest.raises(ValueError, match="window must be at most chunk=4, got 5"):
        DualChunk(ROPE, chunk=4, window=5)
    with pytest.raises(ValueError, match="group must be at least 1"):
        SelfExtend(ROPE, group=0, window=5)
    with pytest.raises(ValueError, match="channels of q must be 16, got 8"):
        extend.attention(q[..., :8], k[..., :8], v)
    with pytest.raises(ValueError, match="at least as many keys"):
        extend.attention(q, k[:, :, :3], v[:, :, :3])
    with pytest.raises(AttributeError, match="window is read-only"):
        extend.window = 3


@each
@pytest.mark.slow
def test_an_exported_program_has_the_parts_of_longer_sequences(extend):
    """Six tokens are in one part, and thirty in all of them."""
    assert_exports(extend, qkv(6), qkv(30))
