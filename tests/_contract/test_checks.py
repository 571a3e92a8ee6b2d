import numpy as np
import pytest
import torch

from posenc._contract import checks


def test_messages_say_who_what_came_and_the_way_out():
    with pytest.raises(ValueError, match="below") as caught:
        checks.check_last_position("RotaryPosEmbedding", 4095, "max_seq_len", 2048, "smaller ones")
    assert str(caught.value) == (
        "RotaryPosEmbedding: positions must stay below max_seq_len=2048, got 4095.\n"
        "  Raise max_seq_len, or pass smaller ones."
    )


@pytest.mark.parametrize("value", [True, 2.0, "3", None, torch.tensor(3), [3]], ids=str)
def test_only_integers_are_counts(value):
    with pytest.raises(TypeError, match="Thing: size must be an int"):
        checks.integer("Thing", "size", value)


def test_numpy_integers_are_counts():
    assert checks.integer("Thing", "size", np.int32(7)) == 7


@pytest.mark.parametrize("value", [0, -1])
def test_counts_have_a_least(value):
    with pytest.raises(ValueError, match="size must be at least 1, got"):
        checks.integer("Thing", "size", value)
    assert checks.integer("Thing", "size", value, least=-1) == value


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_bases_are_finite_and_positive(value):
    with pytest.raises(ValueError, match="base must be finite and above zero"):
        checks.positive_float("Thing", "base", value)


@pytest.mark.parametrize("value", [True, "10000", None, torch.tensor(1.0)], ids=str)
def test_bases_are_numbers(value):
    with pytest.raises(TypeError, match="base must be a number"):
        checks.positive_float("Thing", "base", value)


@pytest.mark.parametrize(
    "x",
    [
        torch.ones(2, 2, dtype=torch.int64),
        torch.ones(2, 2, dtype=torch.bool),
        torch.ones(2, 2, dtype=torch.complex64),
        torch.ones(2, 2).to(torch.float8_e4m3fn),
        [[1.0, 2.0]],
    ],
    ids=["int", "bool", "complex", "float8", "list"],
)
def test_only_real_floats_are_encoded(x):
    with pytest.raises(TypeError, match="Thing: x must be"):
        checks.float_tensor("Thing", "x", x)


def shaped(ids, shape=(2, 3, 4)):
    return checks.position_ids("Thing", ids, shape, torch.device("cpu"))


@pytest.mark.parametrize(
    "ids",
    [torch.zeros(3), torch.zeros(3, dtype=torch.bool), [0, 1, 2]],
    ids=["float", "bool", "list"],
)
def test_positions_are_integers(ids):
    with pytest.raises(TypeError, match="position_ids must be an integer tensor"):
        shaped(ids)


@pytest.mark.parametrize("shape", [(), (2,), (4,), (1, 4), (3, 3), (2, 4), (2, 1, 3)])
def test_positions_match_the_tokens(shape):
    with pytest.raises(ValueError, match=r"shape \(3,\) or \(2, 3\), got"):
        shaped(torch.zeros(shape, dtype=torch.int64))


def test_a_two_dimensional_input_has_no_batch_of_positions():
    with pytest.raises(ValueError, match=r"must have shape \(3,\), got"):
        shaped(torch.zeros(1, 3, dtype=torch.int64), shape=(3, 4))


@pytest.mark.parametrize("dtype", checks.INT_DTYPES, ids=str)
def test_every_integer_dtype_becomes_int64(dtype):
    moved = shaped(torch.tensor([1, 2, 3], dtype=dtype))
    assert moved.dtype == torch.int64
    assert moved.tolist() == [1, 2, 3]


@pytest.mark.parametrize("where", [0, 1, 2])
def test_a_negative_position_is_refused_anywhere(where):
    ids = torch.tensor([5, 6, 7])
    ids[where] = -1
    with pytest.raises(ValueError, match="must not be negative, got -1"):
        checks.check_ids("Thing", ids)


def test_a_position_past_the_limit_is_refused():
    assert checks.check_ids("Thing", torch.tensor([0, 2, 9]), "max_len", 10) == 10
    with pytest.raises(ValueError, match="below max_len=9, got 9"):
        checks.check_ids("Thing", torch.tensor([0, 9, 2]), "max_len", 9)


def test_no_positions_need_no_rows():
    assert checks.check_ids("Thing", torch.zeros(0, dtype=torch.int64)) == 0


def test_offsets_belong_to_the_sequences():
    device = torch.device("cpu")
    assert checks.offsets("Thing", torch.tensor([3, 4]), (2, 1, 5, 8), device).tolist() == [3, 4]
    with pytest.raises(ValueError, match=r"offset must be an int, or have shape \(2,\)"):
        checks.offsets("Thing", torch.tensor([3]), (2, 1, 5, 8), device)
    with pytest.raises(TypeError, match="an integer tensor"):
        checks.offsets("Thing", torch.tensor([3.0, 4.0]), (2, 1, 5, 8), device)


@pytest.mark.parametrize("value", [0.5, 1, 1.0])
def test_bases_are_above_one(value):
    """With one of 1 or less no pair would turn slower than the first."""
    with pytest.raises(ValueError, match="base must be above 1"):
        checks.base("Thing", value)
    assert checks.base("Thing", 1.5) == 1.5
