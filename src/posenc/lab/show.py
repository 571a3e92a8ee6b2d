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
_LEARNED = "; an example of learned values"
# Of the random features, and the numbers of octaves of NeRF's.
_SCALES, _OCTAVES = (1.0, 4.0, 16.0), (2, 4, 6)
# Cells of a side of the grid, and channels of a head.
_WINDOW, _WIDTH = 7, 16


def _spans(count: int, trained: int) -> Tensor:
    """How far each of ``count`` example heads looks back, from 2 tokens to half the length."""
    return torch.logspace(math.log10(2), math.log10(max(2, trained / 2)), count)


def _example(distance: Tensor, count: int, trained: int) -> Tensor:
    """Values ``[count, N]`` such as training could give: high up to a span, and low beyond it."""
    return 6 * (-distance / _spans(count, trained)[:, None]).exp() - 3


def _learn_t5(module: Any, trained: int) -> None:
    # With the number of each bucket in it, the table says which bucket a distance is in.
    module.weight.copy_(torch.arange(module.num_buckets)[:, None])
    distance = torch.arange(trained)
    buckets = module.table(trained)[0, :trained].long()
    values = _example(distance, module.num_heads, trained).T
    module.weight.copy_(_mean_by_row(buckets, values, module.num_buckets))


def _learn_bias(module: Any, trained: int) -> None:
    module.weight.copy_(_example(torch.arange(trained), module.num_heads, trained))


def _learn_keys(module: Any, trained: int) -> None:
    # The row of distance zero is the last.
    module.weight.copy_(_example(torch.arange(trained), module.head_dim, trained).T.flip(0))


def _learn_deberta(module: Any, trained: int) -> None:
    distance = torch.arange(trained)
    values = _example(distance, module.head_dim, trained).T
    rows = _mean_by_row(module.distance_rows(distance), values, len(module.pos_key))
    for table in (module.pos_key, module.pos_query):
        table.copy_(rows[:, None])


def _learn_projection(module: Any, trained: int) -> None:
    # Each channel of a head sums the cosines whose waves are longer than its span.
    heads, width = module.num_heads, module.head_dim
    waves = math.tau / nn.RoPE(module.embed_dim, None).scaled_inv_freq().float()
    longer = (waves / (4 * _spans(width, trained)[:, None])).log().mul(2).sigmoid()
    weight = torch.zeros(heads, width, 2, len(waves))
    weight[:, :, 1] = 6 * longer / longer.sum(-1, keepdim=True)
    module.linear_pos.weight.copy_(weight.flatten(2).flatten(0, 1))


def _mean_by_row(rows: Tensor, values: Tensor, count: int) -> Tensor:
    """A table of ``count`` rows, each the mean of the values ``[N, C]`` that belong to it."""
    sums = values.new_zeros(count, values.shape[1]).index_add(0, rows, values)
    return sums / rows.bincount(minlength=count).clamp(min=1)[:, None]


class Family(NamedTuple):
    """A bias, for a number of heads, their channels, and a trained length."""

    label: str
    words: str
    make: Callable[[int, int, int], Any]
    # For one that has nothing to show before training: sets parameters to an example.
    learn: Callable[[Any, int], None] | None = None
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
        "a number for each bucket of distances",
        lambda heads, width, trained: nn.T5Bias(
            heads, num_buckets=min(32, trained), max_distance=trained, causal=True
        ),
        _learn_t5,
    ),
    "learned-bias": Family(
        "learned bias",
        "a number for each distance",
        lambda heads, width, trained: nn.LearnedBias(heads, max_distance=trained - 1),
        _learn_bias,
    ),
    "kerple": Family(
        "KERPLE",
        "a logarithm of the distance, before training",
        lambda heads, width, trained: nn.KERPLE(heads),
    ),
    "sandwich": Family(
        "Sandwich", "products of sinusoids", lambda heads, width, trained: nn.Sandwich(heads)
    ),
    # The paper's threshold is a quarter of its training length.
    "fire": Family(
        "FIRE",
        "a function of the distance over the query's position, before training",
        lambda heads, width, trained: nn.FIRE(heads, threshold=trained / 4),
    ),
    "relative-keys": Family(
        "relative keys",
        "the query times a vector for each distance",
        lambda heads, width, trained: nn.RelativeKeys(width, max_distance=trained - 1),
        _learn_keys,
        products=True,
    ),
    "transformer-xl": Family(
        "Transformer-XL",
        "the query times the projected sinusoid of the distance",
        lambda heads, width, trained: nn.TransformerXLBias(heads, embed_dim=width * heads),
        _learn_projection,
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
        _learn_deberta,
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
        ("Sinusoidal: added to the input", sinusoidal(dim=dim, length=length).panels[0]),
        ("Learned: added; an example", learned(dim=dim, length=length).panels[0]),
        (f"Rotary: {circles.title.lower()}", circles),
        (f"Rotary: {wavelengths.title.lower()}", wavelengths),
        (f"Rotary: {by_distance.title.lower()}", by_distance),
        ("ALiBi: added to the scores", relative("alibi", length=length, trained=length).panels[0]),
    )
    panels = [replace(panel, title=title) for title, panel in shown]
    return sheet(panels, 12, 6.8, columns=3, title="Where a token is, four ways")


