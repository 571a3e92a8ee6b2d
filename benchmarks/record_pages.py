"""The tables of README.md and of the manual, written from `record/*/*.json`.

A page has marks, `<!-- record: NAME -->` and `<!-- end -->`; what is between them is a table of
this file. No number there is typed. The page of speeds is filled when the manual is built.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/pope.md", "docs/relative-biases.md", "docs/serving.md")
MARKS = re.compile(r"(<!-- record: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
MODULES = {
    "ALiBi": "`ALiBi(16)`",
    "LearnedBias": "`LearnedBias(16, max_distance=128)`",
    "T5Bias": "`T5Bias(16, causal=True)`",
    "KERPLE": "`KERPLE(16)`",
    "RelativeKeys": "`RelativeKeys(64, max_distance=128)`",
    "CoPE": "`CoPE(64, max_pos=64)`",
    "FIRE": "`FIRE(16)`",
    "TransformerXLBias": "`TransformerXLBias(16, embed_dim=1024)`",
    "DeBERTaBias": "`DeBERTaBias(16, head_dim=64, position_buckets=256, causal=False)`",
}
LENGTHS = (1024, 4096, 16384)


class Record:
    """The results of one machine."""

    def __init__(self, folder: Path = ROOT / "benchmarks/record/h200") -> None:
        self.reports = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}

    def results(self, part: str) -> Any:
        """The results of one benchmark."""
        return self.reports[part]["results"]

    def by_name(self, part: str) -> dict[str, Any]:
        """The same, each by its name."""
        return {row["name"]: row for row in self.results(part) if "missing" not in row}

    def source(self, *parts: str) -> str:
        """Where the numbers of a table are from."""
        one = self.reports[parts[0]]
        file = f"/{parts[0]}.json" if len(parts) == 1 else ""
        made = one["machine"]
        return (
            f"{made['gpu']}, torch {made['torch'].split('+')[0]}, Triton {made['triton']}, "
            f"{made['date'][:10]}: `benchmarks/record/h200{file}`."
        )


def table(head: Iterable[str], rows: Iterable[Iterable[Any]], source: str) -> str:
    """A table of Markdown, and where it is from."""
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines) + f"\n{source}\n"


def number(value: float | None) -> str:
    """Two digits, three from 100 on."""
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def span(values: Iterable[float], digits: int = 2) -> str:
    """The least and the most."""
    found = sorted(values)
    low, high = (f"{each:.{digits}f}" for each in (found[0], found[-1]))
    return low if low == high else f"{low} to {high}"


def rotations(record: Record, case: str, name: str) -> list[float]:
    """Copies that a contestant takes in each layout, in a CUDA graph."""
    return [
        result["ratio"]
        for measurement in record.reports["rotation"]["measurements"]
        for result in measurement["results"]
        if (measurement["case"]["name"], result["contestant"], result["via"])
        == (case, name, "graph")
    ]


def summary(record: Record) -> str:
    """What README.md shows."""
    calls, biases = record.by_name("calls"), record.by_name("biases")
    terms = {(row["name"], row["tokens"]): row for row in record.results("terms")}
    rows = []
    for what, case in (("", "h200-long"), (", forward and backward", "h200-train")):
        ours, compiled, liger = (
            span(rotations(record, case, name))
            for name in ("posenc", "transformers compiled", "Liger in place")
        )
        rows.append(
            (
                f"rotation of q and k, (4, 8192, 32 + 8 heads, 128){what}",
                f"{ours} copies",
                f"transformers, compiled: {compiled}; Liger: {liger}",
            )
        )
    micro = {name: f"{row['median'] * 1e6:.0f} µs" for name, row in calls.items()}
    rows.append(
        (
            "rotation of q and k of one token, called from Python",
            micro["RoPE, offset"],
            f"transformers: {micro['apply_rotary_pos_emb of transformers']}; "
            f"Liger: {micro['Liger, in place']}",
        )
    )
    ours, theirs = served(record, "one"), served(record, "Liger, vLLM")
    rows.append(
        (
            "norm, rotation and write to a paged cache, 1 to 16,384 tokens, in a CUDA graph",
            f"{span(ours)} copies, one launch",
            f"kernels of Liger and vLLM: {span(theirs, 1)}",
        )
    )
    alibi = biases["ALiBi forward, L = 32768, SDPA without a bias"]
    rows.append(
        (
            "exact ALiBi attention, 32 heads of 128, 32,768 tokens (far keys are pruned)",
            f"{number(alibi['posenc'])} ms",
            f"SDPA without a bias: {number(alibi['other'])} ms",
        )
    )
    for name in ("T5Bias", "FIRE"):
        row = terms[name, 4096]
        against = [f"SDPA without a bias: {number(row['unbiased'])} ms"]
        if row["matrix"]:
            against.append(f"with the bias as a matrix: {number(row['matrix'])}")
        rows.append(
            (
                f"attention with `{name}`, 16 heads of 64, 4,096 tokens, forward and backward",
                f"{number(row['posenc'])} ms",
                "; ".join(against),
            )
        )
    models = {(row["step"], row["name"]): row["milliseconds"] for row in served_parts(record)}
    for step, what in (("prefill", "prefill of 8,192 tokens"), ("training step", "training step")):
        rows.append(
            (
                f"a Qwen3 of 1 B parameters, `patch(model)`, {what}",
                f"{number(models[step, 'patched'])} ms",
                f"as it comes: {number(models[step, 'as it comes'])} ms",
            )
        )
    faster = [row["unpatched"]["ratio"] for row in record.results("generate")]
    names = ", ".join(row["family"] for row in record.results("generate"))
    rows.append(
        (f"`generate` of 32 tokens, patched ({names})", f"{span(faster)} times as fast", "")
    )
    parts = ("rotation", "calls", "serving", "biases", "terms", "generate")
    return table(("bfloat16", "posenc", "others"), rows, record.source(*parts))


def served(record: Record, name: str) -> list[float]:
    """Copies that a call of `serving.py` takes, in all its cases."""
    times = [row["microseconds"] for row in record.results("serving")["kernel"]]
    return [each[name] / each["copy"] for each in times if name in each]


def served_parts(record: Record) -> list[dict[str, Any]]:
    """The model of `serving.py`."""
    found: list[dict[str, Any]] = record.results("serving")["model"]
    return found


def costs(record: Record) -> str:
    """Milliseconds of each bias at each length, and of its matrix."""
    found = {(row["name"], row["tokens"]): row for row in record.results("terms")}

    def line(title: str, name: str, column: str = "posenc") -> list[str]:
        times = [number(found[name, length][column]) for length in LENGTHS]
        matrices = [number(found[name, length]["matrix"]) for length in LENGTHS[:2]]
        return [title, *times, *(matrices if column == "posenc" else ("", ""))]

    rows = [
        line("no encoding: SDPA", "ALiBi", "unbiased"),
        line("no encoding, not causal: SDPA", "DeBERTaBias", "unbiased"),
        line("RoPE, then SDPA", "RoPE"),
        *(line(title, name) for name, title in MODULES.items()),
    ]
    head = ("", "1,024 tokens", "4,096", "16,384", "as a matrix: 1,024", "4,096")
    return table(head, rows, record.source("terms"))


def memory(record: Record) -> str:
    """Memory of each bias, in matrices."""
    found = {(row["name"], row["tokens"]): row["memory"] for row in record.results("terms")}
    rows = [
        [f"`{name}`", *(f"{found[name, length]:.2f}" for length in LENGTHS)] for name in MODULES
    ]
    return table(("", "1,024 tokens", "4,096", "16,384"), rows, record.source("terms"))


def biases(record: Record) -> str:
    """Attention with a bias, against SDPA and FlexAttention."""
    rows = []
    for row in record.results("biases"):
        if "posenc" in row:
            what, tokens, against = re.split(r", L = (\d+), ", row["name"])
            ratio = f"{row['posenc'] / row['other']:.2f}"
            times = (f"{row['posenc']:.2f} ms", f"{row['other']:.2f} ms")
            rows.append([what, f"{int(tokens):,}", times[0], against, times[1], ratio])
    return table(("", "tokens", "posenc", "against", "", "ratio"), rows, record.source("biases"))


def first(record: Record) -> str:
    """Seconds of the first calls of a process."""
    rows = [
        [row["name"].removeprefix("first call, "), f"{row['seconds']:.1f} s"]
        for row in record.results("biases")
        if "seconds" in row
    ]
    return table(("first call of a process", ""), rows, record.source("biases"))


def serving(record: Record) -> str:
    """One call, its pieces and peers, in copies."""
    rows = []
    for row in record.results("serving")["kernel"]:
        times = row["microseconds"]
        names = ("one", "pieces", "Liger, vLLM", "FlashAttention, vLLM")
        cells = [f"{times[name] / times['copy']:.2f}" if name in times else "" for name in names]
        layout = "interleaved" if row["interleaved"] else "half"
        norm, cache = "norm" if row["norm"] else "", row["cache"].split("_")[0]
        rows.append([f"{row['tokens']:,}", layout, norm, cache, f"{times['copy']:.1f}", *cells])
    head = ("tokens", "layout", "", "cache", "copy, µs", "posenc", "pieces", "Liger, vLLM",
            "FlashAttention, vLLM")  # fmt: skip
    return table(head, rows, record.source("serving"))


def range_of_serving(record: Record) -> str:
    """What the page on serving shows."""
    names = {"one": "`rotate_and_cache`", "pieces": "rotation and two `index_copy_`"}
    names |= {name: f"kernels of {name.replace(', ', ' and ')}" for name in served_peers(record)}
    rows = [[title, span(served(record, name), 1)] for name, title in names.items()]
    return table(("1 to 16,384 tokens", "copies"), rows, record.source("serving"))


def served_peers(record: Record) -> list[str]:
    """The peers of `serving.py` that were timed."""
    rows = record.results("serving")["kernel"]
    found = dict.fromkeys(name for row in rows for name in row["microseconds"])
    return [name for name in found if name not in ("copy", "one", "pieces")]


def host(record: Record) -> str:
    """What a call costs from Python."""
    rows = [
        [row["name"], f"{row['median'] * 1e6:.0f}", f"{row['ratio']:.2f} of `{row['unit']}`"]
        for row in record.results("calls")
        if "median" in row
    ]
    return table(("call", "µs", "ratio"), rows, record.source("calls"))


def generate(record: Record) -> str:
    """Patched models beside unpatched ones."""
    rows = []
    for row in record.results("generate"):
        times = [f"{row[name]['median'] * 1e3:.0f} ms" for name in ("unpatched", "patched")]
        rows.append([row["family"], *times, f"{row['unpatched']['ratio']:.2f} ×"])
    for row in served_parts(record):
        if row["name"] == "as it comes":
            before = row["milliseconds"]
        elif row["name"] == "patched":
            after = row["milliseconds"]
            times = [f"{each:.1f} ms" for each in (before, after)]
            rows.append([f"Qwen3, {row['step']}", *times, f"{before / after:.2f} ×"])
    head = ("", "as it comes", "`patch(model)`", "faster by")
    return table(head, rows, record.source("generate", "serving"))


def pope(record: Record) -> str:
    """PoPE in copies."""
    rows = []
    for dtype, results in record.results("pope").items():
        ratios = {row["contestant"]: f"{row['ratio'][1]:.2f}" for row in results}
        rows.append([dtype, ratios["queries"], ratios["keys"]])
    return table(("", "queries", "keys"), rows, record.source("pope"))


TABLES: dict[str, Callable[[Record], str]] = {
    "summary": summary,
    "costs": costs,
    "memory": memory,
    "biases": biases,
    "first": first,
    "serving": serving,
    "served": range_of_serving,
    "host": host,
    "generate": generate,
    "pope": pope,
}


def fill(text: str, record: Record | None = None) -> str:
    """A page with its tables written anew."""
    record = record or Record()
    return MARKS.sub(lambda mark: f"{mark[1]}{TABLES[mark[2]](record)}{mark[3]}", text)


def write() -> list[str]:
    """Write the tables of all pages; the pages that changed."""
    changed = []
    for name in PAGES:
        path = ROOT / name
        text = path.read_text(encoding="utf-8")
        if (filled := fill(text)) != text:
            path.write_text(filled, encoding="utf-8")
            changed.append(name)
    return changed
