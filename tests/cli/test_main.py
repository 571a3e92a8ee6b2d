import subprocess
import sys


def test_python_m_is_the_command():
    command = [sys.executable, "-m", "posenc", "bench", "--list"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "prefill" in done.stdout
