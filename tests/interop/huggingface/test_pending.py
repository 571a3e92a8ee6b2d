"""Results of norms that wait for their rotation, and which norms are known."""

import pytest
import torch
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from posenc.interop.huggingface import modules
from posenc.interop.huggingface.rotation import NormCall, Pending


def pending(*shape):
    """The result of a norm, computed and not."""
    torch.manual_seed(0)
    norm = Qwen3RMSNorm(shape[-1])
    nn.init.normal_(norm.weight)
    x = torch.randn(shape)
    return norm(x).detach(), Pending(NormCall(norm, x, norm.weight, 1e-6, 0.0), x)


OPERATIONS = {
    "transpose-of-rows": lambda x: x.transpose(-1, -2),
    "view-across-rows": lambda x: x.view(2, 5, 24),
    "multiply": lambda x: 2 * x * 3 - x / 2 + x**2,
    "index": lambda x: x[:, 1:, None],
    "concatenate": lambda x: torch.cat([x, x], dim=1),
    "keywords": lambda x: torch.add(input=x, other=x),
    "attribute": lambda x: x.mT.contiguous(),
    "in-place": lambda x: (x.clamp_(-0.5, 0.5), x.transpose(0, 1) + 0)[1],
    "attention": lambda x: nn.functional.scaled_dot_product_attention(x, x, x),
    "split-heads-moved-then-joined": lambda x: x.view(2, 5, 3, 2, 4).transpose(1, 2).flatten(),
    "split-twice": lambda x: x.view(2, 5, 3, 2, 4).view(2, 5, 3, 8),
    "other-dtype": lambda x: x.to(torch.float64),
    "split-heads-and-then-channels": lambda x: x.unflatten(-1, (2, -1)).unflatten(-1, (2, -1)),
    "length": len,
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_between_norm_and_rotation_takes_the_result_of_the_norm(name):
    result, waiting = pending(2, 5, 3, 8)
    got, expected = OPERATIONS[name](waiting), OPERATIONS[name](result)
    assert not isinstance(got, Pending)
    if isinstance(got, torch.Tensor):
        assert torch.equal(got, expected)
    else:
        assert got == expected


VIEWS = {
    "heads-in-front": lambda x: x.transpose(1, 2),
    "split-heads": lambda x: x.unflatten(-1, (2, -1)),
    "split-batch": lambda x: x.unflatten(0, (1, 2)),
    "same-dtype": lambda x: x.to(torch.float32),
    "same-device": lambda x: x.to(device="cpu", dtype=torch.float32),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_still_waits_and_gives_what_the_view_of_the_result_has(name):
    result, waiting = pending(2, 5, 3, 8)
    got, expected = VIEWS[name](waiting), VIEWS[name](result)
    assert isinstance(got, Pending)
    assert got.shape == expected.shape
    assert torch.equal(got.tensor(), expected)


def test_a_kernel_that_is_no_torch_function_gets_the_result_or_an_error():
    """A pending result is no tensor with its input inside, which other code could read."""
    result, waiting = pending(2, 5, 3, 8)
    assert not isinstance(waiting, torch.Tensor)
    assert torch.equal(torch.ops.aten.neg.default(waiting), -result)
    assert waiting.data_ptr() != waiting.x.data_ptr()


def test_a_norm_is_known_by_what_it_computes():
    """torch's RMSNorm without eps takes that of the dtype, so it is none of ours."""
    assert modules._formula(Qwen3RMSNorm(8, eps=1e-5)) == (1e-5, 0.0)
    assert modules._formula(nn.RMSNorm(8, eps=1e-3)) == (1e-3, 0.0)
    assert modules._formula(nn.RMSNorm(8)) is None
    assert modules._formula(nn.RMSNorm((2, 4), eps=1e-6)) is None
    assert modules._formula(nn.LayerNorm(8, bias=False)) is None
