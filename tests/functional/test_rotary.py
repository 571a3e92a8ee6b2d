import itertools

import pytest
import torch

import oracles
from posenc.functional import rotary_pos_embedding
from support.assertions import COMPILERS, assert_rotated, compilations

LAYOUTS = pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "half"])
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)
FAR = [0, 1, 4095, 131_071, 1_000_003, 2**24 + 1, 2**31 - 1, 2**31]


@LAYOUTS
@DTYPES
@pytest.mark.parametrize("dim", [2, 64, 128])
@pytest.mark.parametrize("base", [10_000.0, 500_000.0])
def test_one_ulp_at_any_position_to_two_to_the_31(interleaved, dtype, dim, base):
    x = torch.randn(16, len(FAR), dim).to(dtype)
    got = rotary_pos_embedding(x, torch.tensor(FAR), interleaved, base=base)
    assert_rotated(got, x, FAR, interleaved=interleaved, base=base)


@LAYOUTS
def test_float64_is_right_to_fourteen_digits_below_two_to_the_20(interleaved):
    positions = [0, 1, 4095, 2**20 - 1]
    x = torch.randn(8, 4, 128, dtype=torch.float64)
    got = rotary_pos_embedding(x, torch.tensor(positions), interleaved)
    exact = oracles.rotate(x, *oracles.exact_cos_sin(positions, 128), interleaved=interleaved)
    size = oracles.pair_magnitude(exact, 64, interleaved=interleaved)
    assert ((got - exact).abs() / size).max() < 1e-14


def test_defaults_are_positions_from_zero_and_interleaved():
    x = torch.randn(2, 5, 8)
    explicit = rotary_pos_embedding(x, torch.arange(5), True, base=10_000.0)
    assert torch.equal(rotary_pos_embedding(x), explicit)


@pytest.mark.parametrize(
    "shape", [(5, 8), (2, 5, 8), (2, 3, 5, 8), (2, 3, 4, 5, 8), (0, 5, 8), (2, 0, 8), (2, 1, 2)]
)
@LAYOUTS
def test_any_leading_shape(shape, interleaved):
    x = torch.randn(shape)
    got = rotary_pos_embedding(x, interleaved=interleaved)
    assert got.shape == shape
    for lead in itertools.product(*map(range, shape[:-2])):
        assert torch.equal(got[lead], rotary_pos_embedding(x[lead], interleaved=interleaved))


@pytest.mark.parametrize("middle", [(), (3,), (3, 2)], ids=str)
def test_each_sequence_of_a_batch_may_have_its_own_positions(middle):
    x = torch.randn(2, *middle, 4, 8)
    ids = torch.tensor([[0, 1, 2, 3], [7, 5, 5, 0]])
    got = rotary_pos_embedding(x, ids)
    for row in range(2):
        assert torch.equal(got[row], rotary_pos_embedding(x[row], ids[row]))


@pytest.mark.parametrize("shape", [(2, 4, 8), (2, 3, 4, 8), (2, 3, 2, 4, 8), (1, 3, 4, 8)], ids=str)
def test_one_row_of_positions_serves_every_sequence(shape):
    """Models pass ``arange(L)[None]`` for a batch."""
    x, ids = torch.randn(shape), torch.tensor([[7, 5, 5, 0]])
    assert torch.equal(rotary_pos_embedding(x, ids), rotary_pos_embedding(x, ids[0]))


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str
)
@COMPILERS
def test_one_graph_for_all_lengths(dtype, backend):
    calls = [(torch.randn(2, length, 8).to(dtype),) for length in (5, 3, 17, 64)]
    assert compilations(rotary_pos_embedding, calls, dynamic=True, backend=backend) == 1


@COMPILERS
def test_positions_compile_without_a_break(backend):
    calls = [(torch.randn(2, n, 8), torch.randint(0, 99, (2, n))) for n in (5, 9, 33)]
    assert compilations(rotary_pos_embedding, calls, dynamic=True, backend=backend) == 1


def test_a_compiled_call_still_refuses_negative_positions():
    compiled = torch.compile(rotary_pos_embedding, fullgraph=True, backend="aot_eager")
    compiled(torch.randn(3, 4), torch.tensor([0, 1, 2]))
    with pytest.raises(RuntimeError, match="position_ids must be in"):
        compiled(torch.randn(3, 4), torch.tensor([0, -1, 2]))


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((torch.ones(2, 2).long(),), TypeError, "rotary_pos_embedding: input_ must be"),
        ((torch.ones(2, 2).cfloat(),), TypeError, "rotary_pos_embedding: input_ must be"),
        ((torch.ones(2, 7),), ValueError, "must be even.*got 7"),
        ((torch.ones(2, 0),), ValueError, "at least 1, got 0"),
        ((torch.ones(8),), ValueError, r"must have shape \(\.\.\., L, D\)"),
        ((torch.ones(2, 4), None, 10_000.0), TypeError, "interleaved must be True or False"),
    ],
)
def test_bad_input_is_refused(arguments, error, text):
    with pytest.raises(error, match=text):
        rotary_pos_embedding(*arguments)


@pytest.mark.parametrize("base", [0, -1.0, float("nan"), float("inf")])
def test_base_must_be_positive(base):
    with pytest.raises(ValueError, match="base must be finite and above zero"):
        rotary_pos_embedding(torch.ones(2, 4), base=base)
