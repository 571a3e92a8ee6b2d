import inspect
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import posenc
import posenc.functional
import posenc.nn
import posenc.nn.functional
from posenc.lab.comparison.encodings import ENCODINGS
from posenc.lab.comparison.plan import Plan
from posenc.nn._bias import BiasedAttention
from support import modules


def test_every_public_name_exists():
    for room in (posenc, posenc.nn, posenc.functional, posenc.nn.functional):
        for name in room.__all__:
            assert hasattr(room, name), f"{room.__name__}.{name}"


ROOT = Path(__file__).parents[1]
MODULES = {
    name: kind
    for name in posenc.__all__
    if isinstance(kind := getattr(posenc, name), type) and issubclass(kind, torch.nn.Module)
}
BIASES = frozenset(n for n, kind in MODULES.items() if issubclass(kind, BiasedAttention))
OF_IMAGES = frozenset({"GridBias", "SinusoidalGrid", "FourierFeatures"})
OF_TRAINED = frozenset({"SelfExtend", "DualChunk"})
OTHER_NAMES = frozenset({"RotaryPosEmbedding", "SinusoidalPE"})
# Other forms of those that the tools of the command have.
ADDED = frozenset({"RotaryPosEmbedding", "SinusoidalPosEmbedding", "SinusoidalGrid"})


class Place(NamedTuple):
    """Where public modules are listed."""

    file: str
    names: set[str]
    # What is to be added there.
    add: str
    # Those that are not there, and why.
    without: frozenset[str] = frozenset()
    why: str = ""
    # Those that could be.
    of: frozenset[str] = frozenset(MODULES)


def in_text(files, pattern=r"\b(?:posenc|nn)\.(\w+)"):
    text = "".join(path.read_text() for path in sorted(ROOT.glob(files)))
    return set(re.findall(pattern, text))


# The keys of a dict in a script.
OF_TABLE = r'(?m)^    "(\w+)": '
PLACES = [
    Place("src/posenc/nn/__init__.py", set(posenc.nn.__all__), "its import and its name"),
    Place(
        "tests/support/modules.py",
        {name.split(",")[0] for name in modules.MODULES},
        "a line in MODULES, with which every framework is tried",
    ),
    Place(
        "tests/nn/test_relative_bias.py",
        in_text("tests/nn/test_*_bias*.py"),
        "a line in TABLES or OTHERS, or in MODULES of test_vector_biases.py",
        of=BIASES,
    ),
    Place(
        "tests/support/typing_client.py",
        in_text("tests/support/typing_client.py", r"posenc\.(\w+)\("),
        "a call with the type of its result, and a wrong one",
    ),
    Place("docs/api", in_text("docs/api/*.md"), "::: posenc.NAME, on the page of its family"),
    Place(
        "docs/index.md",
        in_text("docs/index.md", r"\w+"),
        "a row in the guide",
        OTHER_NAMES,
        "is another name of a module",
    ),
    Place(
        "docs/relative-biases.md",
        in_text("docs/relative-biases.md"),
        "a row in the table of biases",
        OF_TRAINED | {"ALiBi"},
        "has another page",
        of=BIASES,
    ),
    Place(
        "src/posenc/lab/show.py",
        in_text("src/posenc/lab/show.py"),
        "a Family in FAMILIES, or a function in ENCODINGS",
        OF_TRAINED | {"XPos", "MixedRoPE", "STRING"} | ADDED,
        "would have the picture of another",
    ),
    Place(
        "src/posenc/lab/comparison/encodings.py",
        {type(each.build(Plan(), 32)).__name__ for each in ENCODINGS.values()},
        "a line in ENCODINGS",
        OF_IMAGES | ADDED,
        "is of images, or another name of a module",
    ),
    Place(
        "examples/swap_encodings.py",
        in_text("examples/swap_encodings.py", OF_TABLE),
        "a line in ENCODINGS, if it encodes text",
        OF_IMAGES | OF_TRAINED,
        "does not encode text, or belongs to a trained model",
    ),
    Place(
        "examples/train.py",
        in_text("examples/train.py", OF_TABLE),
        "a line in ENCODINGS, if it encodes text",
        OF_IMAGES | OF_TRAINED | OTHER_NAMES | {"ForgetGate", "DeBERTaBias"},
        "does not encode text, belongs to a trained model, is another name, or reads the tokens",
    ),
]


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.file)
def test_every_public_module_is_in_every_place_that_lists_them(place):
    """What fails here is what a new module still needs."""
    missing = sorted(place.of - place.names - place.without)
    hint = f"; or name it in PLACES, if it {place.why}" if place.why else ""
    needs = f"{place.file} needs {place.add.replace('NAME', ' and '.join(missing))}{hint}"
    assert not missing, f"{', '.join(missing)}: {needs}."
    assert not place.without & place.names


