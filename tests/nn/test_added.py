"""Modules that return ``dropout(g x + alpha PE)``: sinusoids, of grids too, and learned vectors."""

import copy

import pytest
import torch
from torch.autograd import gradcheck

import oracles
from posenc import (
    LearnedPosEmbedding,
    SinusoidalGrid,
    SinusoidalPE,
    SinusoidalPosEmbedding,
    positions,
)
from posenc.functional import sinusoidal_grid_embedding
from support.assertions import assert_within_ulps

SINUSOIDS = pytest.mark.parametrize(
    "make",
    [
        lambda width=16, **options: SinusoidalPosEmbedding(**options),
        lambda width=16, **options: SinusoidalPE(64, width, **options),
    ],
    ids=["SinusoidalPosEmbedding", "SinusoidalPE"],
)
ALL = pytest.mark.parametrize(
    "make",
    [
        lambda **options: SinusoidalPosEmbedding(embed_dim=16, **options),
        lambda **options: SinusoidalPE(400, 16, **options),
        lambda **options: SinusoidalGrid((20, 20), embed_dim=16, **options),
        lambda **options: LearnedPosEmbedding(400, 16, **options),
    ],
    ids=["SinusoidalPosEmbedding", "SinusoidalPE", "SinusoidalGrid", "LearnedPosEmbedding"],
)
FACTORS = pytest.mark.parametrize(
    ("options", "gain", "alpha"),
    [
        pytest.param({}, 1.0, 1.0, id="none"),
        pytest.param({"scale_input": True}, 4.0, 1.0, id="input"),
        pytest.param({"scale": 0.3}, 1.0, 0.3, id="scale"),
        pytest.param({"scale": 0.25, "learn_scale": True}, 1.0, 0.25, id="learned"),
        pytest.param({"scale_input": True, "scale": 3.0}, 4.0, 3.0, id="both"),
    ],
)


def sinusoids(length=20):
    return oracles.sinusoid(range(length), 16)


@ALL
def test_dropout_takes_whole_sums_and_only_in_training(make):
    """Five standard deviations of the count of 6400 channels."""
    module, x = make(dropout=0.25), torch.full((400, 16), 7.0)
    exact = module.eval()(x)
    got = module.train()(x)
    gone = got == 0
    assert abs(gone.double().mean() - 0.25) < 5 * (0.25 * 0.75 / 6400) ** 0.5
    torch.testing.assert_close(got[~gone], exact[~gone] / 0.75)
    assert not (exact == 0).any()
    with pytest.raises(ValueError, match="dropout must be"):
        make(dropout=1.1)


@ALL
def test_inputs_are_embeddings_of_the_width(make):
    for shape in ((16,), (1, 2, 400, 16)):
        with pytest.raises(ValueError, match=r"must have shape \(L, D\) or \(N, L, D\)"):
            make()(torch.zeros(shape))
    with pytest.raises(TypeError, match="must be a float16, bfloat16, float32 or float64"):
        make()(torch.zeros(400, 16, dtype=torch.int64))
    with pytest.raises(ValueError, match="embed_dim must be 16, got 15"):
        make()(torch.zeros(400, 15))


@SINUSOIDS
@pytest.mark.parametrize("shape", [(5, 8), (2, 5, 8), (2, 5, 7), (0, 5, 8), (2, 0, 8), (64, 2)])
def test_a_sinusoid_is_added(make, shape):
    x = torch.randn(shape)
    got = make(shape[-1])(x)
    table = oracles.sinusoid(range(shape[-2]), shape[-1]).view(shape[-2:])
    assert got.shape == shape
    assert_within_ulps(got, x + table, 1, (x.abs() + table.abs()).double())


@SINUSOIDS
@FACTORS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_sum_is_rounded_once(make, options, gain, alpha, dtype):
    """The table adds half an ulp of its own, and half precision is summed in float32."""
    x = torch.randn(2, 20, 16).to(dtype)
    got = make(**options)(x)
    table = sinusoids()
    exact = gain * x.double() + alpha * table
    of_table = alpha * 0.5 * oracles.ulp(table.abs(), torch.float32)
    in_float64 = dtype == torch.float32 and options
    noise = 1e-15 if in_float64 else 2e-7 * (gain * x.double().abs() + alpha)
    assert got.dtype == dtype
    allowed = 0.5 * oracles.ulp(exact.abs(), dtype) + of_table + noise
    assert ((got - exact).abs() <= allowed).all()


