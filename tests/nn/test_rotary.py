import pytest
import torch

from posenc.functional import rotary_pos_embedding
from posenc.nn import RoPE, RotaryPosEmbedding
from posenc.nn._tables import GROWTH_LIMIT
from support.assertions import COMPILERS, assert_rotated, compilations

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


class TestEmbeddingErrors:
    def test_wrong_types_are_refused(self):
        with pytest.raises(TypeError, match="RotaryPosEmbedding: input_ must be a float16"):
            RotaryPosEmbedding()(torch.ones(3, 4).long())
        with pytest.raises(TypeError, match="position_ids must be an integer tensor"):
            RotaryPosEmbedding()(torch.ones(3, 4), torch.ones(3))
        with pytest.raises(TypeError, match="embed_dim must be an int"):
            RotaryPosEmbedding(embed_dim=8.0)
        with pytest.raises(TypeError, match="max_seq_len must be an int"):
            RotaryPosEmbedding(max_seq_len=True)

    def test_odd_zero_and_unexpected_widths_are_refused(self):
        with pytest.raises(ValueError, match=r"must be even.*got 5"):
            RotaryPosEmbedding()(torch.ones(3, 5))
        with pytest.raises(ValueError, match=r"embed_dim must be even.*got 5"):
            RotaryPosEmbedding(embed_dim=5)
        with pytest.raises(ValueError, match="embed_dim must be 4, got 6"):
            RotaryPosEmbedding(embed_dim=4)(torch.ones(3, 6))
        with pytest.raises(ValueError, match="embed_dim must be at least 1, got 0"):
            RotaryPosEmbedding(embed_dim=0)

    def test_shapes_that_do_not_fit_are_refused(self):
        with pytest.raises(ValueError, match=r"input_ must have shape \(\.\.\., L, D\)"):
            RotaryPosEmbedding()(torch.ones(4))
        with pytest.raises(
            ValueError, match=r"position_ids must be an integer tensor of shape \(3,\) or \(2, 3\)"
        ):
            RotaryPosEmbedding()(torch.ones(2, 3, 4), torch.arange(4))

    def test_negative_positions_and_those_past_the_limit_are_refused(self):
        rope = RotaryPosEmbedding(max_seq_len=8)
        with pytest.raises(ValueError, match="must not be negative, got -4"):
            rope(torch.ones(3, 4), torch.tensor([5, -4, 1]))
        with pytest.raises(ValueError, match="below max_seq_len=8, got 8") as caught:
            rope(torch.ones(3, 4), torch.tensor([5, 8, 1]))
        assert "Raise max_seq_len, or pass smaller ones." in str(caught.value)
        with pytest.raises(ValueError, match="below max_seq_len=8, got 8"):
            rope(torch.ones(9, 4))
        with pytest.raises(ValueError, match="max_seq_len must be at least 1"):
            RotaryPosEmbedding(max_seq_len=0)


@LAYOUTS
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_rope_rotates_queries_and_keys_with_their_own_head_counts(dtype, interleaved):
    rope = RoPE(16, 64, 500.0, interleaved=interleaved)
    q, k = torch.randn(2, 6, 5, 16).to(dtype), torch.randn(2, 2, 5, 16).to(dtype)
    ids = torch.arange(7, 12)
    for x, got in zip((q, k), rope.apply(q, k, 7), strict=True):
        assert got.dtype == dtype
        assert torch.equal(got, rotary_pos_embedding(x, ids, interleaved, base=500.0))


def test_rope_is_precomputed_and_never_rebuilt():
    rope = RoPE(8)
    assert rope.cos_cached.shape == (2048, 4)
    before = storage(rope)
    q = torch.randn(1, 1, 4, 8)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        rope.apply(q.to(dtype), q.to(dtype), offset=2044)
    assert storage(rope) == before


def test_calling_and_applying_are_the_same():
    rope, q, k = RoPE(8), torch.randn(2, 3, 4, 8), torch.randn(2, 1, 4, 8)
    ids = torch.tensor([[0, 1, 2, 3], [5, 4, 3, 2]])
    for a, b in zip(rope(q, k, 3), rope.apply(q, k, offset=3), strict=True):
        assert torch.equal(a, b)
    for x, got in zip((q, k), rope.apply(q, k, position_ids=ids), strict=True):
        assert torch.equal(got, rotary_pos_embedding(x, ids))


def test_a_models_own_apply_still_reaches_every_module():
    """`model.apply(init)` calls `apply` of each child with a function: RoPE must pass it on."""
    model, seen = torch.nn.Sequential(torch.nn.Linear(2, 2), RoPE(8)), []
    model.apply(lambda module: seen.append(type(module).__name__))
    assert seen == ["Linear", "RoPE", "Sequential"]


