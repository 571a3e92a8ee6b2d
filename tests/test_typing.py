"""What a type checker says of a program that uses the package."""

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

import posenc
from posenc.nn._module import ReadOnlyArguments

ROOT = Path(__file__).parents[1]
CLIENT = ROOT / "tests" / "support" / "typing_client.py"
CLASSES = [
    getattr(posenc, name)
    for name in posenc.__all__
    if isinstance(getattr(posenc, name), type) and issubclass(getattr(posenc, name), nn.Module)
]


@pytest.mark.parametrize("module", CLASSES)
def test_a_call_has_the_types_of_forward(module):
    """For torch's own type of `__call__` any argument is right, and the result anything.

    The base gives `__call__` a type only: what runs is torch's.
    """
    assert issubclass(module, ReadOnlyArguments)
    declared = "def __call__(self: HasForward[P, R], *args: P.args, **kwargs: P.kwargs) -> R:"
    assert declared in inspect.getsource(ReadOnlyArguments)
    assert module.__call__ is nn.Module.__call__
    typed = inspect.signature(module.forward)
    assert all(
        p.annotation is not p.empty for name, p in typed.parameters.items() if name != "self"
    )
    assert typed.return_annotation in ("Tensor", "tuple[Tensor, Tensor]")


@pytest.mark.slow
def test_mypy_checks_the_calls_of_every_module():
    """A call that is right has its type; one that is wrong is an error, which the client claims."""
    done = subprocess.run(
        [sys.executable, "-m", "mypy", str(CLIENT.relative_to(ROOT))],
        cwd=ROOT,
        env={**os.environ, "MYPYPATH": "src"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
