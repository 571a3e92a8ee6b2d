"""transformers marks functions for the `kernels` package when it is imported: in a new process."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch

from posenc.interop.huggingface import kernel_mapping

SCRIPT = """
import torch
from kernels import Mode, kernelize, use_kernel_mapping
from transformers import AutoConfig, AutoModelForCausalLM
from posenc.interop.huggingface import kernel_mapping, patch, unpatch

SIZES = dict(hidden_size=64, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2,
             num_hidden_layers=1, vocab_size=100, head_dim=16, pad_token_id=0)
TOKENS = torch.arange(1, 11)[None]

def results(model):
    logits = model(TOKENS).logits
    parameters = [p for p in model.parameters() if p.requires_grad]
    return logits, *torch.autograd.grad(logits.square().mean(), parameters, allow_unused=True)

def assert_equal(got, wanted):
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)

# Halves; halves that turn the other way; tables of half the width.
for kind in ("llama", "nanochat", "gpt_oss"):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES))
    wanted = results(model)
    report = patch(model)
    assert len(report.places) == 1, report
    assert_equal(results(model), wanted)
    unpatch(model)

    with use_kernel_mapping(kernel_mapping(model)):
        kernelize(model, mode=Mode.TRAINING | Mode.TORCH_COMPILE)
    (function,) = model.model.layers[0].self_attn._kernel_funcs.values()
    assert "RotaryPosEmb" in function.forward.__func__.__qualname__
    assert_equal(results(model), wanted)
    if kind == "llama":
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(TOKENS).logits, wanted[0], rtol=1e-4, atol=1e-5)
"""


@pytest.mark.slow
def test_marked_functions_are_patched_and_replaced():
    from transformers.utils import is_kernels_available

    if not is_kernels_available():
        pytest.skip("transformers finds no version of kernels that it supports")
    environment = {**os.environ, "USE_HUB_KERNELS": "YES"}
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_a_model_without_a_marked_function_is_told_of_patch():
    with pytest.raises(ValueError, match=r"kernel_mapping: .* got Linear[^\n]*\n  Call .*patch"):
        kernel_mapping(torch.nn.Linear(2, 2))
