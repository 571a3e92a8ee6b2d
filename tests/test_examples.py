import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(script, tmp_path):
    picture = tmp_path / "picture.png"
    command = [sys.executable, str(script), "-o", str(picture)]
    done = subprocess.run(command, check=True, timeout=300, capture_output=True, text=True)
    assert str(picture) in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