@SINUSOIDS
@FACTORS
def test_float64_is_exact_and_does_not_change_the_table_of_float32(make, options, gain, alpha):
    module, x = make(**options), torch.randn(20, 16)
    before = module(x)
    got = module(x.double())
    assert (got - (gain * x.double() + alpha * sinusoids())).abs().max() < 8e-15
    assert torch.equal(module(x), before)


@SINUSOIDS
def test_nothing_is_saved_but_what_is_learned(make):
    assert make(scale_input=True, scale=2.0, dropout=0.5).state_dict() == {}
    module = make(scale=2.0, learn_scale=True)
    assert list(module.state_dict()) == ["alpha"]
    assert module.alpha.item() == 2.0
    assert list(module.buffers()) == []


@SINUSOIDS
def test_the_factor_gets_its_gradient(make):
    module = make(learn_scale=True)
    x = torch.randn(2, 16, dtype=torch.float64, requires_grad=True)
    alpha = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    run = torch.func.functional_call
    assert gradcheck(lambda x, alpha: run(module, {"alpha": alpha}, (x,)), (x, alpha))
    module(x.detach().float()).sum().backward()
    assert abs(module.alpha.grad.item() - sinusoids(2).sum().item()) < 1e-5


@SINUSOIDS
def test_the_factor_is_cast_with_the_model_and_a_sum_is_rounded_once(make):
    module, x = make(scale=0.3, learn_scale=True), torch.randn(3, 16)
    wanted = module(x)
    cast = copy.deepcopy(module).bfloat16()
    assert cast.alpha.dtype == torch.bfloat16
    assert torch.equal(cast(x), make(scale=cast.alpha.item(), learn_scale=True)(x))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(module(x), wanted)


@SINUSOIDS
def test_a_checkpoint_may_have_the_factor_without_an_axis(make):
    """FSDP2 shards no parameter of shape (), so ours has one axis; older ones had none."""
    module = make(scale=0.3, learn_scale=True)
    assert module.alpha.shape == (1,)
    model = torch.nn.ModuleDict({"position": module})
    model.load_state_dict({"position.alpha": torch.tensor(0.5)})
    assert model["position"].alpha.tolist() == [0.5]


@SINUSOIDS
def test_bad_factors_are_refused(make):
    with pytest.raises(TypeError, match="scale_input must be True or False"):
        make(scale_input=8.0)
    with pytest.raises(ValueError, match="scale must be finite and above zero"):
        make(scale=0.0)
    with pytest.raises(TypeError, match="learn_scale must be True or False"):
        make(learn_scale=None)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_a_traced_module_has_the_root_of_the_width_in_full():
    """torch.jit.trace makes a tensor of a size, and its power is a float32."""
    module, x = SinusoidalPE(32, 6, scale_input=True), torch.randn(3, 6)
    assert torch.equal(torch.jit.trace(module, (x,))(x + 1), module(x + 1))


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
    with pytest.raises(ValueError, match="at least 1, got 0"):
        module(torch.zeros(3, 0))
    with pytest.raises(ValueError, match="SinusoidalPosEmbedding: seq_len must be 8, got 7"):
        SinusoidalPosEmbedding(seq_len=8)(torch.zeros(2, 7, 64))


def test_the_table_is_returned_as_a_copy():
    pe = SinusoidalPE(32, 6)
    assert pe.encodings.shape == (32, 6)
    pe.get_encoding(10).zero_()
    assert pe.get_encoding(10).abs().sum() > 0
    assert torch.equal(pe.get_encoding(10), pe.encodings[:10])
    assert pe.get_encoding(0).shape == (0, 6)
    with pytest.raises(ValueError, match="seq_len must be at most max_seq_len=32, got 33"):
        pe.get_encoding(33)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_widths_and_order_reach_the_table_of_a_grid(dtype):
    options = {"concatenated": True, "widths": (8, 12, 12), "order": (0, 2, 1)}
    module, at = SinusoidalGrid((2, 3, 4), embed_dim=32, **options), positions.grid(2, 3, 4)
    wanted = sinusoidal_grid_embedding(at, 32, dtype=dtype, **options)
    assert torch.equal(module(torch.zeros(24, 32, dtype=dtype)), wanted)
    assert module.replace(order=None).order is None


