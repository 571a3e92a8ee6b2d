"""RotaryPosEmbedding, for one tensor, and XPos, with a decay."""

import pytest
import torch

import oracles
from posenc.functional import rotary_pos_embedding
from posenc.nn import RotaryPosEmbedding, XPos
from posenc.nn._tables import GROWTH_LIMIT
from support.assertions import COMPILERS, assert_rotated, assert_within_ulps

LAYOUTS = pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "half"])


def storage(module):
    return module.cos_cached.data_ptr(), module.sin_cached.data_ptr()


@LAYOUTS
@pytest.mark.parametrize("max_seq_len", [None, 64])
@pytest.mark.parametrize("shape", [(5, 8), (2, 5, 8), (2, 3, 5, 8), (0, 5, 8), (2, 0, 8)])
def test_embedding_equals_the_stateless_form(shape, max_seq_len, interleaved):
    rope, x = RotaryPosEmbedding(None, max_seq_len, interleaved), torch.randn(shape)
    assert torch.equal(rope(x), rotary_pos_embedding(x, None, interleaved))


def test_embedding_takes_positions_for_all_or_for_each_sequence():
    rope, x = RotaryPosEmbedding(), torch.randn(2, 3, 4, 8)
    for ids in (torch.tensor([3, 1, 3, 0]), torch.tensor([[0, 1, 2, 3], [9, 8, 7, 100]])):
        assert torch.equal(rope(x, ids), rotary_pos_embedding(x, ids))
        assert torch.equal(rope(x, position_ids=ids.int()), rotary_pos_embedding(x, ids))


class TestCache:
    """As the seed words it: reused while covered; rebuilt on length, device or width."""

    def test_nothing_is_built_before_a_size_is_known(self):
        assert RotaryPosEmbedding().cos_cached is None
        assert RotaryPosEmbedding(embed_dim=8).cos_cached is None

    def test_covered_positions_reuse_the_same_storage(self):
        rope = RotaryPosEmbedding()
        rope(torch.randn(16, 8))
        before = storage(rope)
        rope(torch.randn(2, 3, 8))
        rope(torch.randn(16, 8).bfloat16())
        rope(torch.randn(1, 8), torch.tensor([15]))
        assert storage(rope) == before

    def test_a_longer_input_rebuilds(self):
        rope = RotaryPosEmbedding()
        rope(torch.randn(16, 8))
        before = rope.cos_cached
        rope(torch.randn(17, 8))
        assert rope.cos_cached.shape[0] >= 17
        assert torch.equal(rope.cos_cached[:16], before)

    def test_growth_is_amortised(self):
        rope, built = RotaryPosEmbedding(), set()
        for position in range(2000):
            rope(torch.zeros(1, 8), torch.tensor([position]))
            built.add(rope.cos_cached.shape[0])
        assert len(built) <= 12

    def test_another_width_rebuilds(self):
        rope = RotaryPosEmbedding()
        rope(torch.randn(16, 8))
        x = torch.randn(16, 12)
        assert torch.equal(rope(x), rotary_pos_embedding(x))
        assert rope.cos_cached.shape == (16, 6)

    def test_another_device_has_its_own(self):
        for rope in (RotaryPosEmbedding(8, 16), RotaryPosEmbedding()):
            assert rope(torch.randn(4, 8, device="meta")).is_meta
            x = torch.randn(4, 8)
            assert torch.equal(rope(x), rotary_pos_embedding(x))
            assert not rope.cos_cached.is_meta
            assert rope.to("meta").cos_cached is None or rope.cos_cached.is_meta

    def test_max_seq_len_is_built_at_once_when_the_width_is_known(self):
        rope = RotaryPosEmbedding(embed_dim=8, max_seq_len=32)
        assert rope.cos_cached.shape == rope.sin_cached.shape == (32, 4)
        before = storage(rope)
        rope(torch.randn(32, 8))
        assert storage(rope) == before

    def test_max_seq_len_is_built_at_the_first_call_when_it_is_not(self):
        rope = RotaryPosEmbedding(max_seq_len=32)
        rope(torch.randn(3, 8))
        assert rope.cos_cached.shape == (32, 4)

    def test_positions_past_the_growth_limit_are_exact_and_not_kept(self):
        rope = RotaryPosEmbedding()
        x, far = torch.randn(2, 8), [GROWTH_LIMIT, 2**31]
        assert_rotated(rope(x, torch.tensor(far)), x, far, interleaved=True)
        assert rope.cos_cached is None

    def test_an_error_leaves_the_cache_alone(self):
        rope = RotaryPosEmbedding(max_seq_len=32)
        rope(torch.randn(3, 8))
        before = storage(rope)
        for bad in (torch.randn(33, 8), torch.randn(3, 7), torch.ones(3, 8).long()):
            with pytest.raises((ValueError, TypeError)):
                rope(bad)
        with pytest.raises(ValueError, match="negative"):
            rope(torch.randn(3, 6), torch.tensor([0, -1, 2]))
        assert storage(rope) == before

    def test_a_table_born_in_inference_mode_serves_training(self):
        rope = RotaryPosEmbedding()
        with torch.inference_mode():
            rope(torch.randn(4, 8))
        x = torch.randn(4, 8, requires_grad=True)
        rope(x).sum().backward()
        assert x.grad.isfinite().all()


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: RotaryPosEmbedding(embed_dim=8.0), TypeError, "embed_dim must be an int"),
        (lambda: RotaryPosEmbedding(embed_dim=5), ValueError, "embed_dim must be even.*got 5"),
        (lambda: RotaryPosEmbedding(max_seq_len=0), ValueError, "max_seq_len must be at least 1"),
        (lambda: RotaryPosEmbedding()(torch.ones(3, 4).long()), TypeError, "input_ must be a fl"),
        (lambda: RotaryPosEmbedding()(torch.ones(3, 5)), ValueError, "must be even.*got 5"),
        (lambda: RotaryPosEmbedding()(torch.ones(4)), ValueError, r"shape \(\.\.\., L, D\)"),
        (lambda: RotaryPosEmbedding(4)(torch.ones(3, 6)), ValueError, "embed_dim must be 4, got 6"),
        (
            lambda: RotaryPosEmbedding(None, 8)(torch.ones(3, 4), torch.tensor([5, 8, 1])),
            ValueError,
            r"below max_seq_len=8, got 8.\n  Raise max_seq_len, or pass smaller ones.",
        ),
    ],
)
def test_bad_input_is_refused(call, error, text):
    with pytest.raises(error, match=text):
        call()


