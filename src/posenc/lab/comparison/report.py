"""One page of a comparison, with everything inside it: it opens anywhere, without a network."""

from __future__ import annotations

import html
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from posenc.lab.comparison import figures
from posenc.lab.comparison.encodings import ENCODINGS
from posenc.lab.pictures import show
from posenc.lab.pictures.style import COLOURS, figure, inline_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STYLE = """
:root { color-scheme: light dark; --ink: #24292f; --page: #ffffff; --faint: #d0d7de;
  --soft: #f3f5f7; --quiet: #57606a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --page: #0f1318; --faint: #3a424c;
  --soft: #1a2027; --quiet: #9aa4af; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 68rem; padding: 1.5rem 1rem 4rem; background: var(--page);
  color: var(--ink); font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .5rem; }
h2 { font-size: 1.15rem; margin: 2.5rem 0 .5rem; }
p { max-width: 46rem; margin: .5rem 0; }
.quiet, figcaption { color: var(--quiet); font-size: .9rem; }
figure { margin: 1rem 0; }
svg { display: block; width: 100%; height: auto; }
svg text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
.pair { display: grid; gap: 1rem 2rem;
  grid-template-columns: repeat(auto-fit, minmax(19rem, 1fr)); }
.wide { max-width: 40rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .95rem; }
th, td { padding: .35rem .7rem; text-align: right; border-bottom: 1px solid var(--faint);
  white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
td small { color: var(--quiet); }
.dot { display: inline-block; width: .7em; height: .7em; border-radius: 50%; margin-right: .45em; }
pre { background: var(--soft); padding: .8rem 1rem; border-radius: 6px; white-space: pre-wrap;
  overflow-wrap: anywhere; font-size: .9rem; }
@media (max-width: 34rem) { th, td { padding: .35rem .3rem; font-size: .85rem; }
  .losses td small { display: block; } }
dt { font-weight: 600; margin-top: .6rem; } dd { margin: 0; max-width: 46rem; }
"""


def page(results: dict[str, Any]) -> str:
    """The page."""
    plan, text = results["plan"], results["text"]
    title = f"Trained on {_e(plan['train_length'])}, tested on more"
    parts = [
        f"<h1>{title}</h1>",
        f"<p>The same transformer ({_e(plan['layers'])} layers, {_e(plan['width'])} channels, "
        f"{_e(plan['heads'])} heads), the same weights to begin with and the same data in the same "
        f"order; only its sense of position differs. It learned from sequences of "
        f"{_e(plan['train_length'])} symbols of {_e(text['name'])} and is tested on text it has "
        f"not seen. Lower is better.</p>",
        *_missing(results),
    ]
    if results["summary"]:
        parts += _body(results)
    parts += [
        "<h2>How to have it again</h2>",
        f"<pre>{_e(results['command'] or 'posenc compare')}</pre>",
        f'<p class="quiet">{_e(_origin(results))}</p>',
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<title>{title}: posenc compare</title>\n<link rel="icon" href="data:,">\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n" + "\n".join(parts) + "\n</body>\n</html>\n"
    )


def _body(results: dict[str, Any]) -> list[str]:
    plan = results["plan"]
    tail = (
        f"Mean loss of the last {plan['train_length']} symbols of each sequence: the same symbols "
        "at every length, with more before them."
    )
    seeds = len(plan["seeds"])
    if seeds > 1:
        tail += f" Means of {seeds} seeds; the bands are their range."
    return [
        _chart("length", figures.by_length, results, tail, size=(4.9, 3.7), css="wide"),
        _losses(results),
        "<h2>Where it breaks, and how it learned</h2>",
        '<div class="pair">',
        _chart("position", figures.by_position, results, "The longest sequences, in stretches."),
        _chart("training", figures.training, results, "Means of stretches of steps."),
        "</div>",
        "<h2>How each goes past the training length</h2>",
        f"<p>RoPE and the sinusoid have base {plan['base']:g}: the slowest pair turns once in "
        f"{_slowest(plan):.0f} positions.</p>",
        "<dl>",
        *(f"<dt>{_name(row)}</dt><dd>{_e(row['past'])}</dd>" for row in results["summary"]),
        "</dl>",
        "<h2>What each looks like</h2>",
        '<div class="pair">',
        *_looks(plan, [row["encoding"] for row in results["summary"]]),
        "</div>",
        "<h2>What each costs</h2>",
        _costs(results),
        '<p class="quiet">Memory is the most that was allocated at one time: in a training step, '
        "and in reading one sequence of the longest length. Speeds are medians.</p>",
    ]


def _slowest(plan: dict[str, Any]) -> float:
    """Positions of a full turn of RoPE's slowest pair."""
    dim = plan["width"] // plan["heads"]
    return float(math.tau * plan["base"] ** ((dim - 2) / dim))