def test_another_number_of_patches_is_refused():
    module = SinusoidalGrid((3, 4), embed_dim=8, prefix=1)
    with pytest.raises(ValueError, match=r"SinusoidalGrid: 1 \+ 3 x 4 tokens must be 13, got 12"):
        module(torch.zeros(12, 8))
    with pytest.raises(TypeError, match="size must be a tuple of ints"):
        SinusoidalGrid(14, embed_dim=8)
    with pytest.raises(ValueError, match="size must be at least 1"):
        SinusoidalGrid((0, 4), embed_dim=8)


def test_learned_vectors_are_an_embedding_and_all_that_is_saved():
    pos = LearnedPosEmbedding(max_len=512, embed_dim=64)
    assert isinstance(pos.pos_emb, torch.nn.Embedding)
    assert pos.pos_emb.weight.shape == (512, 64)
    assert list(pos.state_dict()) == ["pos_emb.weight"]


@pytest.mark.parametrize("shape", [(5, 8), (2, 5, 8), (0, 5, 8), (2, 0, 8)])
def test_learned_vectors_are_added(shape):
    pos, x = LearnedPosEmbedding(16, 8), torch.randn(shape)
    rows = pos.pos_emb.weight[3 : 3 + shape[-2]]
    assert torch.equal(pos(x, 3), x + rows)
    assert torch.equal(pos(x, offset=3), x + rows)


def test_gradients_reach_only_the_learned_vectors_of_a_call():
    pos = LearnedPosEmbedding(10, 4)
    pos(torch.randn(2, 3, 4), offset=5).sum().backward()
    used = pos.pos_emb.weight.grad
    assert torch.equal(used[5:8], torch.full((3, 4), 2.0))
    assert used[:5].abs().sum() == 0
    assert used[8:].abs().sum() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_input_decides_the_dtype_of_a_sum_with_learned_vectors(dtype):
    pos, x = LearnedPosEmbedding(16, 8), torch.randn(5, 8).to(dtype)
    got = pos(x)
    assert got.dtype == dtype
    wanted = (x.double() + pos.pos_emb.weight[:5].double()).to(dtype)
    # float32 noise in the sum can move a half-precision tie, and nothing more.
    torch.testing.assert_close(got, wanted, rtol=torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize(
    ("make", "name"), [(LearnedPosEmbedding, "max_len"), (SinusoidalPE, "max_seq_len")]
)
def test_the_last_row_can_be_used_and_none_past_it(make, name):
    module, x = make(10, 4), torch.zeros(3, 4)
    assert module(x, offset=7).shape == (3, 4)
    rule = rf"below {name}=10, got 10.\n  Raise {name}, or pass"
    with pytest.raises(ValueError, match=rule + " a smaller offset"):
        module(x, offset=8)
    with pytest.raises(ValueError, match=f"below {name}=10, got 10"):
        module(torch.zeros(11, 4))
    with pytest.raises(ValueError, match=f"below {name}=10, got 10"):
        module(x, position_ids=torch.tensor([0, 1, 10]))
    with pytest.raises(ValueError, match=f"{name} must be at least 1"):
        make(0, 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_a_learned_table_may_have_a_dtype_of_its_own(dtype):
    module = LearnedPosEmbedding(16, 8, dtype=dtype)
    x = torch.randn(2, 5, 8)
    assert module.pos_emb.weight.dtype == module.replace().pos_emb.weight.dtype == dtype
    got = module(x, 3)
    assert got.dtype == x.dtype
    rows = module.pos_emb.weight[3:8].detach().double()
    exact = x.double() + rows
    largest = torch.stack(torch.broadcast_tensors(x.double(), rows, exact)).abs().amax(0)
    assert ((got - exact).abs() <= oracles.ulp(largest, torch.float32)).all()
    with pytest.raises(TypeError, match="LearnedPosEmbedding: dtype must be one of float16"):
        LearnedPosEmbedding(16, 8, dtype=torch.int64)
