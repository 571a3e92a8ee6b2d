"""What `posenc show` shows of each encoding: panels of a picture, and numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from posenc import configs, nn
from posenc import scaling as rules
from posenc.lab.panels import Chart, Heat, Line, Panel, View, line, sheet

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Each makes a rule from a factor and the trained length.
RULES: dict[str, Callable[[float, int], rules.Rule]] = {
    "linear": lambda factor, trained: rules.Linear(factor),
    "ntk": lambda factor, trained: rules.NTK(factor),
    "dynamic": lambda factor, trained: rules.DynamicNTK(factor, original_length=trained),
    "yarn": lambda factor, trained: rules.YaRN(factor, original_length=trained),
    "llama3": lambda factor, trained: rules.Llama3(factor, original_length=trained),
}
# Of the random features, and the numbers of octaves of NeRF's.
_SCALES, _OCTAVES = (1.0, 4.0, 16.0), (2, 4, 6)
# Cells of a side of the grid, and channels of a head.
_WINDOW, _WIDTH = 7, 16


class Family(NamedTuple):
    """A bias that a module has before training."""

    label: str
    words: str
    # Makes the module for a number of heads, their channels, and a trained length.
    make: Callable[[int, int, int], Any]
    # Whether it depends on queries and keys.
    products: bool = False


FAMILIES = {
    "alibi": Family(
        "ALiBi",
        "a slope of each head times the distance",
        lambda heads, width, trained: nn.ALiBi(heads),
    ),
    "t5": Family(
        "T5",
        "a number for each bucket of distances, here random",
        lambda heads, width, trained: nn.T5Bias(
            heads, num_buckets=min(32, trained), max_distance=trained, causal=True
        ),
    ),
    "learned-bias": Family(
        "learned bias",
        "a number for each distance, here random",
        lambda heads, width, trained: nn.LearnedBias(heads, max_distance=trained - 1),
    ),
    "kerple": Family(
        "KERPLE", "a logarithm of the distance", lambda heads, width, trained: nn.KERPLE(heads)
    ),
    "sandwich": Family(
        "Sandwich", "products of sinusoids", lambda heads, width, trained: nn.Sandwich(heads)
    ),
    # The paper's threshold is a quarter of its training length.
    "fire": Family(
        "FIRE",
        "a function of the distance over the query's position",
        lambda heads, width, trained: nn.FIRE(heads, threshold=trained / 4),
    ),
    "relative-keys": Family(
        "relative keys",
        "the query times a vector for each distance, here random",
        lambda heads, width, trained: nn.RelativeKeys(width, max_distance=trained - 1),
        products=True,
    ),
    "transformer-xl": Family(
        "Transformer-XL",
        "the query times the projected sinusoid of the distance",
        lambda heads, width, trained: nn.TransformerXLBias(heads, embed_dim=width * heads),
        products=True,
    ),
    "deberta": Family(
        "DeBERTa",
        "query and key times vectors for each bucket",
        lambda heads, width, trained: nn.DeBERTaBias(
            heads,
            head_dim=width,
            max_relative_positions=trained,
            position_buckets=max(trained // 4, 2),
            causal=True,
        ),
        products=True,
    ),
}


class Rotation(NamedTuple):
    """Rates ``[P]`` in radians per position, and the factor of cosines and sines."""

    label: str
    rates: Tensor
    gain: float = 1.0


def figure(view: View) -> Figure:
    """All panels of one encoding, two in a row."""
    return sheet(view.panels, 11.5, 3.7 * len(view.panels) / 2, columns=2, title=view.title)


def gallery(length: int = 96, dim: int = 64) -> Figure:
    """One picture of four encodings: what is added, what is rotated, what is subtracted."""
    _, wavelengths, by_distance, circles = rope(dim=dim, length=length, trained=length).panels
    shown = (
        ("Sinusoidal", sinusoidal(dim=dim, length=length).panels[0]),
        ("Learned", learned(dim=dim, length=length).panels[0]),
        ("Rotary", circles),
        ("Rotary", wavelengths),
        ("Rotary", by_distance),
        ("ALiBi", relative("alibi", length=length, trained=length).panels[0]),
    )
    panels = [replace(panel, title=f"{name}: {panel.title}") for name, panel in shown]
    return sheet(panels, 14, 7.6, columns=3, title="posenc: where a token is, four ways")


def sinusoidal(
    *, dim: int = 128, length: int = 128, trained: int = 4096, base: float = 10_000.0
) -> View:
    """The table that is added for ``length`` positions, and the rates it is made of."""
    table = nn.SinusoidalPE(length, dim, base=base).get_encoding(length)
    rates = [Rotation("", nn.RoPE(dim, None, base).scaled_inv_freq())]
    waves, by_distance = _by_rate(rates, trained, 4 * trained)
    by_distance = replace(by_distance, title="The same cosine, by distance")
    panels = (*_added(table), waves, by_distance)
    title = f"Sinusoidal: added to the input, {dim} channels"
    return View(title, panels, _numbers("sinusoidal", dim, base, trained, rates))


def learned(*, dim: int = 128, length: int = 128) -> View:
    """The table that is added, as it is initialised."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        table = nn.LearnedPosEmbedding(length, dim).pos_emb.weight.detach()
    title = f"Learned: added to the input, {dim} channels, before training"
    return View(title, _added(table), {"encoding": "learned", "dim": dim})


