"""``offset`` and ``position_ids`` mean the same to every module."""

import itertools

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import oracles
import posenc


def each(module):
    return lambda x, **where: module(x, x, **where)[0]


MODULES = {
    "SinusoidalPosEmbedding": (posenc.SinusoidalPosEmbedding(), (2, 3, 8)),
    "SinusoidalPE": (posenc.SinusoidalPE(16, 8), (2, 3, 8)),
    "LearnedPosEmbedding": (posenc.LearnedPosEmbedding(16, 8), (2, 3, 8)),
    "RotaryPosEmbedding": (posenc.RotaryPosEmbedding(), (2, 3, 8)),
    "RotaryPosEmbedding-fixed": (posenc.RotaryPosEmbedding(8, 16), (2, 5, 3, 8)),
    "rotary_pos_embedding": (posenc.functional.rotary_pos_embedding, (2, 3, 8)),
    "RoPE": (each(posenc.RoPE(8, 16)), (2, 4, 3, 8)),
    "RoPE-growing": (each(posenc.RoPE(8, None)), (2, 4, 3, 8)),
    "XPos": (each(posenc.XPos(8, max_seq_len=16)), (2, 4, 3, 8)),
    "MixedRoPE": (each(posenc.MixedRoPE(8, num_kv_heads=4, coordinates=1)), (2, 4, 3, 8)),
    "STRING": (each(posenc.STRING(8, num_kv_heads=4, coordinates=1)), (2, 4, 3, 8)),
}
EACH = pytest.mark.parametrize(("encode", "shape"), MODULES.values(), ids=MODULES)
IDS = torch.tensor([[5, 6, 7], [11, 12, 13]])


def ids_of(encode, ids):
    """MixedRoPE and STRING have an axis of coordinates before the batch."""
    mixed = encode in (MODULES["MixedRoPE"][0], MODULES["STRING"][0])
    return ids[None] if mixed and ids.dim() == 2 else ids


@EACH
def test_an_offset_is_the_position_of_the_first_token(encode, shape):
    x = torch.randn(shape)
    wanted = encode(x, position_ids=ids_of(encode, IDS[0]))
    assert torch.equal(encode(x, offset=5), wanted)
    assert torch.equal(encode(x, offset=torch.tensor([5, 5])), wanted)


@EACH
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_each_sequence_may_have_an_offset_of_its_own(encode, shape, dtype):
    x = torch.randn(shape)
    got = encode(x, offset=torch.tensor([5, 11], dtype=dtype))
    assert torch.equal(got, encode(x, position_ids=ids_of(encode, IDS)))
    for b, start in enumerate((5, 11)):
        assert torch.equal(got[b : b + 1], encode(x[b : b + 1], offset=start))


@EACH
@pytest.mark.parametrize(
    ("where", "error", "text"),
    [
        ({"offset": -1}, ValueError, r"offset must be at least 0.*\n.*from_left_padding\(mask\)"),
        ({"offset": 1.5}, TypeError, "offset must be an int"),
        ({"offset": [0, 1]}, TypeError, "offset must be an int, or an integer tensor"),
        ({"offset": torch.tensor([0.0, 1.0])}, TypeError, "offset must be an int, or an integer"),
        ({"offset": torch.tensor([0, 1, 2])}, ValueError, r"an integer tensor of shape \(2,\)"),
        (
            {"offset": torch.tensor([0, -1])},
            ValueError,
            r"positions must not be negative, got -1.*\n.*from_left_padding\(mask\)",
        ),
        ({"offset": torch.tensor([0, 2**31])}, ValueError, "positions must"),
        ({"offset": 2**31}, ValueError, "positions must"),
        ({"offset": 1, "position_ids": IDS[0]}, ValueError, "exclude each other"),
        ({"position_ids": -IDS[0]}, ValueError, "positions must not be negative"),
        ({"position_ids": IDS[0, :2]}, ValueError, "position_ids must be"),
        ({"position_ids": IDS[:, :1]}, ValueError, "position_ids must be"),
        ({"position_ids": [5, 6, 7]}, TypeError, "position_ids must be"),
    ],
    ids=str,
)
def test_a_bad_position_is_refused(encode, shape, where, error, text):
    with pytest.raises(error, match=text):
        encode(torch.randn(shape), **where)


