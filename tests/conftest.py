import atexit
import contextlib
import os
import re
import shutil
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import pytest

# Read when torch is first imported. Workers have as many threads each as there are cores, and one
# that waits for others would else spin on the core that they need.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Read when transformers is first imported: with the kernels package it wraps functions in modules.
os.environ.setdefault("USE_HUB_KERNELS", "NO")

# Read when torch first compiles. It finds graphs that it compiled before by the names of their
# ops, so those of another version of posenc would answer for this one.
if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="posenc-compiled-")
    atexit.register(shutil.rmtree, os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)

import torch
from hypothesis import settings

# Read when triton is first imported: without a GPU its kernels run in the interpreter.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import posenc
from posenc.nn import _tables
from support.interpreter import (
    leave_out_repetitions,
    read_numbers_of_one_element,
    search_the_language_once,
)

# Scripts that tests start in other folders import the same package.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(posenc.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
)

# Time on a shared machine says nothing about a property.
settings.register_profile("default", deadline=None, max_examples=40, derandomize=True)
settings.register_profile("thorough", deadline=None, max_examples=400)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_addoption(parser):
    parser.addoption("--isa", help="Hold the C kernel to avx512, avx2, neon or baseline.")


# All but the modules whose warnings are errors whatever is installed: ours, and what they run.
OTHERS = r"(?!posenc|tests\.|support\.|oracles\b|__main__\b)"


def is_pinned():
    """Whether the packages of constraints.txt that are installed have the versions it says."""
    pins = (Path(__file__).parents[1] / "constraints.txt").read_text()
    for name, version in re.findall(r"^([\w-]+)==(\S+)$", pins, re.MULTILINE):
        with contextlib.suppress(metadata.PackageNotFoundError):
            if metadata.version(name).split("+")[0] != version:
                return False
    return True


def pytest_configure(config):
    search_the_language_once()
    leave_out_repetitions()
    read_numbers_of_one_element()
    if not is_pinned():
        # Other releases deprecate what those that are pinned still call among themselves.
        config.addinivalue_line("filterwarnings", f"default:::{OTHERS}")
    if config.getoption("--isa"):
        from posenc.ops.native import _native

        _native.set_isa(config.getoption("--isa"))


@pytest.fixture(autouse=True)
def _fresh_state():
    """Fixed seed, no tables yet, and NaN in fresh memory: an output nobody wrote cannot hide."""
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:
        # The same of the CPU. For devices that are not there torch writes down where it was called.
        torch.default_generator.manual_seed(0)
    # Tables that grew for a module of another test, if that is still alive.
    _tables._cache.clear()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    # Importing the compiler takes seconds, which few tests need.
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
