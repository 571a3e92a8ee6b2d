import copy
import dataclasses
import inspect
import math
import pickle

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from posenc import RoPE, scaling
from posenc.numerics.frequencies import Spectrum, inverse_frequencies, scaled_rates
from posenc.numerics.tables import cos_sin
from support import rules

RULES = [
    scaling.Linear(4.0),
    scaling.NTK(4.0),
    scaling.DynamicNTK(4.0, original_length=64),
    scaling.YaRN(4.0, original_length=64),
    scaling.LongRoPE((1.0,) * 8, long_factor=(2.0,) * 8, original_length=64, factor=4.0),
    scaling.Llama3(4.0, original_length=64),
    scaling.Proportional(0.5),
]
IDS = [type(rule).__name__ for rule in RULES]

# transformers divides by d - 2 in dynamic NTK, so half a head has 4 channels or more.
even = st.integers(4, 64).map(lambda n: 2 * n)
factor = st.floats(1.0, 64.0)
length = st.integers(16, 2**17)


@st.composite
def parameters(draw, kind, dim, positions):
    found = {"rope_type": kind, "factor": draw(factor)}
    if kind == "yarn":
        optional = {
            "beta_fast": st.floats(4.0, 64.0),
            "beta_slow": st.floats(0.25, 4.0),
            "attention_factor": st.floats(0.5, 2.0),
            "mscale": st.floats(0.1, 2.0),
            "mscale_all_dim": st.floats(0.1, 2.0),
            "truncate": st.booleans(),
        }
        found |= draw(st.fixed_dictionaries({}, optional=optional))
    if kind == "longrope":
        numbers = st.lists(st.floats(1.0, 50.0), min_size=dim // 2, max_size=dim // 2)
        found |= {"short_factor": draw(numbers), "long_factor": draw(numbers)}
    if kind == "llama3":
        low = draw(st.floats(0.5, 4.0))
        found |= {"low_freq_factor": low, "high_freq_factor": low + draw(st.floats(0.5, 8.0))}
    if kind in ("yarn", "longrope", "llama3"):
        found["original_max_position_embeddings"] = draw(st.integers(16, positions))
    return found


@st.composite
def configs(draw, kind):
    head_dim, positions = draw(even), draw(length)
    share = draw(st.sampled_from([1.0, 0.5])) if head_dim % 4 == 0 else 1.0
    dim = int(head_dim * share)
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=positions,
        rope_parameters={
            "rope_theta": draw(st.floats(100.0, 1e7)),
            "partial_rotary_factor": share,
            **draw(parameters(kind, dim, positions)),
        },
    )
    return config, draw(st.sampled_from([None, positions, positions + 1, 4 * positions]))


@pytest.mark.parametrize(
    "kind", ["linear", "dynamic", "yarn", "longrope", "llama3", "proportional"]
)
@pytest.mark.filterwarnings("ignore")
def test_every_rope_type_agrees_with_transformers(kind):
    """Fifty random configs of each type, to the rounding of float32 in which they compute."""

    @given(configs(kind))
    def agree(drawn):
        config, seq_len = drawn
        # In float32.
        theirs, gain = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=seq_len)
        rope = RoPE.from_config(config)
        ours = rope.scaled_inv_freq(seq_len)
        assert rope.attention_factor(seq_len) == pytest.approx(gain, rel=1e-12)
        # float32 powers and quotients: a few ulps of each rate.
        allowed = 1e-5 * theirs.double() + 1e-12
        if kind == "llama3":
            # Its blend is a difference of turns in float32, which loses digits where they meet.
            p = config.rope_parameters
            band = p["high_freq_factor"] - p["low_freq_factor"]
            allowed += (
                rope.replace(scaling=None).scaled_inv_freq()
                * 16
                * 2.0**-24
                * p["high_freq_factor"]
                / band
            )
        assert ((ours - theirs.double()).abs() <= allowed).all()

    agree()