def test_a_position_for_each_sequence_is_an_offset_wherever_it_is_passed():
    """Native code would count on from it, but in training it is an error."""
    rope, weight = posenc.RoPE(8, 16), torch.ones(8)
    tables, one = (rope.cos_cached, rope.sin_cached), {"position_ids": IDS[:, :1]}
    q = torch.randn(2, 4, 3, 8)
    caches = torch.zeros(2, 2, 3, 4, 8).unbind()
    f, slots = posenc.functional, torch.arange(6).view(2, 3)
    for call in (
        lambda: rope.forward_(q, q.clone(), **one),
        lambda: rope.rotate_and_cache(q, q, q, *caches, slots, **one),
        lambda: f.rotate(q, *tables, **one),
        lambda: f.rotate_qk_(q, q.clone(), *tables, **one),
        lambda: f.qk_norm_rope(q, q, weight, weight, *tables, **one),
        lambda: f.rotate_and_cache(q, q, q, *tables, *caches, slots, **one),
    ):
        with pytest.raises(ValueError, match=r"position_ids must be .* shape \(3,\) or \(2, 3\)"):
            call()


RATES = 10_000.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)


def rotated(x, at):
    """``x`` of (B, H, L, 8) at positions (B, L)."""
    phi = at.double()[:, None, :, None] * RATES
    return oracles.rotate(x.double(), phi.cos(), phi.sin(), interleaved=True)


def decayed(x, at):
    """XPos of queries, with the middle of 16 positions."""
    decay = (torch.arange(0, 8, 2, dtype=torch.float64) / 8 + 0.4) / 1.4
    scale = decay ** ((at.double() - 8) / 512)[:, None, :, None]
    return rotated(x, at) * scale.repeat_interleave(2, -1)


def summed(x, at):
    phi = at.double()[:, None, :, None] * RATES
    return x.double() + torch.stack((phi.sin(), phi.cos()), -1).flatten(-2)


def without_heads(module):
    return lambda x, **where: torch.stack([module(y, **where) for y in x.unbind(1)], 1)


LEARNED = MODULES["LearnedPosEmbedding"][0]
FORMULAS = {
    "SinusoidalPosEmbedding": (without_heads(posenc.SinusoidalPosEmbedding()), summed),
    "SinusoidalPE": (without_heads(posenc.SinusoidalPE(16, 8)), summed),
    "LearnedPosEmbedding": (
        without_heads(LEARNED),
        lambda x, at: x.double() + LEARNED.pos_emb.weight.detach().double()[at][:, None],
    ),
    "RotaryPosEmbedding": (posenc.RotaryPosEmbedding(), rotated),
    "RotaryPosEmbedding-3d": (without_heads(posenc.RotaryPosEmbedding(8, 16)), rotated),
    "rotary_pos_embedding": (posenc.functional.rotary_pos_embedding, rotated),
    "RoPE": (each(posenc.RoPE(8, 16)), rotated),
    "RoPE-growing": (each(posenc.RoPE(8, None)), rotated),
    "RoPE-rotate": (posenc.RoPE(8, 16).rotate, rotated),
    "XPos": (each(posenc.XPos(8, max_seq_len=16)), decayed),
    "MixedRoPE": (each(posenc.MixedRoPE(8, num_kv_heads=1, coordinates=1)), rotated),
    "STRING": (each(posenc.STRING(8, num_kv_heads=1, coordinates=1)), rotated),
}


