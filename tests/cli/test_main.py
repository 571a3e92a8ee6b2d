import runpy
import sys

import pytest

import posenc


def test_python_m_posenc_is_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["posenc", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("posenc", run_name="__main__", alter_sys=True)
    assert not ended.value.code
    assert capsys.readouterr().out == f"{posenc.__version__}\n"