class TestFormulas:
    """The published formulas, worked out pair by pair."""

    rates = inverse_frequencies(16, 10_000.0)

    def test_ntk_is_a_larger_base(self):
        larger = 10_000.0 * 4.0 ** (16 / 14)
        assert torch.allclose(
            scaling.NTK(4.0)(self.rates, 10_000.0), inverse_frequencies(16, larger), rtol=1e-14
        )

    def test_llama3_with_one_border_is_a_step(self):
        rule = scaling.Llama3(8.0, original_length=64, low_freq_factor=2.0, high_freq_factor=2.0)
        turns = self.rates * 64 / math.tau
        expected = torch.where(turns < 2, self.rates / 8, self.rates)
        assert torch.equal(rule(self.rates, 1e4), expected)

    def test_yarn_takes_an_mscale_of_zero_for_one_that_is_not_used(self):
        gain = scaling.YaRN(40.0, original_length=4096, mscale=0, mscale_all_dim=1.0).gain()
        assert gain == 0.1 * math.log(40) + 1


@pytest.mark.parametrize("rule", RULES, ids=IDS)
def test_scaled_angles_stay_exact_at_far_positions(rule):
    """A rule's rate is a float64 number; its multiples are counted exactly."""
    spectrum = Spectrum(16, 10_000.0, rule.at(None))
    rates, positions = scaled_rates(spectrum).tolist(), [1, 12345, 2**20 + 3, 2**31]
    cos, sin = cos_sin(torch.tensor(positions), spectrum)
    gain = rule.at(None).gain()
    with mpmath.workprec(160):
        for row, position in enumerate(positions):
            for pair, rate in enumerate(rates):
                phi = mpmath.mpf(position) * mpmath.mpf(rate)
                assert abs(cos[row, pair].item() - float(gain * mpmath.cos(phi))) < 2e-15
                assert abs(sin[row, pair].item() - float(gain * mpmath.sin(phi))) < 2e-15


def true_rates(rule, dim, base):
    """The formulas of the rules in numbers of 160 bits."""
    pairs, b, s = dim // 2, mpmath.mpf(base), mpmath.mpf(getattr(rule, "factor", 1))
    rates = [b ** (mpmath.mpf(-2 * i) / dim) for i in range(pairs)]
    kind = type(rule)

    def blended(kept):
        shares = [min(max(share, 0), 1) for share in kept]
        return [k * rate + (1 - k) * rate / s for k, rate in zip(shares, rates, strict=True)]

    if kind is scaling.NTK:
        return [rate * s ** (mpmath.mpf(-i) / (pairs - 1)) for i, rate in enumerate(rates)]
    if kind is scaling.Proportional:
        return [rate / s if i < int(rule.fraction * pairs) else 0 for i, rate in enumerate(rates)]
    if kind is scaling.Llama3:
        low, high = map(mpmath.mpf, (rule.low_freq_factor, rule.high_freq_factor))
        turns = [rate * rule.original_length / (2 * mpmath.pi) for rate in rates]
        return blended([(turn - low) / (high - low) for turn in turns])
    if kind is scaling.YaRN:
        ends = [
            dim * mpmath.log(rule.original_length / (2 * mpmath.pi * turns)) / (2 * mpmath.log(b))
            for turns in (rule.beta_fast, rule.beta_slow)
        ]
        if rule.truncate:
            ends = [mpmath.floor(ends[0]), mpmath.ceil(ends[1])]
        low, high = max(ends[0], 0), min(ends[1], dim - 1)
        return blended([1 - (i - low) / (high - low) for i in range(pairs)])
    # Those of LongRoPE at a length, or the same for every pair.
    factors = getattr(rule, "factors", [s] * pairs)
    return [rate / factor for rate, factor in zip(rates, factors, strict=True)]


