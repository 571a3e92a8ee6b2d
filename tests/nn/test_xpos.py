import pytest
import torch

import oracles
from posenc import XPos
from support.assertions import assert_within_ulps, compilations


def expected(x, positions, sign, *, max_seq_len=64, scale_base=512.0, interleaved=True):
    """The paper's definition, channel by channel in float64."""
    dim = x.shape[-1]
    cos, sin = oracles.exact_cos_sin(positions, dim)
    zeta = torch.tensor([(2 * i / dim + 0.4) / 1.4 for i in range(dim // 2)], dtype=torch.float64)
    power = (torch.tensor(positions, dtype=torch.float64) - max_seq_len // 2) / scale_base
    scale = zeta ** (sign * power[:, None])
    return oracles.rotate(x, cos * scale, sin * scale, interleaved=interleaved)


@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "half"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_queries_grow_as_keys_shrink(dtype, interleaved):
    xpos = XPos(8, max_seq_len=64, interleaved=interleaved)
    q, k = torch.randn(2, 3, 5, 8).to(dtype), torch.randn(2, 1, 5, 8).to(dtype)
    at = list(range(20, 25))
    for got, x, sign in zip(xpos(q, k, 20), (q, k), (1, -1), strict=True):
        wanted = expected(x, at, sign, interleaved=interleaved)
        size = oracles.pair_magnitude(wanted, 4, interleaved=interleaved)
        assert_within_ulps(got, wanted, 1.0, size)


def test_casts_compilation_and_loading_change_no_result():
    xpos = XPos(8, max_seq_len=64)
    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    before = xpos(q, k)
    assert torch.equal(xpos.bfloat16()(q, k)[0], before[0])
    assert not xpos.state_dict()
    calls = [(torch.randn(1, 2, n, 8), torch.randn(1, 2, n, 8)) for n in (3, 5, 9)]
    assert compilations(xpos, calls, dynamic=True, backend="aot_eager") == 1


def test_bad_input_is_refused():
    xpos, x = XPos(8, max_seq_len=16), torch.randn(1, 1, 4, 8)
    with pytest.raises(ValueError, match="below max_seq_len=16, got 18"):
        xpos(x, x, 15)
    with pytest.raises(ValueError, match="head_dim of k must be 8"):
        xpos(x, x[..., :4])
    with pytest.raises(ValueError, match="scale_base must be finite"):
        XPos(8, scale_base=0.0)


def test_a_range_that_would_overflow_is_refused():
    with pytest.raises(ValueError, match="Raise scale_base to 745 or more"):
        XPos(8, max_seq_len=65536)
    assert XPos(8, max_seq_len=65536, scale_base=745.0).q_cos.isfinite().all()