def sinusoidal(
    *, dim: int = 128, length: int = 128, trained: int = 4096, base: float = 10_000.0
) -> View:
    """The table that is added for ``length`` positions, and the rates it is made of."""
    table = nn.SinusoidalPE(length, dim, base=base).get_encoding(length)
    rates = [Rotation("", nn.RoPE(dim, None, base).scaled_inv_freq())]
    waves, by_distance = _by_rate(rates, trained, 4 * trained)
    by_distance = replace(by_distance, title="The same cosine, by distance", y="cosine")
    panels = (*_added(table), waves, by_distance)
    title = f"Sinusoidal, {dim} channels: added to the input"
    return View(title, panels, _numbers("sinusoidal", dim, base, trained, rates))


def learned(*, dim: int = 128, length: int = 128) -> View:
    """An example of what `nn.LearnedPosEmbedding` learns: smooth functions of the position."""
    # Waves of half a turn, one turn, ..., the longer the stronger.
    turns = torch.arange(1, 17) / 2
    angle = math.tau * turns * torch.linspace(0, 1, length)[:, None]
    waves = torch.cat([angle.cos(), angle.sin()], 1) / turns.repeat(2)
    table = waves @ torch.randn(32, dim, generator=torch.Generator().manual_seed(0))
    table = table / table.std()
    title = f"Learned, {dim} channels: added to the input{_LEARNED}"
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
        Chart(f"Score of channel {middle}, lengths one", "distance", "q·k", parts),
    )
    title = f"PoPE, {dim} channels, base {base:,g}: lengths softplus(x), angles of positions"
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
    cells = f"coordinate, 0 to 1 in {length} steps"
    title = "Cosine between two coordinates' features"
    panels = (
        Heat("Random: cosines, slow ones first", "frequency", cells, cosines),
        Heat("NeRF: sine and cosine, frequencies double", "channel", cells, octaves(at)),
        Chart(f"{title}: random", "distance", "cosine", gaussian),
        Chart(f"{title}: NeRF", "distance", "cosine", doubling),
    )
    rates = random.frequencies[:, 0].tolist()
    numbers = {"encoding": "fourier", "dim": dim, "scale": random.scale, "frequencies": rates}
    return View(f"Fourier features of one coordinate, {dim} channels", panels, numbers)


def relative(name: str, *, heads: int = 8, length: int = 256, trained: int = 128) -> View:
    """One of the families, if all tokens have one query and one key."""
    label, words, make, learn, products = FAMILIES[name]
    with _before_training():
        module = make(heads, _WIDTH, trained)
        if learn is not None:
            learn(module, trained)
            words += _LEARNED
        # The query of each head chooses one of the channels, from the first to the last.
        q = torch.zeros(1, heads, length, _WIDTH)
        channel = torch.linspace(0, _WIDTH - 1, heads).round().long()
        q[:, torch.arange(heads), :, channel] = _WIDTH**0.5
        bias = module.bias(q, q)[0] if products else module.bias(length)
    return _view(name, f"{label[0].upper()}{label[1:]}", words, bias, trained)


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
    gates = Chart("How much each token keeps of those before it", "position", "gate", lines)
    words = "random tokens decide, three of these forget"
    return _view("forget-gate", "Forgetting gates", words, gate.bias(sums), trained, gates)


def cope(*, heads: int = 8, length: int = 256, trained: int = 128) -> View:
    """The bias of random tokens, if each that is counted lowers the score by 0.1."""
    with _before_training():
        module, (q, k) = nn.CoPE(_WIDTH, max_pos=trained), torch.randn(2, 1, heads, length, _WIDTH)
        q[..., 0], module.pos_emb[0, 0] = 1.0, -0.1 * torch.arange(trained)
        bias = module.bias(q, k)[0]
    return _view("cope", "CoPE", "gates decide which of these random tokens count", bias, trained)


