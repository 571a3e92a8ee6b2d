import pytest
import torch

from posenc.nn import LearnedPosEmbedding
from support.assertions import COMPILERS, compilations


def test_the_table_is_an_embedding_and_all_that_is_saved():
    pos = LearnedPosEmbedding(max_len=512, embed_dim=64)
    assert isinstance(pos.pos_emb, torch.nn.Embedding)
    assert pos.pos_emb.weight.shape == (512, 64)
    assert list(pos.state_dict()) == ["pos_emb.weight"]


@pytest.mark.parametrize("shape", [(5, 8), (2, 5, 8), (0, 5, 8), (2, 0, 8)])
def test_adds_the_rows(shape):
    pos, x = LearnedPosEmbedding(16, 8), torch.randn(shape)
    rows = pos.pos_emb.weight[3 : 3 + shape[-2]]
    assert torch.equal(pos(x, 3), x + rows)
    assert torch.equal(pos(x, offset=3), x + rows)


def test_position_ids_pick_rows_for_all_or_for_each_sequence():
    pos, x = LearnedPosEmbedding(16, 8), torch.randn(2, 3, 8)
    shared, own = torch.tensor([4, 4, 0]), torch.tensor([[1, 2, 3], [0, 15, 7]])
    assert torch.equal(pos(x, position_ids=shared), x + pos.pos_emb.weight[shared])
    assert torch.equal(pos(x, position_ids=own), x + pos.pos_emb.weight[own])


def test_gradient_reaches_only_the_rows_used():
    pos = LearnedPosEmbedding(10, 4)
    pos(torch.randn(2, 3, 4), offset=5).sum().backward()
    used = pos.pos_emb.weight.grad
    assert torch.equal(used[5:8], torch.full((3, 4), 2.0))
    assert used[:5].abs().sum() == 0
    assert used[8:].abs().sum() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_input_decides_the_dtype(dtype):
    pos, x = LearnedPosEmbedding(16, 8), torch.randn(5, 8).to(dtype)
    got = pos(x)
    assert got.dtype == dtype
    wanted = (x.double() + pos.pos_emb.weight[:5].double()).to(dtype)
    # float32 noise in the sum can move a half-precision tie, and nothing more.
    torch.testing.assert_close(got, wanted, rtol=torch.finfo(dtype).eps, atol=0)


def test_the_last_row_can_be_used_and_none_past_it():
    pos = LearnedPosEmbedding(10, 4)
    assert pos(torch.zeros(3, 4), offset=7).shape == (3, 4)
    with pytest.raises(
        ValueError, match="LearnedPosEmbedding: positions must stay below max_len=10"
    ):
        pos(torch.zeros(3, 4), offset=8)
    with pytest.raises(ValueError, match="below max_len=10, got 10"):
        pos(torch.zeros(11, 4))
    with pytest.raises(ValueError, match="below max_len=10, got 10"):
        pos(torch.zeros(1, 4), position_ids=torch.tensor([10]))


def test_bad_input_is_named():
    pos = LearnedPosEmbedding(10, 4)
    with pytest.raises(ValueError, match=r"x must have shape \(L, D\) or \(N, L, D\)"):
        pos(torch.zeros(4))
    with pytest.raises(ValueError, match=r"x must have shape"):
        pos(torch.zeros(1, 1, 3, 4))
    with pytest.raises(TypeError, match="x must be a float16"):
        pos(torch.zeros(3, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match="embed_dim must be 4, got 5"):
        pos(torch.zeros(3, 5))
    with pytest.raises(ValueError, match="offset must be at least 0, got -1"):
        pos(torch.zeros(3, 4), -1)
    with pytest.raises(TypeError, match="offset must be an int"):
        pos(torch.zeros(3, 4), True)
    with pytest.raises(ValueError, match="must not be negative"):
        pos(torch.zeros(3, 4), position_ids=torch.tensor([0, -2, 1]))
    with pytest.raises(TypeError, match="must be an integer tensor"):
        pos(torch.zeros(3, 4), position_ids=torch.zeros(3))
    with pytest.raises(ValueError, match="exclude each other"):
        pos(torch.zeros(3, 4), 2, position_ids=torch.arange(3))


@pytest.mark.parametrize("size", [0, -1])
def test_sizes_must_be_positive(size):
    with pytest.raises(ValueError, match="max_len must be at least 1"):
        LearnedPosEmbedding(size, 4)
    with pytest.raises(ValueError, match="embed_dim must be at least 1"):
        LearnedPosEmbedding(4, size)


@COMPILERS
def test_one_graph_for_all_lengths(backend):
    pos = LearnedPosEmbedding(64, 8)
    calls = [(torch.randn(2, n, 8),) for n in (5, 3, 17, 64)]
    assert compilations(pos, calls, dynamic=True, backend=backend) == 1