@COMPILERS
def test_a_compiled_call_still_refuses_positions_outside_the_table(backend):
    rope = RotaryPosEmbedding(4, 8)
    compiled = torch.compile(rope, fullgraph=True, backend=backend)
    compiled(torch.randn(3, 4), torch.tensor([0, 1, 2]))
    for bad in (-1, 8):
        # By the kernel, or by an assertion where Inductor wrote the rotation itself.
        with pytest.raises((ValueError, RuntimeError), match="positions must be in"):
            compiled(torch.randn(3, 4), torch.tensor([0, bad, 2]))


def test_bad_positions_of_an_empty_batch_are_refused():
    for module in (RotaryPosEmbedding(4, 8), RotaryPosEmbedding(4)):
        for ids in ([0, -1, 2], [0, 1, 2**33]):
            with pytest.raises(ValueError, match="positions must"):
                module(torch.randn(0, 3, 4), torch.tensor(ids))


def xpos_rotation(x, positions, sign, *, max_seq_len=64, scale_base=512.0, interleaved=True):
    """The paper's definition, channel by channel in float64."""
    dim = x.shape[-1]
    cos, sin = oracles.exact_cos_sin(positions, dim)
    zeta = torch.tensor([(2 * i / dim + 0.4) / 1.4 for i in range(dim // 2)], dtype=torch.float64)
    power = (torch.tensor(positions, dtype=torch.float64) - max_seq_len // 2) / scale_base
    scale = zeta ** (sign * power[:, None])
    return oracles.rotate(x, cos * scale, sin * scale, interleaved=interleaved)


@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "half"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_xpos_is_the_formula(dtype, interleaved):
    xpos = XPos(8, max_seq_len=64, interleaved=interleaved)
    q, k = torch.randn(2, 3, 5, 8).to(dtype), torch.randn(2, 1, 5, 8).to(dtype)
    at = list(range(20, 25))
    for got, x, sign in zip(xpos(q, k, 20), (q, k), (1, -1), strict=True):
        wanted = xpos_rotation(x, at, sign, interleaved=interleaved)
        size = oracles.pair_magnitude(wanted, 4, interleaved=interleaved)
        assert_within_ulps(got, wanted, 1.0, size)


def test_xpos_refuses_bad_input():
    xpos, x = XPos(8, max_seq_len=16), torch.randn(1, 1, 4, 8)
    with pytest.raises(ValueError, match="below max_seq_len=16, got 18"):
        xpos(x, x, 15)
    with pytest.raises(ValueError, match="head_dim of k must be 8"):
        xpos(x, x[..., :4])
    with pytest.raises(ValueError, match="scale_base must be finite"):
        XPos(8, scale_base=0.0)


def test_xpos_refuses_a_range_that_would_overflow():
    with pytest.raises(ValueError, match="Raise scale_base to 745 or more"):
        XPos(8, max_seq_len=65536)
    assert XPos(8, max_seq_len=65536, scale_base=745.0).q_cos.isfinite().all()
