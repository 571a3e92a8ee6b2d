"""What `posenc show` shows of the relative biases: by distance, as a matrix, and as weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from posenc import nn
from posenc.lab.panels import Chart, Heat, Panel, View, line

_WINDOW = 7


class Family(NamedTuple):
    """A bias that a module has without any input."""

    label: str
    words: str
    # Makes the module for a number of heads and a trained length.
    make: Callable[[int, int], Any]


FAMILIES = {
    "t5": Family(
        "T5",
        "a number for each bucket of distances, here random",
        lambda heads, trained: nn.T5Bias(
            heads, num_buckets=min(32, trained), max_distance=trained, causal=True
        ),
    ),
    "learned-bias": Family(
        "learned bias",
        "a number for each distance, here random",
        lambda heads, trained: nn.LearnedBias(heads, max_distance=trained - 1),
    ),
    "kerple": Family(
        "KERPLE", "a logarithm of the distance", lambda heads, trained: nn.KERPLE(heads)
    ),
    "sandwich": Family(
        "Sandwich", "products of sinusoids", lambda heads, trained: nn.Sandwich(heads)
    ),
    # The paper's threshold is a quarter of its training length.
    "fire": Family(
        "FIRE",
        "a function of the distance over the query's position",
        lambda heads, trained: nn.FIRE(heads, threshold=trained / 4),
    ),
}

# The same, for biases that depend on queries and keys, here of 16 channels.
PRODUCTS = {
    "relative-keys": Family(
        "relative keys",
        "the query times a vector for each distance, here random",
        lambda heads, trained: nn.RelativeKeys(16, max_distance=trained - 1),
    ),
    "transformer-xl": Family(
        "Transformer-XL",
        "the query times the projected sinusoid of the distance",
        lambda heads, trained: nn.TransformerXLBias(heads, embed_dim=16 * heads),
    ),
    "deberta": Family(
        "DeBERTa",
        "query and key times vectors for each bucket",
        lambda heads, trained: nn.DeBERTaBias(
            heads,
            head_dim=16,
            max_relative_positions=trained,
            position_buckets=max(trained // 4, 2),
            causal=True,
        ),
    ),
}


def relative(name: str, *, heads: int = 8, length: int = 256, trained: int = 128) -> View:
    """One of the families, before training."""
    label, words, make = FAMILIES[name]
    with _before_training():
        bias = _drawn(make(heads, trained)).bias(length)
    return _view(name, f"{label[0].upper()}{label[1:]}: {words}", bias, trained)


def product(name: str, *, heads: int = 8, length: int = 256, trained: int = 128) -> View:
    """One of the products, if all tokens have one query and one key."""
    label, words, make = PRODUCTS[name]
    with _before_training():
        q, k = torch.randn(2, 1, heads, 1, 16).expand(-1, -1, -1, length, -1)
        bias = _drawn(make(heads, trained)).bias(q, k)[0]
    return _view(name, f"{label[0].upper()}{label[1:]}: {words}", bias, trained)


def forget_gate(*, heads: int = 8, length: int = 256, trained: int = 128) -> View:
    """The bias of random tokens, three of which make the gates forget more."""
    with _before_training():
        gate, x = nn.ForgetGate(heads, embed_dim=64), torch.randn(length, 64)
        closed = torch.tensor([length // 4, length // 2, length * 5 // 8])
        # The embedding for which the gate of every head is σ(-1).
        x[closed] = torch.linalg.pinv(gate.proj.weight) @ (-1 - gate.proj.bias)
        sums = gate.sums(x)
    kept = sums.diff(prepend=sums.new_zeros(heads, 1)).exp()
    lines = [line(f"head {h}", torch.arange(length), kept[h]) for h in some(heads)]
    gates = Chart("What each token keeps of those before it", "position", "", lines)
    title = "Forgetting gates: the tokens decide, three of these forget"
    return _view("forget-gate", title, gate.bias(sums), trained, gates)


def cope(*, heads: int = 8, length: int = 256, trained: int = 128) -> View:
    """The bias of random tokens, if each that is counted lowers the score by 0.1."""
    with _before_training():
        module, (q, k) = nn.CoPE(16, max_pos=trained), torch.randn(2, 1, heads, length, 16)
        q[..., 0], module.pos_emb[0, 0] = 1.0, -0.1 * torch.arange(trained)
        bias = module.bias(q, k)[0]
    return _view("cope", "CoPE: gates decide which tokens are counted", bias, trained)


def grid(*, heads: int = 8) -> View:
    """Swin v2's bias of a window of an image, before training."""
    with _before_training():
        bias = nn.GridBias(_WINDOW, num_heads=heads, continuous=True).bias()
    head = heads // 2
    window = bias[head].unflatten(-1, (_WINDOW, _WINDOW))
    corner, centre = (
        Heat(f"Bias of the cell in the {place}", "column", "row", window[cell])
        for place, cell in (("corner", 0), ("centre", len(window) // 2))
    )
    across = [line(f"head {h}", torch.arange(_WINDOW), bias[h, 0, :_WINDOW]) for h in some(heads)]
    panels = (
        centre,
        corner,
        Heat(f"Bias of head {head}", "key", "query", bias[head]),
        Chart("Bias of the corner, along its row", "columns away", "", across),
    )
    size = f"{_WINDOW} × {_WINDOW}"
    title = f"Grid: steps in rows and columns of a window of {size}, {heads} heads"
    return View(title, panels, {"encoding": "grid", "heads": heads, "bias": bias.tolist()})


VIEWS: dict[str, Callable[..., View]] = {
    **{name: partial(relative, name) for name in FAMILIES},
    **{name: partial(product, name) for name in PRODUCTS},
    "forget-gate": forget_gate,
    "cope": cope,
}


def some(heads: int) -> list[int]:
    """Up to four heads, from the first to the last."""
    return sorted({round(i * (heads - 1) / 3) for i in range(4)})


def _view(name: str, title: str, bias: Tensor, trained: int, last: Panel | None = None) -> View:
    """A causal bias ``[H, L, L]``, and by distance from the last query."""
    heads, length, _ = bias.shape
    head, distance, by_distance = heads // 2, torch.arange(length), bias[:, -1].flip(-1)
    weight = (by_distance - by_distance.amax(-1, keepdim=True)).exp()
    added, left = (
        [line(f"head {h}", distance, values[h]) for h in some(heads)]
        for values in (by_distance, weight)
    )
    rows = []
    for query in sorted({length // 4, length // 2, length - 1}, reverse=True):
        row = bias[head, query, : query + 1].flip(-1)
        rows.append(line(f"query {query}", distance[: query + 1], row))
    past = ("x", trained, f"past the trained length, {trained}")
    panels = (
        Chart("Added to the score of the last query", "distance", "", added, shaded=past),
        Heat(f"Bias of head {head}", "key", "query", bias[head]),
        Chart("Weight, of the largest, equal scores", "distance", "", left, shaded=past),
        last or Chart(f"Head {head}: the bias of three queries", "distance", "", rows, shaded=past),
    )
    numbers = {"encoding": name, "trained": trained, "heads": heads, "bias": by_distance.tolist()}
    return View(f"{title}, {heads} heads", panels, numbers)


@contextmanager
def _before_training() -> Iterator[None]:
    """Draw the same numbers at every call."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def _drawn(module: Any) -> Any:
    """The module, with random numbers in place of parameters that are zero before training."""
    for parameter in module.parameters():
        if not parameter.any():
            parameter.normal_()
    return module
