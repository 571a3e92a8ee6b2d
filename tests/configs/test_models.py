"""The data file, against what the installed transformers makes of it."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
import transformers

ROOT = Path(__file__).parents[2]
PINNED = re.search(r"^transformers==(.*)$", (ROOT / "constraints.txt").read_text(), re.M)[1]
WRITTEN = json.loads((ROOT / "src/posenc/configs/models.json").read_text())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(
    transformers.__version__ not in (PINNED, WRITTEN["transformers"]),
    reason="the file was written with another release of transformers",
)
def test_the_file_is_what_the_tool_writes(monkeypatch):
    """It is written with the newest release, whose classes say all that those of the pinned do."""
    monkeypatch.syspath_prepend(str(ROOT / "tools/configs"))
    path = ROOT / "tools/configs/__main__.py"
    spec = importlib.util.spec_from_file_location("tools_configs", path)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    rows = tool.rows()
    parts = tool.vision(rows)
    for kind, row in rows.items():
        assert row.items() <= WRITTEN["models"][kind].items(), kind
    assert parts.items() <= WRITTEN["vision"].items()
    if transformers.__version__ == WRITTEN["transformers"]:
        assert tool.PATH.read_text() == tool.text(rows, parts)
