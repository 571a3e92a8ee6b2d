"""What all modules with a relative bias share."""

import copy

import pytest
import torch

import oracles
import posenc
from support.biases import drawn, qkv

TABLES = {
    "T5Bias": lambda: posenc.T5Bias(4, num_buckets=8, max_distance=20, causal=False),
    "T5Bias-causal": lambda: posenc.T5Bias(4, num_buckets=8, max_distance=20, causal=True),
    "LearnedBias": lambda: posenc.LearnedBias(4, max_distance=5),
    "LearnedBias-both-sides": lambda: posenc.LearnedBias(4, max_distance=5, causal=False),
    "KERPLE": lambda: posenc.KERPLE(4),
    "KERPLE-power": lambda: posenc.KERPLE(4, kind="power", causal=False),
    "Sandwich": lambda: posenc.Sandwich(4, dim=16),
    "ALiBi-learned": lambda: posenc.ALiBi(4, learned=True),
    "FIRE": lambda: posenc.FIRE(4, hidden=3, threshold=20.0),
    "FIRE-fixed": lambda: posenc.FIRE(4, hidden=3, causal=False, learn_threshold=False),
}
LEARNED = {name: make for name, make in TABLES.items() if name != "Sandwich"}
# Their bias is no table.
OTHERS = {
    "ForgetGate": lambda: posenc.ForgetGate(4, embed_dim=6),
    "GridBias": lambda: posenc.GridBias((2, 3), num_heads=4),
    "GridBias-continuous": lambda: posenc.GridBias((2, 3), num_heads=4, continuous=True, hidden=3),
    "CoPE": lambda: posenc.CoPE(8, max_pos=4),
}
EACH = pytest.mark.parametrize("make", TABLES.values(), ids=TABLES)
PARAMETERS = {**LEARNED, **OTHERS}


def exact(module, q, k, v, bias):
    scale = q.shape[-1] ** -0.5
    return oracles.attention(q, k, v, bias, scale)


@EACH
def test_one_query_gets_the_last_row_and_an_offset_another(make):
    module = drawn(make)
    whole = module.bias(9)
    assert torch.equal(module.bias(1, 9), whole[:, -1:])
    assert torch.equal(module.bias(2, 9, query_offset=4), whole[:, 4:6])
    q, k, v = qkv(4, 2, 9)
    got = module.attention(q, k, v, query_offset=torch.tensor([4, 7]))
    rows = torch.stack((whole[:, 4:6], whole[:, 7:9]))
    torch.testing.assert_close(got, exact(module, q, k, v, rows), rtol=0, atol=1e-6)


@EACH
def test_the_score_mod_of_one_length_is_for_as_many_keys(make):
    module = drawn(make)
    at = torch.tensor(0), torch.arange(4)[:, None, None], torch.arange(8)[:, None], torch.arange(8)
    got, wanted = (module.score_mod(*n)(torch.zeros(()), *at) for n in ((8,), (8, 8)))
    assert torch.equal(got, wanted)


@EACH
def test_the_score_mod_is_the_bias(make):
    module = drawn(make)
    b, h, q, k = torch.zeros((), dtype=torch.int64), *map(torch.arange, (4, 3, 8))
    for options in ({}, {"query_offset": 2}, {"document_ids": torch.tensor([0] * 6 + [1, 1])}):
        mod = module.score_mod(3, 8, **options)
        got = mod(torch.zeros(()), b, h[:, None, None], q[:, None], k)
        torch.testing.assert_close(got, module.bias(3, 8, **options), rtol=1e-6, atol=0)


@EACH
def test_the_bias_of_rounded_parameters_is_made_in_float32(make):
    """The bias would lose bits that the scores have."""
    module = drawn(make).bfloat16()
    wanted = copy.deepcopy(module).float()
    assert torch.equal(module.bias(30), wanted.bias(30))
    q, k, v = qkv(4, 9, 9, dtype=torch.bfloat16)
    assert torch.equal(module(q, k, v), wanted(q, k, v))


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parameters_may_be_wider_than_the_queries(make, dtype):
    """Thirty keys: past the threshold of one FIRE."""
    module = drawn(make).double()
    q, k, v = qkv(4, 30, 30, dtype=dtype)
    got = module(q, k, v)
    assert got.dtype == dtype
    got.sum().backward()
    assert all(p.grad.dtype == torch.float64 for p in module.parameters())
    wanted = exact(module, *(x.detach().double() for x in (q, k, v)), module.bias(30))
    # The output's rounding, and that of float32 scores.
    bound = torch.finfo(dtype).eps / 2 + 128 * 2**-24
    assert ((got - wanted).abs() <= bound * v.abs().max()).all()


@EACH
def test_autocast_does_not_round_the_bias(make):
    """Thirty keys: past the threshold of one FIRE."""
    module = drawn(make)
    with torch.autocast("cpu", torch.bfloat16):
        got = module.bias(30)
    assert torch.equal(got, module.bias(30))


@EACH
def test_the_bias_is_added_to_scores(make):
    module = drawn(make)
    scores = torch.randn(2, 4, 3, 7)
    assert torch.equal(module.add_bias(scores), scores + module.bias(3, 7))
    with pytest.raises(ValueError, match=r"scores must have shape \(..., 4, Q, K\)"):
        module.add_bias(scores[:, :3])


@EACH
def test_tensors_that_do_not_match_are_refused_by_the_modules_name(make):
    module = drawn(make)
    q, k, v = torch.randn(3, 1, 4, 5, 8).unbind()
    with pytest.raises(ValueError, match="v must have shape"):
        module.attention(q, k, v[:, :, 1:])
    with pytest.raises(ValueError, match="heads"):
        module.attention(q[:, :2], k[:, :2], v[:, :2])
    with pytest.raises(ValueError, match="k_len must be at least q_len=5"):
        module.bias(5, 3)


def test_parameters_have_the_dtype_that_was_asked_for():
    assert (
        posenc.LearnedBias(2, max_distance=3, dtype=torch.bfloat16).weight.dtype == torch.bfloat16
    )
    assert posenc.T5Bias(2, dtype=torch.float64, causal=False).weight.dtype == torch.float64
    with pytest.raises(TypeError, match="KERPLE: dtype must be one of"):
        posenc.KERPLE(2, dtype=torch.int64)


def test_parameters_have_torchs_default_dtype():
    """Loaders set it while they build a model in the dtype of a checkpoint."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        modules = [make() for make in PARAMETERS.values()]
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(p.dtype == torch.bfloat16 for module in modules for p in module.parameters())