def rope(
    *,
    dim: int = 128,
    length: int = 128,
    trained: int = 4096,
    base: float = 10_000.0,
    scaling: str | None = None,
    factor: float | None = None,
    against: str | None = None,
) -> View:
    """RoPE as trained, and stretched ``factor`` times, 8 if None, by one or two of `RULES`."""
    names = [name for name in (scaling, against) if name is not None]
    if factor is not None and not names:
        raise ValueError("--factor needs --scaling.")
    factor = 8.0 if factor is None else factor
    rotations = [rotation(nn.RoPE(dim, None, base), "as trained", trained)]
    rotations += [_by_rule(name, dim, base, factor, trained) for name in names]
    longest = math.ceil(trained * factor) if names else trained
    return _rotary(rotations, dim, base, length, trained, longest)


def pope(*, dim: int = 128, length: int = 128, trained: int = 4096, base: float = 10_000.0) -> View:
    """PoPE compared with RoPE, and what a phase does to one channel's part of the score."""
    rates = nn.PoPE(dim, num_kv_heads=None, max_seq_len=None, base=base).scaled_inv_freq()
    rotations = [
        Rotation("PoPE", rates),
        Rotation("RoPE", nn.RoPE(dim, None, base).scaled_inv_freq()),
    ]
    cos = (torch.arange(length)[:, None] * rates).cos()
    distance, middle = torch.arange(length, dtype=torch.float64), dim // 4
    parts = [
        line(f"δ = {name}", distance, (delta - distance * rates[middle]).cos())
        for name, delta in (("0", 0.0), ("−π/4", -math.pi / 4), ("−π/2", -math.pi / 2))
    ]
    panels = (
        Heat("Cosines of the angles", "channel", "position", cos),
        *_by_rate(rotations, trained, trained, "channel (RoPE: pair)"),
        Chart(f"Score of channel {middle}, lengths one", "distance", "", parts),
    )
    title = f"PoPE: lengths softplus(x), angles of positions, {dim} channels, base {base:g}"
    return View(title, panels, _numbers("pope", dim, base, trained, rotations))


def of_config(
    config: Any,
    *,
    layer_type: str | None = None,
    length: int = 128,
    trained: int | None = None,
    against: str | None = None,
) -> View:
    """The rotation that a model's config describes, and the same without its rule."""
    config = configs.as_dict("from_config", config)
    model = nn.RoPE.from_config(config, layer_type=layer_type)
    positions = configs.read_positions(config, layer_type=layer_type)
    factor = getattr(model.scaling, "factor", None) or 1.0
    longest = positions.max_length[0] if positions.max_length else 0
    if trained is None:
        trained = (
            positions.trained_length[0] if positions.trained_length else math.ceil(longest / factor)
        )
    trained = max(2, trained or 4096)
    longest = max(longest, math.ceil(trained * factor))
    dim, base = model.rotary_dim or model.head_dim, model.base
    shown = [rotation(nn.RoPE(dim, None, base), "without a rule", trained)]
    if model.scaling is not None:
        shown.append(rotation(model, type(model.scaling).__name__, longest))
    if against is not None:
        shown.append(_by_rule(against, dim, base, longest / trained, trained))
    return _rotary(shown, dim, base, length, trained, longest)