def _chart(
    name: str,
    draw: Callable[[Axes, dict[str, Any]], None],
    results: dict[str, Any],
    caption: str,
    *,
    size: tuple[float, float] = (4.9, 3.5),
    css: str = "",
) -> str:
    drawn = figure(*size)
    draw(drawn.subplots(), results)
    said = f"Chart: {drawn.axes[0].get_title(loc='left')}. The numbers are in the tables."
    picture = inline_svg(drawn, name, said)
    kind = f' class="{css}"' if css else ""
    return f"<figure{kind}>{picture}<figcaption>{_e(caption)}</figcaption></figure>"


def _losses(results: dict[str, Any]) -> str:
    plan = results["plan"]
    heads = [f"{_e(t)} ×<br><small>{_e(t * plan['train_length'])}</small>" for t in plan["times"]]
    rows = []
    for row in results["summary"]:
        cells = [f"{row['tail'][0]:.3f}"]
        for loss, rise in zip(row["tail"][1:], row["rise"][1:], strict=True):
            cells.append(f"{loss:.3f} <small>{rise:+.2f}</small>")
        rows.append([_name(row), *cells])
    return _table(["nats per symbol", *heads], rows, "losses")


def _costs(results: dict[str, Any]) -> str:
    longest = results["plan"]["train_length"] * max(results["plan"]["times"])
    heads = [
        "",
        "parameters",
        "training, symbols / s",
        f"reading {_e(longest)}, symbols / s",
        "training, MB",
        f"reading {_e(longest)}, MB",
    ]
    rows = []
    for row in results["summary"]:
        cost = row["cost"]
        rows.append(
            [
                _name(row),
                f"{row['parameters']:,}",
                f"{cost['train_tokens_per_second']:,.0f}",
                f"{cost['test_tokens_per_second']:,.0f}",
                f"{cost['train_bytes'] / 1e6:.1f}",
                f"{cost['test_bytes'] / 1e6:.2f}",
            ]
        )
    return _table(heads, rows)


def _looks(plan: dict[str, Any], shown: list[str]) -> list[str]:
    """The pictures of `posenc show`, for the sizes of this model."""
    width, heads, base = plan["width"], plan["heads"], plan["base"]
    length, longest = plan["train_length"], plan["train_length"] * max(plan["times"])
    rope = show.rope_view(width // heads, base=base, trained=length, length=longest)
    looks = {
        "sinusoidal": (
            show.View("sinusoidal", width, length, longest, base),
            "Sinusoidal. Added to the input.",
        ),
        "learned": (
            show.View("learned", width, length, longest),
            "Learned. Added to the input; as it is made, before training.",
        ),
        "rope": (rope, "RoPE. Cosines of the angles that queries and keys are rotated by."),
        "alibi": (
            show.View("alibi", heads=heads, length=longest),
            "ALiBi. Added to the scores of one head.",
        ),
    }
    found = []
    for name in dict.fromkeys(ENCODINGS[each].trains for each in shown):
        if name in looks:
            view, caption = looks[name]
            picture = inline_svg(show.cover(view), f"look-{name}", caption)
            found.append(f"<figure>{picture}<figcaption>{caption}</figcaption></figure>")
    return found


def _missing(results: dict[str, Any]) -> list[str]:
    if results["complete"]:
        return []
    return ["<p><strong>Not finished:</strong> what is below is what was done so far.</p>"]


def _origin(results: dict[str, Any]) -> str:
    machine, text = results["machine"], results["text"]
    count = results["plan"]["threads"]
    threads = f"{count} thread{'s' if count > 1 else ''}"
    return (
        f"posenc {results['posenc']}, torch {machine['torch']}, Python {machine['python']}, "
        f"{machine['cpu']}, {threads}, {machine['date']}. Text: {text['name']}, "
        f"{text['train']:,} symbols to learn from and {text['held']:,} to test on, "
        f"SHA-256 {text['sha256'][:16]}. Seeds: {', '.join(map(str, results['plan']['seeds']))}."
    )


def _table(heads: list[str], rows: list[list[str]], css: str = "costs") -> str:
    top = "".join(f"<th>{head}</th>" for head in heads)
    body = "".join(f"<tr>{''.join(f'<td>{c}</td>' for c in row)}</tr>" for row in rows)
    return (
        f'<div class="scroll"><table class="{css}"><thead><tr>{top}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _name(row: dict[str, Any]) -> str:
    colour, _ = COLOURS[row["encoding"]]
    return f'<span class="dot" style="background:{colour}"></span>{_e(row["label"])}'


def _e(text: object) -> str:
    return html.escape(str(text))
