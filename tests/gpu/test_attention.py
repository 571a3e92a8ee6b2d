"""ALiBi attention in FlexAttention's own kernels, forward and backward, against float64."""

import math

import pytest
import torch

import posenc

CUDA = "cuda"
CASES = {
    "square": {"queries": 1000, "keys": 1000},
    "cache": {"queries": 300, "keys": 1500},
    "offsets": {"queries": 300, "keys": 1500, "offset": [0, 600]},
    "documents": {"queries": 1000, "keys": 1000, "documents": True},
    "symmetric": {"queries": 600, "keys": 600, "causal": False},
    "gqa": {"queries": 700, "keys": 700, "groups": 4, "documents": True},
    "one-head": {"queries": 300, "keys": 1500, "offset": [0, 600], "heads": 1},
    "decode": {"queries": 1, "keys": 1500, "offset": [7, 900], "documents": True},
    "few": {"queries": 5, "keys": 2048},
}


def exact(q, k, v, slopes, causal, offset, documents):
    """Softmax attention in float64, by the definition."""
    groups = q.shape[1] // k.shape[1]
    q, k, v = q.double(), *(x.double().repeat_interleave(groups, 1) for x in (k, v))
    start = torch.as_tensor(offset, device=CUDA).reshape(-1, 1)
    i = (torch.arange(q.shape[2], device=CUDA) + start)[:, None, :, None]
    j = torch.arange(k.shape[2], device=CUDA)
    hidden = (j > i) if causal else torch.zeros_like(j > i)
    scores = q @ k.mT * q.shape[-1] ** -0.5 - slopes.double()[:, None, None] * (i - j).abs()
    pad = torch.zeros_like(i[:, 0, :, 0], dtype=torch.bool)
    if documents is not None:
        own = documents.gather(1, i[:, 0, :, 0].expand(len(documents), -1))
        hidden = hidden | (own[:, None, :, None] != documents[:, None, None])
        pad = own < 0
    out = scores.masked_fill(hidden, -math.inf).softmax(-1) @ v
    return out.masked_fill(pad[:, None, :, None], 0)


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no-grad"])
@pytest.mark.parametrize("prune", [True, False], ids=["pruned", "all-keys"])
@pytest.mark.parametrize("name", CASES)
def test_flex_agrees_with_the_whole_matrix(name, prune, grad):
    """bf16 results carry 2^-9 of each weight and of the sum: 2^-6 of the largest value covers."""
    case = {"offset": None, "documents": False, "causal": True, "groups": 1, "heads": 8}
    case |= CASES[name]
    heads, queries, keys = case["heads"], case["queries"], case["keys"]
    few = max(1, heads // case["groups"])
    q, k, v = (
        torch.randn(2, h, n, 64, device=CUDA, dtype=torch.bfloat16).requires_grad_(grad)
        for h, n in ((heads, queries), (few, keys), (few, keys))
    )
    alibi = posenc.ALiBi(heads, bias_max=4.0, causal=case["causal"]).to(CUDA)
    documents = None
    if case["documents"]:
        documents = torch.rand(2, keys, device=CUDA).lt(0.004).cumsum(1)
        documents[0, :137] = -1
    offset = None if case["offset"] is None else torch.tensor(case["offset"], device=CUDA)
    places = {"query_offset": offset, "document_ids": documents}
    got = alibi.attention(q, k, v, **places, backend="flex", prune=prune)
    start = keys - queries if offset is None else offset
    wanted = exact(q, k, v, alibi.slopes, case["causal"], start, documents)
    assert (got - wanted).abs().max() < wanted.abs().max() * 2**-6
    # The decoding kernel has no gradient.
    if not grad or queries < 128:
        return
    above = torch.randn_like(got)
    grads = torch.autograd.grad(got, (q, k, v), above)
    exact_grads = torch.autograd.grad(wanted, (q, k, v), above.double())
    for grad, true in zip(grads, exact_grads, strict=True):
        assert (grad - true).abs().max() < true.abs().max() * 2**-5
