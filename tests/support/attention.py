"""Queries, keys and values for the tests of attention."""

import torch

from posenc.ops.attention import chunked
from posenc.ops.attention.biases import DistanceTable, NoBias, RunningSum, Slopes
from posenc.ops.attention.call import Call

HEADS, WIDTH = 4, 16
STEEP = {"bias_max": 3.0}  # windows well inside a few hundred keys


def qkv(queries, keys, *, groups=1, dtype=torch.float64, batch=2, grad=False):
    q = torch.randn(batch, HEADS, queries, WIDTH, dtype=dtype)
    k = torch.randn(batch, HEADS // groups, keys, WIDTH, dtype=dtype)
    v = torch.randn(batch, HEADS // groups, keys, 8, dtype=dtype)
    return [x.requires_grad_(grad) for x in (q, k, v)]


def cut_into_small_pieces(monkeypatch):
    """So that short sequences are cut and pruned, too."""
    for name, size in (("SCORES", 2**12), ("DENSE_SCORES", 2**12), ("CHUNK", 32)):
        monkeypatch.setattr(chunked, name, size)


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # where Triton's kernels run


def numbers_of(kind, heads, keys, *, batch=2, columns=40, steep=1.0):
    """Numbers of a kind of bias: slopes, a table, or falling sums."""
    if kind == "slopes":
        return (steep * 2.0 ** -torch.arange(1.0, heads + 1))[None]
    if kind == "table":
        return torch.randn(heads, columns)
    if kind == "sums":
        return -(steep * torch.rand(batch, heads, keys, dtype=torch.float64)).cumsum(-1)
    return None


def call_of(values, kind, *, start, scale, zero=0, **others):
    """A call with a bias of these numbers."""
    bias = {
        "none": lambda: NoBias(),
        "slopes": lambda: Slopes(values),
        "table": lambda: DistanceTable(values, zero),
        "sums": lambda: RunningSum(values),
    }[kind]()
    return Call.of(bias, start=start, scale=scale, **{"causal": True, "prune": True} | others)


def written_down(
    q, k, v, values, kind, *, own, scale, zero=0, causal=True, documents=None, window=None
):  # fmt: skip
    """Output and log-sum-exp in float64, every score by its definition.

    ``own``, ``[B, Q]``, are the queries' key indices; ``documents``, ``[B, K]``, have padding
    below zero; ``window`` are the keys before and after that a query sees.
    """
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    j = torch.arange(k.shape[2], device=q.device)
    distance = own[:, :, None] - j
    scores = q @ k.mT * scale
    if kind == "slopes":
        scores = scores - values[..., None, None] * distance.abs()[:, None]
    if kind == "table":
        columns = (distance + zero).clamp(0, values.shape[1] - 1)
        scores = scores + values[:, columns].transpose(0, 1)
    if kind == "sums":
        at = own[:, None].expand(-1, q.shape[1], -1)
        scores = scores + values.gather(2, at)[..., None] - values[:, :, None]
    hidden = (distance < 0) if causal else torch.zeros_like(distance, dtype=torch.bool)
    if documents is not None:
        mine = documents.gather(1, own)
        hidden = hidden | (mine[:, :, None] != documents[:, None]) | (mine < 0)[:, :, None]
    if window is not None:
        hidden = hidden | (distance > window[0]) | (-distance > window[1])
    hidden = hidden[:, None]
    scores = scores.masked_fill(hidden, -torch.inf)
    out = scores.masked_fill(hidden.all(-1, keepdim=True), 0.0).softmax(-1).masked_fill(hidden, 0)
    return out @ v, scores.logsumexp(-1)


def close(got, want, most=1e-5):
    """Within ``most`` of the largest number, minus infinity taken for zero."""
    want = want.masked_fill(want == -torch.inf, 0.0)
    got = got.double().masked_fill(got == -torch.inf, 0.0)
    return float((got - want).abs().max()) <= most * max(float(want.abs().max()), 1e-3)
