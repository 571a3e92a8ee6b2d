import numpy as np
import pytest
import torch

from posenc._contract import checks


def test_an_error_names_the_caller_the_rule_the_value_and_a_hint():
    with pytest.raises(TypeError, match="one") as caught:
        checks.fail("Thing", "size must be one", "\x1b[2J", "Pass 1.", TypeError)
    assert str(caught.value) == "Thing: size must be one, got \\x1b[2J.\n  Pass 1."


def test_a_message_fits_a_screen_of_80_columns_and_24_lines():
    """Each part may quote a file, and must not push the hint off the screen."""
    long = "begin" + "x" * 10**6 + "end"
    with pytest.raises(ValueError, match=r"^Thing: begin") as caught:
        checks.fail("Thing", long, long, long)
    said = str(caught.value)
    assert len(said) < 80 * 24
    assert said.endswith("end")
    assert said.count("characters) ... xxx") == 3


@pytest.mark.parametrize("value", [True, 2.0, "3", None, torch.tensor(3), [3]], ids=str)
def test_only_integers_are_counts(value):
    with pytest.raises(TypeError, match="Thing: size must be an int"):
        checks.integer("Thing", "size", value)


def test_numpy_floats_are_numbers():
    """Without a warning: float32 cannot hold the largest float that they are compared with."""
    assert checks.positive_float("Thing", "base", np.float32(0.5)) == 0.5


def test_numpy_integers_are_counts():
    assert checks.integer("Thing", "size", np.int32(7)) == 7


@pytest.mark.parametrize("value", [True, "10000", None, torch.tensor(1.0)], ids=str)
def test_bases_are_numbers(value):
    with pytest.raises(TypeError, match="base must be a number"):
        checks.positive_float("Thing", "base", value)


@pytest.mark.parametrize(
    "x",
    [
        torch.ones(2, 2, dtype=torch.int64),
        torch.ones(2, 2, dtype=torch.bool),
        torch.ones(2, 2, dtype=torch.complex64),
        torch.ones(2, 2).to(torch.float8_e4m3fn),
        [[1.0, 2.0]],
    ],
    ids=["int", "bool", "complex", "float8", "list"],
)
def test_only_real_floats_are_encoded(x):
    with pytest.raises(TypeError, match="Thing: x must be"):
        checks.float_tensor("Thing", "x", x)


@pytest.mark.parametrize("value", [0.5, 1, 1.0])
def test_bases_are_above_one(value):
    """With one of 1 or less no pair would be slower than the first."""
    with pytest.raises(ValueError, match="base must be above 1"):
        checks.base("Thing", value)
    assert checks.base("Thing", 1.5) == 1.5
