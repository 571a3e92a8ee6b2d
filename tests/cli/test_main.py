import subprocess
import sys

import posenc


def test_python_m_posenc_is_the_command():
    command = [sys.executable, "-m", "posenc", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == f"{posenc.__version__}\n"
