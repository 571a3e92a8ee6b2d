import pytest
import torch

import oracles
from posenc.nn import SinusoidalPE, SinusoidalPosEmbedding
from support.assertions import COMPILERS, assert_within_ulps, compilations

BOTH = pytest.mark.parametrize(
    "make",
    [lambda dim: SinusoidalPosEmbedding(), lambda dim: SinusoidalPE(64, dim)],
    ids=["SinusoidalPosEmbedding", "SinusoidalPE"],
)


@BOTH
@pytest.mark.parametrize("shape", [(5, 8), (2, 5, 8), (2, 5, 7), (0, 5, 8), (2, 0, 8), (64, 2)])
def test_adds_the_encoding(make, shape):
    x = torch.randn(shape)
    got = make(shape[-1])(x)
    table = oracles.sinusoid(range(shape[-2]), shape[-1]).view(shape[-2:])
    assert got.shape == shape
    assert_within_ulps(got, x + table, 1, (x.abs() + table.abs()).double())


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_halves_keep_their_dtype_and_round_once(make, dtype):
    """Half an ulp of the sum, and float32 noise at the magnitude of the terms."""
    x = torch.randn(2, 64, 16).to(dtype)
    got = make(16)(x)
    exact = x.double() + oracles.sinusoid(range(64), 16)
    assert got.dtype == dtype
    assert ((got - exact).abs() <= 0.5 * oracles.ulp(exact.abs(), dtype) + 4e-7).all()


@BOTH
def test_float64_is_exact_and_does_not_disturb_float32(make):
    module, x = make(16), torch.randn(20, 16)
    before = module(x)
    wide = module(x.double())
    assert (wide - (x.double() + oracles.sinusoid(range(20), 16))).abs().max() < 2e-15
    assert torch.equal(module(x), before)


def test_far_offsets_are_exact_and_not_cached():
    module = SinusoidalPosEmbedding()
    got = module(torch.zeros(1, 64), offset=2**31)
    assert_within_ulps(got, oracles.sinusoid([2**31], 64), 1, torch.ones(1))
    assert module.encodings is None


def test_sizes_are_inferred_call_by_call():
    module = SinusoidalPosEmbedding()
    for length, dim in ((3, 4), (9, 4), (2, 6), (3, 4)):
        x = torch.zeros(length, dim)
        assert torch.equal(module(x), SinusoidalPosEmbedding(length, dim)(x))


def test_fixed_sizes_are_enforced():
    module = SinusoidalPosEmbedding(seq_len=8, embed_dim=64)
    assert module(torch.zeros(2, 8, 64)).shape == (2, 8, 64)
    with pytest.raises(ValueError, match="SinusoidalPosEmbedding: seq_len must be 8, got 7"):
        module(torch.zeros(2, 7, 64))
    with pytest.raises(ValueError, match="embed_dim must be 64, got 63"):
        module(torch.zeros(2, 8, 63))


@BOTH
@pytest.mark.parametrize("shape", [(), (8,), (1, 2, 5, 8)])
def test_only_two_and_three_dimensions(make, shape):
    with pytest.raises(ValueError, match=r"must have shape \(L, D\) or \(N, L, D\)"):
        make(8)(torch.zeros(shape))


@BOTH
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64], ids=str)
def test_only_floating_input(make, dtype):
    with pytest.raises(TypeError, match="must be a float16, bfloat16, float32 or float64"):
        make(8)(torch.zeros(5, 8, dtype=dtype))


@pytest.mark.parametrize("size", [0, -1])
def test_sizes_must_be_positive(size):
    with pytest.raises(ValueError, match="seq_len must be at least 1"):
        SinusoidalPosEmbedding(seq_len=size)
    with pytest.raises(ValueError, match="embed_dim must be at least 1"):
        SinusoidalPosEmbedding(embed_dim=size)
    with pytest.raises(ValueError, match="max_seq_len must be at least 1"):
        SinusoidalPE(size, 8)


def test_no_channels_is_an_error():
    with pytest.raises(ValueError, match="at least 1, got 0"):
        SinusoidalPosEmbedding()(torch.zeros(3, 0))


def test_pe_is_precomputed_and_handed_out_as_a_copy():
    pe = SinusoidalPE(32, 6)
    assert pe.encodings.shape == (32, 6)
    first = pe.get_encoding(10)
    first.zero_()
    assert torch.equal(pe.get_encoding(10), pe.encodings[:10])
    assert pe.get_encoding(10).abs().sum() > 0
    assert pe.get_encoding(0).shape == (0, 6)


def test_pe_is_held_to_its_length():
    pe = SinusoidalPE(32, 6)
    with pytest.raises(ValueError, match="seq_len must be at most max_seq_len=32, got 33"):
        pe.get_encoding(33)
    with pytest.raises(ValueError, match="below max_seq_len=32, got 33"):
        pe(torch.zeros(4, 6), offset=30)
    with pytest.raises(ValueError, match="embed_dim must be 6, got 8"):
        pe(torch.zeros(4, 8))
    with pytest.raises(ValueError, match="seq_len must be at least 0"):
        pe.get_encoding(-1)


@BOTH
@COMPILERS
def test_one_graph_for_all_lengths(make, backend):
    module = make(8)
    calls = [(torch.randn(2, n, 8),) for n in (5, 3, 17, 64)]
    assert compilations(module, calls, dynamic=True, backend=backend) == 1


@BOTH
def test_positions_may_be_given_for_all_or_for_each_sequence(make):
    x = torch.zeros(2, 3, 8)
    rows = oracles.sinusoid(range(50), 8).float()
    for ids in (torch.tensor([4, 0, 31]), torch.tensor([[0, 1, 2], [9, 8, 7]])):
        assert torch.equal(make(8)(x, position_ids=ids), rows[ids].expand(2, 3, 8))
    with pytest.raises(ValueError, match="offset and position_ids exclude each other"):
        make(8)(x, offset=2, position_ids=torch.arange(3))
    with pytest.raises(ValueError, match="must not be negative, got -1"):
        make(8)(x, position_ids=torch.tensor([0, -1, 2]))


def test_positions_are_held_to_the_length():
    with pytest.raises(ValueError, match="below max_seq_len=32, got 32"):
        SinusoidalPE(32, 8)(torch.zeros(2, 8), position_ids=torch.tensor([0, 32]))


def test_the_way_out_of_a_far_offset_is_a_smaller_one():
    with pytest.raises(ValueError, match=r"got 8.\n  Raise max_seq_len, or pass a smaller offset"):
        SinusoidalPE(8, 4)(torch.randn(3, 4), offset=6)
    with pytest.raises(ValueError, match=r"at most 2\*\*31, got 2147483649"):
        SinusoidalPosEmbedding()(torch.randn(4, 8), offset=2**31 - 2)