def fourier(*, dim: int = 128, length: int = 128) -> View:
    """Features of ``length`` coordinates between 0 and 1, and how alike they are by distance."""
    at = torch.linspace(0, 1, length, dtype=torch.float64)[:, None]
    random = nn.FourierFeatures(1, num_frequencies=dim // 2, scale=_SCALES[1], seed=0)
    assert random.frequencies is not None
    slowest_first = random.frequencies[:, 0].abs().argsort()
    cosines = random(at)[:, : dim // 2][:, slowest_first]
    octaves = nn.FourierFeatures(1, num_frequencies=max(_OCTAVES), kind="nerf")
    many = 64 * dim
    gaussian = [
        _similarity(
            f"scale {s:g}", nn.FourierFeatures(1, num_frequencies=many, scale=s, seed=0), at
        )
        for s in _SCALES
    ]
    doubling = [
        _similarity(f"{k} frequencies", nn.FourierFeatures(1, num_frequencies=k, kind="nerf"), at)
        for k in _OCTAVES
    ]
    cells = f"place, 0 to 1 in {length}"
    title = "Similarity by distance"
    panels = (
        Heat("Random: cosines, slow ones first", "frequency", cells, cosines),
        Heat("NeRF: sine and cosine, frequencies double", "channel", cells, octaves(at)),
        Chart(f"{title}, random", "distance", "", gaussian),
        Chart(f"{title}, powers of two", "distance", "", doubling),
    )
    rates = random.frequencies[:, 0].tolist()
    numbers = {"encoding": "fourier", "dim": dim, "scale": random.scale, "frequencies": rates}
    return View(f"Fourier features of one coordinate, {dim} channels", panels, numbers)


def relative(name: str, *, heads: int = 8, length: int = 256, trained: int = 128) -> View:
    """One of the families, before training, if all tokens have one query and one key."""
    label, words, make, products = FAMILIES[name]
    with _before_training():
        module = _drawn(make(heads, _WIDTH, trained))
        q, k = torch.randn(2, 1, heads, 1, _WIDTH).expand(-1, -1, -1, length, -1)
        bias = module.bias(q, k)[0] if products else module.bias(length)
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
    lines = [line(f"head {h}", torch.arange(length), kept[h]) for h in _some(heads)]
    gates = Chart("What each token keeps of those before it", "position", "", lines)
    title = "Forgetting gates: the tokens decide, three of these forget"
    return _view("forget-gate", title, gate.bias(sums), trained, gates)


def cope(*, heads: int = 8, length: int = 256, trained: int = 128) -> View:
    """The bias of random tokens, if each that is counted lowers the score by 0.1."""
    with _before_training():
        module, (q, k) = nn.CoPE(_WIDTH, max_pos=trained), torch.randn(2, 1, heads, length, _WIDTH)
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
    across = [line(f"head {h}", torch.arange(_WINDOW), bias[h, 0, :_WINDOW]) for h in _some(heads)]
    panels = (
        centre,
        corner,
        Heat(f"Bias of head {head}", "key", "query", bias[head]),
        Chart("Bias of the corner, along its row", "columns away", "", across),
    )
    size = f"{_WINDOW} × {_WINDOW}"
    title = f"Grid: steps in rows and columns of a window of {size}, {heads} heads"
    return View(title, panels, {"encoding": "grid", "heads": heads, "bias": bias.tolist()})


BIASES: dict[str, Callable[..., View]] = {
    **{name: partial(relative, name) for name in FAMILIES},
    "forget-gate": forget_gate,
    "cope": cope,
}
ENCODINGS: dict[str, Callable[..., View]] = {
    **{view.__name__: view for view in (sinusoidal, learned, rope, pope)},
    **BIASES,
    "grid": grid,
    "fourier": fourier,
}


def rotation(module: nn.RoPE, label: str, seq_len: int) -> Rotation:
    """How a module rotates in a sequence of this length."""
    return Rotation(label, module.scaled_inv_freq(seq_len), module.attention_factor(seq_len))


def scores(shown: Rotation, farthest: int) -> tuple[Tensor, Tensor]:
    r"""Distances, evenly spaced in their logarithm, and :math:`g^2 / P \sum_i \cos d\theta_i`."""
    distance = torch.logspace(0, math.log10(farthest), 600, dtype=torch.float64).round().unique()
    return distance, (distance[:, None] * shown.rates).cos().mean(-1) * shown.gain**2


def _by_rule(name: str, dim: int, base: float, factor: float, trained: int) -> Rotation:
    if name not in RULES:
        raise ValueError(f"a rule must be one of {', '.join(RULES)}; got {name}.")
    module = nn.RoPE(dim, None, base, scaling=RULES[name](factor, trained))
    return rotation(module, f"{name} × {factor:g}", math.ceil(trained * factor))


def _rotary(
    rotations: Sequence[Rotation], dim: int, base: float, length: int, trained: int, longest: int
) -> View:
    """Angles of the first rule, if there is one, and all rotations side by side."""
    shown, named = rotations[0], ""
    last = _circles(shown.rates, min(length, 24))
    if len(rotations) > 1:
        shown, named = rotations[1], f", {rotations[1].label}"
        slower = [_by_pair(each, rotations[0].rates / each.rates) for each in rotations]
        last = Chart("How many times slower each pair rotates", "pair", "", slower)
    cos = (torch.arange(length)[:, None] * shown.rates).cos() * shown.gain
    heat = Heat(f"Cosines of the angles{named}", "pair", "position", cos)
    panels = (heat, *_by_rate(rotations, trained, longest), last)
    title = f"RoPE: queries and keys rotated, {dim} channels, base {base:g}"
    return View(title, panels, _numbers("rope", dim, base, trained, rotations))


def _circles(rates: Tensor, positions: int) -> Chart:
    """Where up to three pairs point at the first positions, each on a circle of its own."""
    lines = []
    for i, pair in enumerate(sorted({0, len(rates) // 8, len(rates) // 4})):
        angle, wavelength = torch.arange(positions) * rates[pair], math.tau / float(rates[pair])
        unit = torch.polar(torch.full_like(angle, 1 - 0.28 * i), angle)
        label = f"pair {pair}, {wavelength:.3g} a turn"
        lines.append(line(label, unit.real, unit.imag))
    title = f"Pairs at positions 0 to {positions - 1}, the slower the smaller"
    return Chart(title, "cosine", "sine", lines, dots=True, square=True)


def _added(table: Tensor) -> tuple[Heat, Heat]:
    unit = torch.nn.functional.normalize(table.double(), dim=-1)
    title = "Cosine between the vectors of two positions"
    added = Heat("What is added", "channel", "position", table)
    return added, Heat(title, "position", "position", unit @ unit.T)


def _by_rate(
    rotations: Sequence[Rotation], trained: int, farthest: int, what: str = "pair"
) -> tuple[Chart, Chart]:
    """Wavelengths of all pairs, or of ``what`` has rates, and scores at all distances."""
    waves = [_by_pair(each, math.tau / each.rates) for each in rotations]
    above = ("y", trained, f"no full turn in the trained context, {trained}")
    lines = [line(each.label, *scores(each, farthest)) for each in rotations]
    right = ("x", trained, "past the trained context")
    return (
        Chart("Positions for a full turn", what, "positions", waves, log="y", shaded=above),
        Chart("Score of equal vectors, q·k / D", "distance", "", lines, log="x", shaded=right),
    )


def _by_pair(shown: Rotation, values: Tensor) -> Line:
    """A line over the pairs that rotate at all."""
    moving = shown.rates > 0
    return line(shown.label, moving.nonzero().flatten(), values[moving])


def _numbers(
    encoding: str, dim: int, base: float, trained: int, rotations: Sequence[Rotation]
) -> dict[str, Any]:
    rates = []
    for each in rotations:
        values = each.rates.tolist()
        waves = [math.tau / rate if rate else None for rate in values]
        one = {"label": each.label, "gain": each.gain, "rates": values, "wavelengths": waves}
        rates.append(one)
    return {"encoding": encoding, "trained": trained, "dim": dim, "base": base, "rates": rates}


def _similarity(label: str, module: nn.FourierFeatures, at: Tensor) -> Line:
    """Cosine between the features of zero and of each coordinate."""
    features = module(at, dtype=torch.float64)
    return line(label, at[:, 0], features @ features[0] / features[0].square().sum())


def _some(heads: int) -> list[int]:
    """Up to four heads, from the first to the last."""
    return sorted({round(i * (heads - 1) / 3) for i in range(4)})


def _view(name: str, title: str, bias: Tensor, trained: int, last: Panel | None = None) -> View:
    """A causal bias ``[H, L, L]``, and by distance from the last query."""
    heads, length, _ = bias.shape
    head, distance, by_distance = heads // 2, torch.arange(length), bias[:, -1].flip(-1)
    weight = (by_distance - by_distance.amax(-1, keepdim=True)).exp()
    added, left = (
        [line(f"head {h}", distance, values[h]) for h in _some(heads)]
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
