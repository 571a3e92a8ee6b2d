import pytest
import torch

from posenc import SinusoidalGrid, positions
from posenc.functional import sinusoidal_grid_embedding
from support.assertions import compilations


@pytest.mark.parametrize("size", [(3, 5), (2, 3, 4), (7,), (1, 4)], ids=str)
@pytest.mark.parametrize("prefix", [0, 1, 4])
def test_patches_get_the_rows_of_the_function_and_a_prefix_nothing(size, prefix):
    module = SinusoidalGrid(size, embed_dim=24, prefix=prefix, concatenated=True)
    rows = sinusoidal_grid_embedding(positions.grid(*size), 24, concatenated=True)
    wanted = torch.cat((torch.zeros(prefix, 24), rows))
    assert torch.equal(module.encodings, wanted)
    x = torch.randn(2, *wanted.shape)
    assert torch.equal(module(x), x + wanted)
    assert torch.equal(module(x[0]), x[0] + wanted)


def test_widths_and_order_reach_the_table():
    options = {"concatenated": True, "widths": (8, 12, 12), "order": (0, 2, 1)}
    module = SinusoidalGrid((2, 3, 4), embed_dim=32, **options)
    assert torch.equal(
        module.encodings, sinusoidal_grid_embedding(positions.grid(2, 3, 4), 32, **options)
    )
    assert module.replace(order=None).order is None


def test_float64_gets_a_table_of_its_own():
    module, x = SinusoidalGrid((3, 4), embed_dim=8), torch.zeros(12, 8, dtype=torch.float64)
    rows = sinusoidal_grid_embedding(positions.grid(3, 4), 8, dtype=torch.float64)
    assert torch.equal(module(x), rows)


def test_another_number_of_patches_is_named():
    module = SinusoidalGrid((3, 4), embed_dim=8, prefix=1)
    with pytest.raises(ValueError, match=r"SinusoidalGrid: 1 \+ 3 x 4 tokens must be 13, got 12"):
        module(torch.zeros(12, 8))
    with pytest.raises(ValueError, match="embed_dim must be 8, got 6"):
        module(torch.zeros(13, 6))
    with pytest.raises(TypeError, match="size must be a tuple of ints"):
        SinusoidalGrid(14, embed_dim=8)
    with pytest.raises(ValueError, match="size must be at least 1"):
        SinusoidalGrid((0, 4), embed_dim=8)


@pytest.mark.slow
def test_one_graph_for_all_batches():
    module = SinusoidalGrid((3, 4), embed_dim=8)
    calls = [(torch.randn(n, 12, 8),) for n in (2, 3, 5)]
    assert compilations(module, calls, dynamic=True) == 1
