"""FIRE on both sides of its threshold."""

import copy

import pytest
import torch

import posenc
from posenc.attention import DistanceTable, RowBias
from support.biases import assert_is_formula, drawn, qkv


def formula_of(threshold, *, learned=True):
    def formula(given, h, i, j):
        c = given["c"].abs()
        most = torch.tensor(threshold, dtype=torch.float64)
        most = given["L_multiplier"].abs() * most if learned else most
        scale = torch.maximum(most, torch.tensor(i, dtype=torch.float64))
        ratio = torch.log(c * abs(i - j) + 1) / torch.log(c * scale + 1)
        hidden = torch.relu(given["mlp.0.weight"][:, 0] * ratio + given["mlp.0.bias"])
        return given["mlp.2.weight"][h] @ hidden + given["mlp.2.bias"][h]

    return formula


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("threshold", [512.0, 3.7, 0.5], ids=["table", "rows", "all-rows"])
@pytest.mark.parametrize("learned", [True, False], ids=["learned", "fixed"])
def test_attention_is_the_formula(threshold, learned, causal):
    torch.manual_seed(0)
    keywords = {"init_c": 0.3, "threshold": threshold, "learn_threshold": learned}
    bias = posenc.FIRE(4, hidden=5, causal=causal, **keywords)
    kind = DistanceTable if threshold == 512.0 else RowBias
    assert isinstance(bias.as_bias(7), kind)
    assert_is_formula(bias, formula_of(threshold, learned=learned), kv_heads=2)
    assert_is_formula(bias, formula_of(threshold, learned=learned), queries=1, keys=9)


def test_a_threshold_that_was_learned_decides_by_its_value():
    """The last query is at index 10: past a threshold of 9.9."""
    bias = posenc.FIRE(2, threshold=20.0)
    with torch.no_grad():
        bias.L_multiplier.fill_(-0.495)
    assert isinstance(bias.as_bias(10), DistanceTable)
    assert isinstance(bias.as_bias(11), RowBias)


def test_positions_count_from_the_beginning_of_a_document():
    """A packed document has the bias that it has alone."""
    bias = posenc.FIRE(2, threshold=2.0)
    ids = torch.tensor([[0] * 6 + [1] * 5, [-1] * 3 + [7] * 8])
    q, k, v = (x.detach() for x in qkv(2, 11, 11))
    got = bias.attention(q, k, v, document_ids=ids)
    for row, part in ((0, slice(6)), (0, slice(6, 11)), (1, slice(3, 11))):
        alone = bias.attention(*(x[row : row + 1, :, part] for x in (q, k, v)))
        torch.testing.assert_close(got[row, :, part], alone[0], rtol=1e-10, atol=1e-10)
    whole = bias.bias(11, document_ids=ids)
    torch.testing.assert_close(whole[0, :, 6:, 6:], bias.bias(5))


def test_a_table_is_refused_past_the_threshold():
    bias = posenc.FIRE(2, threshold=5.0)
    assert bias.table(6).shape == (2, 6)
    with pytest.raises(ValueError, match="FIRE: the bias must be a function of the distance"):
        bias.table(8)
    with pytest.raises(TypeError, match="relative_score_mod: bias must be Slopes, Dist"):
        bias.score_mod(8, 8)


def test_numbers_that_are_not_positive_are_refused():
    with pytest.raises(ValueError, match="FIRE: threshold must be finite and above zero"):
        posenc.FIRE(2, threshold=0.0)
    with pytest.raises(ValueError, match="FIRE: init_c must be finite and above zero"):
        posenc.FIRE(2, init_c=-1.0)


@pytest.mark.parametrize("name", ["c", "L_multiplier"])
@pytest.mark.parametrize("keys", [9, 40], ids=["table", "rows"])
def test_a_factor_of_zero_is_the_limit(name, keys):
    """With c towards 0 the ratio tends to (i - j) / max(L, i); with L at 0 the scale is i."""
    fire = drawn(posenc.FIRE, 2, hidden=3, threshold=20.0)
    near = copy.deepcopy(fire)
    with torch.no_grad():
        getattr(fire, name).zero_()
        getattr(near, name).fill_(1e-6)
    got, wanted = (module.bias(keys, dtype=torch.float64) for module in (fire, near))
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4)
    q, k, v = qkv(2, keys, keys)
    fire(q, k, v).square().sum().backward()
    assert all(p.grad.isfinite().all() for p in fire.parameters())


def test_a_checkpoint_may_have_its_numbers_without_an_axis():
    """FSDP2 shards no parameter of shape (), so ours have one axis; older ones had none."""
    fire = drawn(posenc.FIRE, 2, hidden=3)
    state = {name: x.reshape(()) if x.numel() == 1 else x for name, x in fire.state_dict().items()}
    other = posenc.FIRE(2, hidden=3)
    other.load_state_dict(state)
    assert other.c.shape == other.L_multiplier.shape == (1,)
    assert torch.equal(other.bias(9), fire.bias(9))