@pytest.mark.parametrize(
    ("q_shape", "k_shape", "problem"),
    [
        ((1, 2, 3, 8), (1, 2, 4, 8), "agree in batch, length, head_dim and device"),
        ((2, 2, 3, 8), (1, 2, 3, 8), "agree in batch, length, head_dim and device"),
        ((1, 2, 3, 8), (1, 2, 3, 6), "head_dim of k must be 8, got 6"),
        ((1, 2, 3, 6), (1, 2, 3, 8), "head_dim of q must be 8, got 6"),
        ((2, 3, 8), (1, 2, 3, 8), r"q must have shape \(B, H, L, D\)"),
        ((1, 2, 3, 8), (3, 8), r"k must have shape \(B, H, L, D\)"),
    ],
)
def test_rope_refuses_shapes_that_do_not_belong_together(q_shape, k_shape, problem):
    with pytest.raises(ValueError, match=problem):
        RoPE(8).apply(torch.ones(q_shape), torch.ones(k_shape))


def test_rope_refuses_bad_arguments():
    rope, x = RoPE(8, max_seq_len=16), torch.ones(1, 2, 4, 8)
    with pytest.raises(ValueError, match="RoPE: head_dim must be even"):
        RoPE(7)
    with pytest.raises(ValueError, match="base must be finite and above zero"):
        RoPE(8, base=0.0)
    with pytest.raises(ValueError, match="max_seq_len must be at least 1"):
        RoPE(8, 0)
    with pytest.raises(ValueError, match="offset must be at least 0, got -1"):
        rope.apply(x, x, -1)
    with pytest.raises(TypeError, match="offset must be an int"):
        rope.apply(x, x, 1.5)
    with pytest.raises(ValueError, match="below max_seq_len=16, got 16"):
        rope.apply(x, x, 13)
    with pytest.raises(ValueError, match="below max_seq_len=16, got 99"):
        rope.apply(x, x, position_ids=torch.tensor([0, 99, 1, 2]))
    with pytest.raises(ValueError, match="exclude each other"):
        rope.apply(x, x, 2, position_ids=torch.arange(4))
    with pytest.raises(TypeError, match=r"k must be a torch.Tensor"):
        rope.apply(x, None)
    with pytest.raises(TypeError, match="q must be a float16"):
        rope.apply(x.long(), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("max_seq_len", [None, pytest.param(64, marks=pytest.mark.slow)])
@COMPILERS
def test_embedding_compiles_to_one_graph(max_seq_len, dtype, backend):
    rope = RotaryPosEmbedding(8, max_seq_len)
    calls = [(torch.randn(2, n, 8).to(dtype),) for n in (5, 3, 17, 63)]
    assert compilations(rope, calls, dynamic=True, backend=backend) == 1


@COMPILERS
def test_rope_compiles_to_one_graph_for_all_lengths_and_offsets(backend):
    rope = RoPE(8, 128)
    calls = [
        (torch.randn(2, 4, n, 8), torch.randn(2, 2, n, 8), offset)
        for n, offset in ((5, 2), (3, 9), (17, 30), (63, 64))
    ]
    assert compilations(rope, calls, dynamic=True, backend=backend) == 1


@pytest.mark.parametrize("how", ["ids", "shared-ids", "offsets"])
@COMPILERS
def test_rope_compiles_to_one_graph_for_all_positions(how, backend):
    rope = RoPE(8, 128)

    def rotated(q, k, positions):
        if how == "offsets":
            return rope(q, k, positions)
        return rope(q, k, position_ids=positions)

    calls = []
    for n in (5, 3, 17):
        positions = {
            "ids": torch.randint(0, 128, (2, n)),
            "shared-ids": torch.arange(n),
            "offsets": torch.tensor([3, 100]),
        }[how]
        calls.append((torch.randn(2, 4, n, 8), torch.randn(2, 2, n, 8), positions))
    assert compilations(rotated, calls, dynamic=True, backend=backend) == 1


def test_a_compiled_call_still_refuses_positions_outside_the_table():
    rope = RotaryPosEmbedding(4, 8)
    compiled = torch.compile(rope, fullgraph=True)
    compiled(torch.randn(3, 4), torch.tensor([0, 1, 2]))
    for bad in (-1, 8):
        # By the kernel, or by an assertion where Inductor wrote the rotation itself.
        with pytest.raises((ValueError, RuntimeError), match="positions must be in"):
            compiled(torch.randn(3, 4), torch.tensor([0, bad, 2]))


def test_positions_are_refused_even_where_nothing_is_rotated():
    for module in (RotaryPosEmbedding(4, 8), RotaryPosEmbedding(4)):
        for ids in ([0, -1, 2], [0, 1, 2**33]):
            with pytest.raises(ValueError, match="positions must"):
                module(torch.randn(0, 3, 4), torch.tensor(ids))
