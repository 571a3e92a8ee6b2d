import os

import pytest
import torch
from hypothesis import settings

# Read when triton is first imported: without a GPU its kernels run in the interpreter.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Time on a shared machine says nothing about a property.
settings.register_profile("default", deadline=None, max_examples=40, derandomize=True)
settings.register_profile("thorough", deadline=None, max_examples=400)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_addoption(parser):
    parser.addoption("--isa", help="Hold the C kernel to avx512, avx2, neon or baseline.")


def pytest_configure(config):
    if config.getoption("--isa"):
        from posenc.kernels.c import _rotate

        _rotate.set_isa(config.getoption("--isa"))


@pytest.fixture(autouse=True)
def _fresh_state():
    """Fixed seed, and NaN in fresh memory: an output nobody wrote cannot hide."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.compiler.reset()