@pytest.mark.parametrize(("encode", "formula"), FORMULAS.values(), ids=FORMULAS)
def test_positions_mean_the_same_whatever_sizes_coincide(encode, formula):
    """Positions of one shape must not be taken for those of another, as broadcasting would."""
    for batch, heads, length in itertools.product((1, 2, 3), (1, 2), (1, 2, 3)):
        x = torch.randn(batch, heads, length, 8)
        of_tokens = {(length,), (1, length), (batch, length)}
        others = {(), (1,), (batch,), (heads,), (batch, 1), (length, 1), (length, batch)}
        for shape in of_tokens | others | {(heads, length)}:
            at = torch.randint(0, 13, shape)
            for where, wanted in (
                ({"position_ids": at}, at.expand(batch, length) if shape in of_tokens else None),
                ({"offset": at}, at[:, None] + torch.arange(length) if shape == (batch,) else None),
            ):
                if wanted is None:
                    with pytest.raises(ValueError, match="must be an"):
                        encode(x, **where)
                else:
                    got, exact = encode(x, **where).detach().double(), formula(x, wanted)
                    torch.testing.assert_close(got, exact, rtol=0, atol=1e-6)


ROTATIONS = pytest.mark.parametrize(
    "module",
    [
        posenc.RoPE(8),
        posenc.RoPE(8, seq_dim=1),
        posenc.XPos(8),
        posenc.PoPE(8, num_kv_heads=2),
        posenc.MixedRoPE(8, num_kv_heads=2, coordinates=1),
        posenc.STRING(8, num_kv_heads=2, coordinates=1),
    ],
    ids=lambda module: f"{type(module).__name__}, {module.seq_dim}",
)


def queries_and_keys(module, batch, length):
    """With as many key heads as some lengths, which must not matter."""
    q, k = torch.randn(batch, 4, length, 8), torch.randn(batch, 2, length, 8)
    return (q, k) if module.seq_dim == -2 else (q.transpose(1, 2), k.transpose(1, 2))


@ROTATIONS
def test_the_third_argument_of_every_rotation_is_an_offset(module):
    for batch, length, start in (
        (3, 5, torch.tensor([5, 11, 2])),
        (1, 4, torch.tensor([7])),
        (1, 1, torch.tensor([7])),
        (4, 1, torch.tensor([7, 0, 1, 2])),
        (2, 2, 7),
    ):
        q, k = queries_and_keys(module, batch, length)
        for got, wanted in zip(module(q, k, start), module(q, k, offset=start), strict=True):
            assert torch.equal(got, wanted)


@ROTATIONS
def test_a_third_argument_that_could_be_positions_is_refused(module):
    """torchtitan's ``rope(q, k, positions)`` would otherwise rotate by other positions."""
    q, k = queries_and_keys(module, 3, 3)
    starts = torch.tensor([5, 11, 2])
    text = r"a tensor without a name must not fit both .*\n.* position_ids= .* offset="
    with pytest.raises(ValueError, match=text):
        module(q, k, starts)
    for b, start in enumerate((5, 11, 2)):
        alone = module(q[b : b + 1], k[b : b + 1], offset=start)
        assert torch.equal(alone[0][0], module(q, k, offset=starts)[0][b])
    # Other lengths fit nothing, so the error is that of an offset.
    q, k = queries_and_keys(module, 3, 5)
    for call in (lambda at: module(q, k, at), lambda at: module(q, k, offset=at)):
        with pytest.raises(ValueError, match=r"shape \(3,\), got .*\n.*position_ids="):
            call(torch.arange(5))


def positional(x):
    """Other calls with ``x`` of ``(B, H, L, 8)`` whose next argument is an offset."""
    rope, learned = posenc.RoPE(8, 16), posenc.LearnedPosEmbedding(16, 8)
    slots = torch.arange(x.shape[0] * x.shape[2]).view(x.shape[0], -1)
    caches = torch.zeros(2, 2, 16, x.shape[1], 8)
    return {
        "rotate": lambda *at, **named: rope.rotate(x, *at, **named),
        "unrotate": lambda *at, **named: rope.unrotate(x, *at, **named),
        "forward_": lambda *at, **named: rope.forward_(x.clone(), x.clone(), *at, **named)[0],
        "cached": lambda *at, **named: rope.rotate_queries_with_cached_keys(
            x[:, :, -1:], x, *at, **named
        )[1],
        "and_cache": lambda *at, **named: rope.rotate_and_cache(
            x, x, x, *caches, slots, *at, **named
        ),
        "LearnedPosEmbedding": lambda *at, **named: learned(x[:, 0], *at, **named),
    }