_SPREAD = tuple(1 + 0.37 * i for i in range(64))
AT_A_LENGTH = [
    scaling.Linear(3.0),
    scaling.NTK(3.0),
    scaling.DynamicNTK(7.3, original_length=4096).at(131_072),
    scaling.YaRN(3.0, original_length=4096),
    scaling.YaRN(40.0, original_length=4096, truncate=False),
    scaling.LongRoPE(_SPREAD, long_factor=_SPREAD, original_length=4096).at(None),
    scaling.Llama3(8.0, original_length=8192),
    scaling.Proportional(0.5, factor=3.0),
]


@pytest.mark.parametrize("base", [1e4, 5e5])
@pytest.mark.parametrize("rule", AT_A_LENGTH, ids=lambda rule: type(rule).__name__)
def test_the_rates_of_a_rule_are_what_the_manual_says(rule, base):
    """A power, a product and the rates themselves are each rounded: under 5e-16 for a rate below 1.

    Then an angle is within 1e-10 at position 131,072, and within 2e-6 at 2**31.
    """
    got = scaled_rates(Spectrum(128, base, rule)).tolist()
    with mpmath.workprec(160):
        wanted = true_rates(rule, 128, base)
        worst = max(abs(rate - mpmath.mpf(found)) for rate, found in zip(wanted, got, strict=True))
    assert 0 < worst < 5e-16
    assert worst * 131_072 + 1.5e-15 < 1e-10
    assert worst * 2**31 + 1.5e-15 < 2e-6


def test_the_rates_and_the_gain_of_longrope_are_of_one_length():
    """Without a length both are those up to the trained length, as from ``at(None)``."""
    rates = inverse_frequencies(4)
    rule = scaling.LongRoPE(
        (1.0, 2.0),
        long_factor=(4.0, 8.0),
        original_length=64,
        attention_factor=1.5,
        short_attention_factor=1.25,
    )
    short, long = rates / torch.tensor([1.0, 2.0]), rates / torch.tensor([4.0, 8.0])
    assert torch.equal(rule(rates, 1e4), short)
    assert rule.gain() == rule.at(None).gain() == rule.at(64).gain() == 1.25
    assert torch.equal(rule.at(65)(rates, 1e4), long)
    assert rule.at(65).gain() == 1.5
    lengths = torch.tensor([64, 65])
    assert torch.equal(rule(rates, 1e4, lengths), torch.stack((short, long))[:, None])
    assert rule.gain(lengths).flatten().tolist() == [1.25, 1.5]


@pytest.mark.parametrize("rule", RULES, ids=IDS)
def test_a_rule_is_a_value(rule):
    assert pickle.loads(pickle.dumps(rule)) == rule
    assert len({rule, pickle.loads(pickle.dumps(rule))}) == 1
    with pytest.raises(AttributeError):
        rule.factor = 2.0


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: scaling.Linear(0.0), ValueError, "Linear: factor must be finite and above zero"),
        (lambda: scaling.Linear("4"), TypeError, "Linear: factor must be a number"),
        (
            lambda: scaling.YaRN(4.0, original_length=0),
            ValueError,
            "original_length must be at least 1",
        ),
        (
            lambda: scaling.LongRoPE((), long_factor=(), original_length=64),
            TypeError,
            "short_factor must be a list",
        ),
        (
            lambda: scaling.LongRoPE((1.0,), long_factor=(1.0, 2.0), original_length=64),
            ValueError,
            "equally long",
        ),
        (
            lambda: scaling.Llama3(
                8.0, original_length=64, low_freq_factor=4.0, high_freq_factor=1.0
            ),
            ValueError,
            "high_freq_factor must be",
        ),
        (
            lambda: scaling.YaRN(4.0, original_length=64, beta_fast=1.0, beta_slow=32.0),
            ValueError,
            "beta_fast must be at least beta_slow=32.0, got 1.0",
        ),
        (lambda: scaling.Proportional(1.5), ValueError, "fraction must be at most 1"),
        (lambda: RoPE(8, scaling=4.0), TypeError, "scaling must be of type Rule"),
        (
            lambda: RoPE(
                16, scaling=scaling.LongRoPE((1.0,), long_factor=(2.0,), original_length=64)
            ),
            ValueError,
            "must have 8 numbers",
        ),
        (
            lambda: RoPE(
                16,
                scaling=scaling.LongRoPE((5e-324,) * 8, long_factor=(1.0,) * 8, original_length=64),
            ),
            ValueError,
            "must give a finite rate",
        ),
    ],
)
def test_bad_rules_are_refused(make, error, text):
    with pytest.raises(error, match=text):
        make()


