"""Which transformers of the installed diffusers run on our rotation: builds, drives, compares each.

    python tools/diffusion                # all of them; writes the table of docs/diffusers.md
    python tools/diffusion Flux Wan       # those whose names begin so; prints what came out

The models are those of ``models.py``, tiny and with random weights: nothing is downloaded. Two
minutes on one core.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tools" / "models")]

import diffusers  # noqa: E402
import torch  # noqa: E402
from judge import judge  # noqa: E402
from models import ALL  # noqa: E402

from posenc import RoPE  # noqa: E402
from support.diffusion import tiny  # noqa: E402

LIMIT = 2e-6
PAGE = ROOT / "docs" / "diffusers.md"
FIRST, LAST = "<!-- python tools/diffusion writes this table -->", "<!-- end -->"


def main() -> None:
    """Study the models that are asked for, or all."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    asked = tuple(sys.argv[1:])
    rows = []
    for name in ALL:
        if not asked or name.startswith(asked):
            rows.append(study(name))
            print(rows[-1]["text"], flush=True)
    if not asked:
        write(sorted(rows, key=lambda row: row["name"]))


def study(name: str) -> dict[str, Any]:
    """Drive one model as it is, patched, and as it is again."""
    model, given = tiny(name, ALL)
    found = judge(model, lambda: model(**given, return_dict=False))
    assert not found["still"], f"{name} still calls {found['still']}"
    assert found["restored"], f"unpatch does not restore {name}"
    assert found["moved"] > 100 * found["outputs"], f"{name} does not depend on the rotation"
    functions = sorted({(function, variant) for _, function, variant, _ in found["places"]})
    said = ", ".join(f"`{function}` ({variant})" for function, variant in functions)
    cells = [name, f"{found['outputs']:.0e}", f"{found['gradients']:.0e}", said, _config(model)]
    return {**found, "name": name, "text": f"| {' | '.join(cells)} |"}


def _config(model: Any) -> str:
    try:
        rope = RoPE.from_config(model)
    except ValueError as error:
        said = str(error).split("\n")[0]
        return said.rstrip(".").split("unlike RoPE: ")[1] if "unlike" in said else "not read"
    return "interleaved" if rope.interleaved else "half"


def write(rows: list[dict[str, Any]]) -> None:
    """Write the table between its two comments."""
    near = [row for row in rows if max(row["outputs"], row["gradients"]) < LIMIT]
    worst = [max(row[kind] for row in near) for kind in ("outputs", "gradients")]
    others = ", ".join(row["name"] for row in rows if row not in near)
    classes = {row["name"].split(",")[0] for row in rows}
    fused = {
        row["name"].split(",")[0] for row in rows if any(names for _, names, _ in row["norms"])
    }
    said = (
        f"{len(classes)} classes of diffusers {diffusers.__version__}; differences of at most "
        f"{worst[0]:.0e} in outputs and {worst[1]:.0e} in gradients, except for {others}. "
        f"Norms are computed with the rotation in {len(fused)} of them.\n\n"
        "| class | outputs | gradients | function (tables) | `RoPE.from_config` |\n"
        "|---|---|---|---|---|\n"
    )
    before, rest = PAGE.read_text().split(FIRST)
    after = rest[rest.index(LAST) :]
    table = "\n".join(row["text"] for row in rows)
    PAGE.write_text(f"{before}{FIRST}\n\n{said}{table}\n\n{after}")
    print(f"{len(rows)} rows written to {PAGE.relative_to(ROOT)}.")


if __name__ == "__main__":
    main()