def grid(*, heads: int = 8) -> View:
    """Swin v2's bias of a window of an image, before training."""
    with _before_training():
        bias = nn.GridBias(_WINDOW, num_heads=heads, continuous=True).bias()
    head = _middle(heads)
    window = bias[head].unflatten(-1, (_WINDOW, _WINDOW))
    corner, centre = (
        Heat(f"Bias of the cell in the {place}, head {head}", "column", "row", window[cell], True)
        for place, cell in (("corner", 0), ("centre", len(window) // 2))
    )
    across = [line(f"head {h}", torch.arange(_WINDOW), bias[h, 0, :_WINDOW]) for h in _some(heads)]
    panels = (
        centre,
        corner,
        Heat(f"Bias of all cells, head {head}", "key", "query", bias[head], True),
        Chart("Bias of the cell in the corner, along its row", "columns away", "bias", across),
    )
    size = f"{_WINDOW} × {_WINDOW}"
    title = f"Grid, {heads} heads: rows and columns of a window of {size}, before training"
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
        last = Chart("How many times slower each pair rotates", "pair", "times", slower)
    cos = (torch.arange(length)[:, None] * shown.rates).cos() * shown.gain
    heat = Heat(f"Cosines of the angles{named}", "pair", "position", cos)
    panels = (heat, *_by_rate(rotations, trained, longest), last)
    title = f"RoPE, {dim} channels, base {base:,g}: queries and keys rotated"
    return View(title, panels, _numbers("rope", dim, base, trained, rotations))


def _circles(rates: Tensor, positions: int) -> Chart:
    """Where up to three pairs point at the first positions, each on a circle of its own."""
    lines = []
    for i, pair in enumerate(sorted({0, len(rates) // 8, len(rates) // 4})):
        angle = torch.arange(positions) * rates[pair]
        unit = torch.polar(torch.full_like(angle, 1 - 0.28 * i), angle)
        lines.append(line(f"pair {pair}", unit.real, unit.imag))
    title = f"Pairs at positions 0 to {positions - 1}"
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
    above = ("y", trained, f"no full turn in {trained:,}")
    lines = [line(each.label, *scores(each, farthest)) for each in rotations]
    right = ("x", trained, f"past the trained length, {trained:,}")
    return (
        Chart("Positions for a full turn", what, "positions", waves, log="y", shaded=above),
        Chart("Score of equal vectors", "distance", "q·k / D", lines, log="x", shaded=right),
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


def _middle(heads: int) -> int:
    """One of these, which a map shows."""
    some = _some(heads)
    return some[len(some) // 2]


def _view(
    name: str, label: str, words: str, bias: Tensor, trained: int, last: Panel | None = None
) -> View:
    """A causal bias ``[H, L, L]``, and by distance from the last query."""
    heads, length, _ = bias.shape
    head, distance, by_distance = _middle(heads), torch.arange(length), bias[:, -1].flip(-1)
    weight = (by_distance - by_distance.amax(-1, keepdim=True)).exp()
    added, left = (
        [line(f"head {h}", distance, values[h]) for h in _some(heads)]
        for values in (by_distance, weight)
    )
    past = ("x", trained, f"past the trained length, {trained:,}")
    panels = (
        Chart("Added to the score of the last query", "distance", "bias", added, shaded=past),
        Heat(f"Bias of head {head}", "key", "query", bias[head]),
        Chart(
            "Attention weight at equal scores", "distance", "weight, largest = 1", left, shaded=past
        ),
        last or _of_queries(bias[head], head, past),
    )
    numbers = {"encoding": name, "trained": trained, "heads": heads, "bias": by_distance.tolist()}
    return View(f"{label}, {heads} heads: {words}", panels, numbers)


def _of_queries(bias: Tensor, head: int, past: tuple[str, float, str]) -> Chart:
    """The bias of three queries by distance, or of the last if those of the others are as far."""
    length = len(bias)
    queries = sorted({length // 4, length // 2, length - 1}, reverse=True)
    rows = [bias[query, : query + 1].flip(-1) for query in queries]
    # Lines that are this close are one on paper.
    close = 1e-3 * (rows[0].max() - rows[0].min())
    which = "three queries"
    if all((row - rows[0][: len(row)]).abs().max() <= close for row in rows):
        queries, rows, which = queries[:1], rows[:1], "any query"
    lines = [
        line(f"query {query}", torch.arange(len(row)), row)
        for query, row in zip(queries, rows, strict=True)
    ]
    return Chart(f"Bias of {which}, head {head}", "distance", "bias", lines, shaded=past)


@contextmanager
def _before_training() -> Iterator[None]:
    """Draw the same numbers at every call."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
