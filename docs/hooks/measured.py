"""The pages of what was measured, from `benchmarks/record/*/rotation*.json`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posenc.lab.panels import image

SCRIPTS = Path(__file__).parents[2] / "benchmarks"
RESULTS = SCRIPTS / "record"
# The scripts that wrote the results are in no package.
sys.path.append(str(SCRIPTS))
import record_pages  # noqa: E402
from rotation_plots import ratios, timings  # noqa: E402

_COPIES = ("copy_", "clone")


def reports(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """The results of `benchmarks/rotation.py`, by the names of their machine and file."""
    return {
        path.parent.name + path.stem.removeprefix("rotation"): json.loads(path.read_text())
        for path in sorted(folder.glob("*/rotation*.json"))
    }


def speed(found: Mapping[str, dict[str, Any]]) -> str:
    """The page of times: for each file its machine, a picture where there are peers, a table."""
    parts = []
    for name, report in found.items():
        rows = [(_case(each), _ratios(each)) for each in report["measurements"]]
        names = list(dict.fromkeys(name for _, held in rows for name in held))
        cells = [[*case, *(_number(held.get(each)) for each in names)] for case, held in rows]
        parts.append(f"\n## {name}\n\n{_machine(report)}\n")
        if contested(report)["measurements"]:
            parts.append(f"![Times of {name}](../pictures/{name}.svg)\n")
        parts.append(_table(("case", "shape", "what"), names, cells))
    return "\n".join(parts)


def accuracy(found: Mapping[str, dict[str, Any]]) -> str:
    """The page of errors: the worst of each contestant in each dtype, and who was refused."""
    worst: dict[str, dict[str, float]] = {}
    wrong, farthest = [], 0
    for name, report in found.items():
        for measurement in report["measurements"]:
            dtype, size = measurement["dtype"], measurement["case"]
            farthest = max(farthest, size["offset"] + size["length"] - 1)
            for result in measurement["results"]:
                who, error = result["contestant"], result["error_ulps"]
                if result["status"] == "wrong":
                    case, _, what = _case(measurement)
                    wrong.append([who, name, case, what, result["reason"]])
                if error is not None:
                    held = worst.setdefault(who, {})
                    held[dtype] = max(error, held.get(dtype, 0.0))
    dtypes = sorted({dtype for held in worst.values() for dtype in held})
    cells = [
        [who, *(_number(held.get(dtype)) for dtype in dtypes)]
        for who, held in sorted(worst.items(), key=lambda each: max(each[1].values()))
    ]
    parts = [f"Positions go up to {farthest}.\n", _table(("ulp",), dtypes, cells)]
    if wrong:
        parts += ["## Not timed, because wrong\n"]
        parts += [_table(("who", "file", "case", "what", "why"), [], wrong)]
    return "\n".join(parts)


def contested(report: dict[str, Any]) -> dict[str, Any]:
    """A report of those measurements alone in which a peer was timed."""
    ours = (*_COPIES, "posenc", "posenc in place")
    kept = [each for each in report["measurements"] if set(_ratios(each)) - set(ours)]
    return {**report, "measurements": kept}


def fill(markdown: str, folder: Path = RESULTS) -> str:
    """Put the numbers of ``folder`` at the marks of a page."""
    found = reports(folder)
    record = record_pages.Record(folder / "h200")
    tables = {name: table(record) for name, table in record_pages.TABLES.items()}
    for name, text in {"speed": speed(found), "accuracy": accuracy(found), **tables}.items():
        markdown = markdown.replace(f"<!-- {name} -->", text)
    return markdown


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill the pages of what was measured."""
    return fill(markdown) if page.file.src_uri.startswith("measured/") else markdown


def on_files(files: Any, config: Any) -> Any:
    """Put a picture of each file among the files of the site."""
    from mkdocs.structure.files import File

    for name, report in reports().items():
        drawn = contested(report)
        if drawn["measurements"]:
            content = image(timings(drawn), ".svg")
            files.append(File.generated(config, f"pictures/{name}.svg", content=content))
    return files


def _ratios(measurement: dict[str, Any]) -> dict[str, float]:
    return {name: r for name, r in ratios(measurement).items() if name not in _COPIES}


def _case(measurement: dict[str, Any]) -> tuple[str, str, str]:
    case = measurement["case"]
    words = [measurement["layout"], case["mode"]]
    if measurement["positions"] != "offset":
        words.append(measurement["positions"])
    if case.get("qk_norm"):
        words.append("norm")
    shape = "·".join(str(case[key]) for key in ("batch", "heads", "key_heads", "length", "dim"))
    return case["name"], shape, " ".join(words)


def _machine(report: dict[str, Any]) -> str:
    machine, first = report["machine"], report["measurements"][0]
    where = machine["gpu"] if first["device"] == "cuda" else machine["cpu"]
    threads = "" if first["device"] == "cuda" else f", {report['settings']['threads']} threads"
    versions = [f"{name} {version}" for name, version in (report.get("versions") or {}).items()]
    words = [f"{where}{threads}", first["dtype"], f"torch {machine['torch']}", *versions]
    return f"{', '.join(words)}; {machine['date'][:10]}."


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"


def _table(words: Sequence[str], numbers: Sequence[str], rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in ((*words, *numbers), *rows)]
    lines.insert(1, "|---" * len(words) + "|--:" * len(numbers) + "|")
    return '<div class="numbers" markdown>\n\n' + "\n".join(lines) + "\n\n</div>\n"