@pytest.mark.parametrize(
    "make",
    [
        scaling.NTK,
        lambda factor: scaling.YaRN(factor, original_length=4096),
        lambda factor: scaling.DynamicNTK(factor, original_length=4096),
        lambda factor: scaling.Llama3(factor, original_length=4096),
        lambda factor: scaling.Proportional(0.5, factor=factor),
    ],
    ids=["ntk", "yarn", "dynamic", "llama3", "proportional"],
)
def test_a_factor_below_one_is_refused(make):
    """It is how many times longer sequences get: 0.25 would rotate faster where 4 was meant."""
    with pytest.raises(ValueError, match=r"factor must be at least 1, got 0\.25"):
        make(0.25)
    # Published configs have it.
    assert make(1.0).factor == 1.0


def test_a_dynamic_rule_leaves_sequences_that_fit_as_they_were():
    """Its factor is then one, whatever the formula rounds to."""
    rule = scaling.DynamicNTK(1.4, original_length=6144)
    assert 1.4 * 6144 / 6144 - (1.4 - 1) < 1
    assert rule.at(6144) == scaling.NTK(1.0)
    rates = inverse_frequencies(16)
    assert torch.equal(rule(rates, 1e4, torch.tensor(6144)).flatten(), rates)


@dataclasses.dataclass(frozen=True, eq=False)
class Extended(scaling.Linear):
    extra: float = 1.0

    def __call__(self, rates, base, seq_len=None):
        return super().__call__(rates, base, seq_len) * self.extra


class Plain(scaling.Rule):
    factor = 1.0

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, rates, base, seq_len=None):
        return rates / self.factor


@pytest.mark.parametrize("rule", [Plain, lambda n: Extended(2.0, n)], ids=["plain", "extended"])
def test_rules_that_users_write_share_a_table_only_if_all_attributes_are_equal(rule):
    """Rules are keys of tables."""
    one, other = RoPE(4, 16, scaling=rule(2.0)), RoPE(4, 16, scaling=rule(0.5))
    assert not torch.equal(one.scaled_inv_freq(), other.scaled_inv_freq())
    assert not torch.equal(one.cos_cached, other.cos_cached)
    assert RoPE(4, 16, scaling=rule(2.0)).cos_cached.data_ptr() == one.cos_cached.data_ptr()
    for again in (pickle.loads(pickle.dumps(one)), copy.deepcopy(one)):
        assert torch.equal(again.scaled_inv_freq(), one.scaled_inv_freq())
        assert torch.equal(again.cos_cached, one.cos_cached)


def test_a_rule_that_gives_too_few_rates_is_refused():
    """The pairs without a rate would silently stay as they are."""

    class First(scaling.Rule):
        def __call__(self, rates, base, seq_len=None):
            return rates[:3]

    with pytest.raises(ValueError, match="a finite rate for each of the 8 pairs"):
        RoPE(16, scaling=First())


def test_a_rule_that_cannot_be_a_key_is_refused():
    with pytest.raises(TypeError, match="unhashable type: 'list'"):
        RoPE(4, scaling=Plain([2.0]))


def test_two_numbers_of_a_rule_cannot_be_swapped():
    for name in scaling.__all__:
        parameters = inspect.signature(getattr(scaling, name)).parameters.values()
        assert sum(p.kind is not p.KEYWORD_ONLY for p in parameters) <= 1, name


def test_no_rule_is_missing_in_the_tests_of_modules():
    classes = {getattr(scaling, name) for name in scaling.__all__} - {scaling.Rule}
    assert {type(rule) for rule in rules.RULES if rule is not None} == classes