@pytest.mark.parametrize("name", positional(torch.zeros(1, 1, 1, 8)))
def test_positions_in_the_place_of_an_offset_are_refused_by_other_calls(name):
    """The error is not that of the sizes, and a call with another length is as with a name."""
    call, starts = positional(torch.randn(3, 2, 3, 8))[name], torch.tensor([5, 11, 2])
    text = r"a tensor without a name must not fit both .*\n.* position_ids= .* offset="
    with pytest.raises(ValueError, match=text):
        call(starts)
    with pytest.raises(TypeError, match=r"only one optional argument .* and offset only"):
        call(5, offset=6)
    assert torch.equal(call(7), call(offset=7))
    call = positional(torch.randn(3, 2, 4, 8))[name]
    assert torch.equal(call(starts), call(offset=starts))


def test_an_offset_without_a_name_leaves_lengths_dynamic():
    """Compiled and exported calls compare no sizes, which would exclude a length of three."""
    module, starts = posenc.RoPE(8), torch.tensor([5, 11, 2])
    length, compiles = torch.export.Dim("length", max=32), CompileCounterWithBackend("eager")
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=compiles)
    q, k = queries_and_keys(module, 3, 6)
    sizes = {"q": {2: length}, "k": {2: length}, "offset": None}
    exported = torch.export.export(module, (q, k, starts), dynamic_shapes=sizes).module()
    for tokens in (6, 5, 3):
        q, k = queries_and_keys(module, 3, tokens)
        wanted = module(q, k, offset=starts)
        torch.testing.assert_close(compiled(q, k, starts), wanted)
        torch.testing.assert_close(exported(q, k, starts), wanted)
    assert compiles.frame_count == 1


@ROTATIONS
def test_an_offset_comes_once(module):
    q, k = queries_and_keys(module, 2, 3)
    for given, named in (((5, 6), {}), ((5,), {"offset": 6}), ((5,), {"offset": IDS[:, 0]})):
        with pytest.raises(TypeError, match=r"only one optional argument .* and offset only"):
            module(q, k, *given, **named)


def test_apply_takes_what_lightwatch_takes():
    """Its third argument is an offset by the name of the function."""
    rope, (q, k) = posenc.RoPE(8), torch.randn(2, 2, 4, 2, 8)
    starts = torch.tensor([5, 2])
    for got, wanted in zip(rope.apply(q, k, starts), rope(q, k, offset=starts), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize(
    "module",
    [
        posenc.XPos(8),
        posenc.MixedRoPE(8, num_kv_heads=2, coordinates=1),
        posenc.STRING(8, num_kv_heads=2, coordinates=1),
    ],
    ids=lambda module: type(module).__name__,
)
def test_tokens_may_come_before_heads(module):
    q, k = torch.randn(3, 4, 5, 8), torch.randn(3, 2, 5, 8)
    wanted = module(q, k, 7)
    other = module.replace(seq_dim=1)
    other.load_state_dict(module.state_dict())
    for got, y in zip(other(q.transpose(1, 2), k.transpose(1, 2), 7), wanted, strict=True):
        assert torch.equal(got.transpose(1, 2), y)


def test_an_image_has_no_offset():
    rope, x = posenc.MixedRoPE(8, num_kv_heads=2), torch.randn(1, 2, 3, 8)
    for where in ((), (3,), (posenc.positions.grid(1, 3),)):
        with pytest.raises(ValueError, match=r"position_ids must be given.*\n.*position_ids=pos"):
            rope(x, x, *where)


def test_one_sequence_without_a_batch_has_one_offset():
    x = torch.randn(3, 8)
    for module in (posenc.SinusoidalPE(16, 8), posenc.RotaryPosEmbedding()):
        assert torch.equal(module(x, offset=torch.tensor([4])), module(x, offset=4))
        with pytest.raises(ValueError, match=r"an integer tensor of shape \(1,\)"):
            module(x, offset=torch.arange(3))
