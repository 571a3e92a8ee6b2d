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


@pytest.mark.parametrize("shape", [(), (2,), (4,), (1, 4), (3, 3), (2, 4), (2, 1, 3)])
def test_positions_match_the_tokens(shape):
    with pytest.raises(ValueError, match=r"shape \(3,\) or \(2, 3\), got"):
        shaped(torch.zeros(shape, dtype=torch.int64))


@pytest.mark.parametrize("dtype", INT_DTYPES, ids=str)
def test_every_integer_dtype_becomes_int64(dtype):
    moved = shaped(torch.tensor([1, 2, 3], dtype=dtype))
    assert moved.dtype == torch.int64
    assert moved.tolist() == [1, 2, 3]


@pytest.mark.parametrize("name", ["position_ids", "to_positions"])
def test_a_meta_tensor_has_no_positions(name):
    ids, device = torch.zeros(3, dtype=torch.int64, device="meta"), torch.device("cpu")
    with pytest.raises(ValueError, match=rf"{name} must hold values, got a meta tensor"):
        checks.index_tensor("Thing", name, ids, [(3,)], device)
