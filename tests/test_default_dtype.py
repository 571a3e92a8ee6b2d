"""Numbers do not depend on the dtype that torch gives to tensors nobody gave one."""

import pytest
import torch
from torch.utils._pytree import tree_flatten

from support import every
from support.processes import python

DTYPES = ["bfloat16", "float64"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """What every module and function makes under each default dtype."""
    folder = tmp_path_factory.mktemp("made")
    code, log = python(every.__file__, str(folder), "float32", *DTYPES)
    assert code == 0, log
    return {name: torch.load(folder / f"{name}.pt") for name in ("float32", *DTYPES)}


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_is_that_of_float32(dtype, made):
    """Models are often built under bfloat16, to save memory, and tables are shared by all.

    Parameters in torch's default dtype are excepted: they start as its roundings.
    """
    assert made[dtype].keys() == made["float32"].keys()
    for name, wanted in made["float32"].items():
        got = made[dtype][name]
        if name[1] == "start":
            wanted = {n: p for n, p in wanted.items() if n in got}
        (flat, form), (exact, expected) = tree_flatten(got), tree_flatten(wanted)
        assert form == expected, name
        for x, y in zip(flat, exact, strict=True):
            assert x.dtype == y.dtype, name
            assert torch.equal(x, y), name


def test_no_function_is_forgotten():
    given = every.qkv(torch.float32, 2, every.HEADS, every.TOKENS, every.WIDTH)
    assert set(every.functions(*given)) == every.public_functions()
