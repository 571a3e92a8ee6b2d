"""A token is rotated to the same bits alone, in a batch, and anywhere in a long prompt."""

import pytest
import torch

import posenc
from posenc import functional

DEVICES = ["cpu", *["cuda"] * torch.cuda.is_available()]
# So long that a launch on a GPU has several tokens to a program.
LENGTH = 20_000 if torch.cuda.is_available() else 6_400


def prompt(device, dtype):
    """Queries and keys as a model has them: heads beside each other in memory."""
    return [torch.randn(1, LENGTH, h, 128, device=device).to(dtype).transpose(1, 2) for h in (8, 2)]


def parts(q, k):
    """Stretches of a prompt: each with where it begins, and each a kind of call to a kernel."""
    for at, length in ((0, 1), (7, 64), (300, 600), (1000, 5000), (LENGTH - 1, 1)):
        yield at, [x[:, :, at : at + length] for x in (q, k)]


def same(found, whole, at):
    return all(
        torch.equal(y, z[:, :, at : at + y.shape[2]]) for y, z in zip(found, whole, strict=True)
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
def test_a_token_is_rotated_to_the_same_bits_in_any_batch_and_prompt(device, dtype, interleaved):
    rope = posenc.RoPE(128, LENGTH, interleaved=interleaved).to(device)
    q, k = prompt(device, dtype)
    whole = rope(q, k)
    for at, part in parts(q, k):
        assert same(rope(*part, offset=at), whole, at)
    assert same(rope(q.contiguous(), k.contiguous()), whole, 0)
    # Tokens of the prompt as sequences of their own, each at its position.
    ids = torch.arange(128, device=device) * (LENGTH // 128)
    alone = rope(*[x[0, :, ids].transpose(0, 1).unsqueeze(2) for x in (q, k)], offset=ids)
    for y, z in zip(alone, whole, strict=True):
        assert torch.equal(y[:, :, 0].transpose(0, 1), z[0, :, ids])
    # Tables in float64, where a module on a GPU rounds them once.
    again = functional.rotate_qk(q, k, rope.cos_cached, rope.sin_cached, interleaved=interleaved)
    assert same(again, whole, 0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_normalised_token_is_rotated_to_the_same_bits_in_any_batch_and_prompt(device, dtype):
    rope = posenc.RoPE(128, LENGTH).to(device)
    q, k = prompt(device, dtype)
    weights = [torch.rand(128, device=device).to(dtype) for _ in range(2)]
    tables = rope.cos_cached, rope.sin_cached
    whole = functional.qk_norm_rope(q, k, *weights, *tables)
    for at, part in parts(q, k):
        assert same(functional.qk_norm_rope(*part, *weights, *tables, offset=at), whole, at)
