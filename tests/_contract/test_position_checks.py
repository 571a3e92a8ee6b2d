import pytest
import torch

from posenc._contract import position_checks as checks
from posenc._contract.checks import INT_DTYPES
from posenc._contract.position_checks import Limit


def test_a_position_past_its_limit_is_named_with_the_way_out():
    with pytest.raises(ValueError, match="below") as caught:
        checks.check_position("RotaryPosEmbedding", 4095, Limit(2048, "max_seq_len"))
    assert str(caught.value) == (
        "RotaryPosEmbedding: positions must stay below max_seq_len=2048, got 4095.\n"
        "  Raise max_seq_len, or pass smaller ones."
    )


def shaped(ids, shape=(2, 3, 4)):
    return checks.position_ids("Thing", ids, torch.empty(shape))


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
    with pytest.raises(ValueError, match=r"of shape \(3,\), got"):
        shaped(torch.zeros(1, 3, dtype=torch.int64), shape=(3, 4))


@pytest.mark.parametrize("dtype", INT_DTYPES, ids=str)
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
    assert checks.check_ids("Thing", torch.tensor([0, 2, 9]), Limit(10, "max_len")) == 10
    with pytest.raises(ValueError, match="below max_len=9, got 9"):
        checks.check_ids("Thing", torch.tensor([0, 9, 2]), Limit(9, "max_len"))


def test_no_positions_need_no_rows():
    assert checks.check_ids("Thing", torch.zeros(0, dtype=torch.int64)) == 0


def test_offsets_belong_to_the_sequences():
    x = torch.empty(2, 1, 5, 8)
    assert checks.offsets("Thing", torch.tensor([3, 4]), x).tolist() == [3, 4]
    with pytest.raises(
        ValueError, match=r"offset must be an int, or an integer tensor of shape \(2,\)"
    ):
        checks.offsets("Thing", torch.tensor([3]), x)
    for bad in (torch.tensor([3.0, 4.0]), [3, 4]):
        with pytest.raises(TypeError, match="an integer tensor"):
            checks.offsets("Thing", bad, x)


@pytest.mark.parametrize("name", ["position_ids", "to_positions"])
def test_a_meta_tensor_has_no_positions(name):
    ids, device = torch.zeros(3, dtype=torch.int64, device="meta"), torch.device("cpu")
    with pytest.raises(ValueError, match=rf"{name} must hold values, got a meta tensor"):
        checks.index_tensor("Thing", name, ids, [(3,)], device)