def test_the_names_are_the_same_objects_everywhere():
    for name in posenc.functional.__all__:
        assert getattr(posenc.nn.functional, name) is getattr(posenc.functional, name)
    # A base class is no encoding.
    for name in set(posenc.nn.__all__) - {"functional", "RelativeBias"}:
        assert getattr(posenc, name) is getattr(posenc.nn, name)


def public_modules(module=posenc):
    """A module, and those that its public names are, with theirs."""
    yield module
    for name in module.__all__:
        found = getattr(module, name)
        if inspect.ismodule(found):
            yield from public_modules(found)


def test_dir_of_a_public_module_shows_public_names_only():
    """Completion in a shell or an editor shows neither imports nor files of the package."""
    modules = {module.__name__: module for module in public_modules()}
    assert {"posenc", "posenc.nn.functional", "posenc.interop.ring"} <= modules.keys()
    for name, module in modules.items():
        assert dir(module) == sorted(module.__all__), name


FRESH = """
import sys
sys.modules["triton"] = sys.modules["posenc.ops.native._native"] = None
import torch
torch_brought = set(sys.modules)
import posenc
new = {m.split(".")[0] for m in set(sys.modules) - torch_brought}
allowed = set(sys.stdlib_module_names) | {"posenc", "torch"}
assert new <= allowed, new - allowed
assert "torch.distributed.tensor" not in sys.modules
assert "torch._dynamo" not in sys.modules, "the compiler costs a second and more"

assert not posenc.backends()[0].available
x, weight, rope = torch.randn(2, 3, 5, 8), torch.ones(8), posenc.RoPE(8)
q, k = rope(x, x)
normed, _ = posenc.functional.qk_norm_rope(x, x, weight, weight, rope.cos_cached, rope.sin_cached)
assert q.shape == k.shape == normed.shape == x.shape

import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, init_device_mesh
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
x = DTensor.from_local(torch.ones(1, 1, 2, 8), init_device_mesh("cpu", (1,)), [Replicate()])
for call in (lambda: rope(x, x), lambda: posenc.SinusoidalPE(8, 8)(x[0, 0])):
    try:
        call()
    except TypeError as error:
        print(error)
dist.destroy_process_group()
"""


def test_a_new_process_needs_torch_only():
    """Nothing of the extras is imported; without triton and the C extension everything runs.

    The rules of DTensors are in `posenc.interop.distributed`: one that met our op without them
    would be told of torch's internals.
    """
    done = subprocess.run(
        [sys.executable, "-c", FRESH], timeout=120, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Run `import posenc.interop.distributed` first.") == 2


def parameters(function):
    return list(inspect.signature(function).parameters.values())


def test_seed_arguments_come_first_and_ours_are_keyword_only():
    seeds = {
        posenc.SinusoidalPosEmbedding: ["seq_len", "embed_dim"],
        posenc.SinusoidalPosEmbedding.forward: ["self", "input_"],
        posenc.functional.sinusoidal_pos_embedding: ["seq_len", "embed_dim", "device", "dtype"],
        posenc.LearnedPosEmbedding: ["max_len", "embed_dim"],
        posenc.LearnedPosEmbedding.forward: ["self", "x", "offset"],
        posenc.RotaryPosEmbedding: ["embed_dim", "max_seq_len", "interleaved"],
        posenc.RotaryPosEmbedding.forward: ["self", "input_", "position_ids"],
        posenc.functional.rotary_pos_embedding: ["input_", "position_ids", "interleaved"],
        posenc.SinusoidalPE: ["max_seq_len", "embed_dim"],
        posenc.SinusoidalPE.get_encoding: ["self", "seq_len"],
        posenc.SinusoidalPE.forward: ["self", "input"],
        posenc.RoPE: ["head_dim", "max_seq_len", "base"],
        posenc.RoPE.forward: ["self", "q", "k", "offset"],
        posenc.ALiBi: ["num_heads"],
        posenc.ALiBi.get_bias: ["self", "seq_len"],
    }
    for function, names in seeds.items():
        found = parameters(function)
        assert [p.name for p in found[: len(names)]] == names, function
        assert all(p.kind is p.KEYWORD_ONLY for p in found[len(names) :]), function


def test_a_warning_of_ours_is_an_error():
    """Whatever is installed: with versions that are not pinned those of others are let pass."""
    with pytest.raises(UserWarning, match="of a test"):
        warnings.warn("of a test", stacklevel=1)
    with pytest.raises(UserWarning, match="of the package"):
        exec("import warnings; warnings.warn('of the package')", {"__name__": "posenc.nn.rope"})
