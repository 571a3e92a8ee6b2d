"""The page that says what became of each folder."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import recipes
import transformers

LIMIT = 2e-5
_REFUSED = re.compile(r"must be known to posenc, got (.+?) in transformers\.")


def verdict(result: dict[str, Any]) -> str:
    """What a row of the table says about a folder."""
    driven = result["driven"]
    if not result["need"] and not driven and not result["trouble"]:
        return _IDLE
    missing = set(result["need"]) - {owner for d in driven for owner in d["owners"]}
    refused = [why for line in result["trouble"] for why in _REFUSED.findall(line)]
    if refused and (missing or not driven):
        return f"refused: {refused[0]}"
    if missing or not driven:
        return f"not driven: {', '.join(sorted(missing)) or result['trouble'][-1]}"
    for d in driven:
        if d["moved"] < 100 * max(d["outputs"], 1e-7) and not result.get("cancels"):
            return f"not driven: {d['model']} does not depend on the rotation"
        if d["still"]:
            return f"still calls {', '.join(d['still'])}"
        if not d["restored"]:
            return "unpatch does not restore it"
        if max(d["outputs"], d["gradients"]) > LIMIT:
            return f"differs: outputs {d['outputs']:.1e}, gradients {d['gradients']:.1e}"
    return "patched"


def summary(results: list[dict[str, Any]]) -> str:
    """How many folders were patched, in a sentence."""
    said = [verdict(result) for result in results]
    done, idle = said.count("patched"), said.count(_IDLE)
    rest = len(said) - done - idle
    others = f"; {rest} could not be" if rest else ""
    return (
        f"{done} of {len(said)} folders are patched; in {idle} no code that rotates runs{others}."
    )


def page(results: list[dict[str, Any]]) -> str:
    """The whole page, in Markdown."""
    places = Counter(
        (variant, layout)
        for result in results
        for variant, layout in {
            (variant, layout) for d in result["driven"] for _, _, variant, layout in d["places"]
        }
    )
    kinds = [f"| {v} | {lay} | {n} |" for (v, lay), n in places.most_common()]
    exact = sum(1 for result in results if any(d["tables"] for d in result["driven"]))
    fused = sum(1 for result in results if _fuses(result))
    worst = [d for r in results if verdict(r) == "patched" for d in r["driven"]]
    return _PAGE.format(
        version=transformers.__version__,
        summary=summary(results),
        outputs=max(d["outputs"] for d in worst),
        gradients=max(d["gradients"] for d in worst),
        limit=LIMIT,
        exact=exact,
        fused=fused,
        kinds="\n".join(kinds),
        rows="\n".join(map(_row, results)),
    )


def _fuses(result: dict[str, Any]) -> bool:
    """Whether a norm of queries or keys was computed with the rotation."""
    return any(names for d in result["driven"] for _, names, _ in d["norms"])


def _row(result: dict[str, Any]) -> str:
    driven = result["driven"]
    what = "; ".join(
        d["model"] + (f": {d['by']}" if d["by"] not in ("the whole", "") else "") for d in driven
    )
    how = sorted({f"{v}, {lay}" for d in driven for _, _, v, lay in d["places"]})
    tables = sorted({f"{form}" for d in driven for _, form, _ in d["tables"]})
    outputs = f"{max(d['outputs'] for d in driven):.0e}" if driven else ""
    gradients = f"{max(d['gradients'] for d in driven):.0e}" if driven else ""
    said = verdict(result)
    if result["folder"] in recipes.NOTES:
        said += f" ({recipes.NOTES[result['folder']]})"
    norms = "fused" if _fuses(result) else ""
    cells = (result["folder"], said, what, "; ".join(how), ", ".join(tables), norms)
    cells = (*cells, outputs, gradients)
    return "| " + " | ".join(cells) + " |"


_IDLE = "no code that rotates runs"
_PAGE = """# Models of transformers {version} on our rotation

{summary}

`posenc.interop.huggingface.patch(model)` was tested on a tiny random model of every folder of
transformers that has rotary code. A folder is *patched* if every class that rotates was run and,
after `patch`,

- outputs and gradients of all parameters equal those of the original within {limit:.0e} of their
  largest value, in float32 (the largest differences: {outputs:.1e} and {gradients:.1e});
- none of the original rotating functions is called any more;
- without any rotation the outputs would change by at least a hundred times the difference;

and after `unpatch` the outputs are bit-identical to before. In {exact} of them the rotary modules
return posenc's exact tables as well; the others use another form of tables, and keep them. In
{fused} of them an RMSNorm of queries or keys comes directly before the rotation, and one kernel
computes both (*norms*). Norms of another kind, and norms after the rotation, are not changed.

The page is written by `python tools/models`, which downloads nothing and takes about five minutes
on two cores. If it is hard to make inputs for a whole model, only the modules that rotate are run;
*driven* names the model or modules that were run. *How* is the form of the model's tables, and its
layout.

| tables | layout | folders |
|---|---|---|
{kinds}

| folder | verdict | driven | how | our tables | norms | outputs | gradients |
|---|---|---|---|---|---|---|---|
{rows}
"""
