import importlib
import inspect
import runpy
import subprocess
import sys

import pytest

import posenc
import posenc_command


def test_python_m_posenc_is_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["posenc", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("posenc", run_name="__main__", alter_sys=True)
    assert not ended.value.code
    assert capsys.readouterr().out == f"{posenc.__version__}\n"


def test_the_help_does_not_import_torch():
    """Torch takes seconds to import, and help should be there at once."""
    script = (
        "import sys, posenc_command; sys.argv = ['posenc', '--help']\n"
        "try: posenc_command.main()\n"
        "except SystemExit as ended: assert not ended.code\n"
        "heavy = {'torch', 'numpy', 'matplotlib', 'posenc'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in posenc_command.COMMANDS:
        assert name in done.stdout


@pytest.mark.parametrize("name", posenc_command.COMMANDS)
def test_the_list_has_the_first_sentence_of_each_help(name):
    """The list is written without importing the sub-command."""
    command = getattr(importlib.import_module(f"posenc.cli.{name}"), name)
    first, *_ = inspect.getdoc(command).split("\n\n")
    assert posenc_command.COMMANDS[name] == first


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_a_missing_package_is_one_line_that_names_the_way_out(package):
    script = f"import sys; sys.modules['{package}'] = None; import posenc_command"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == (
        f"posenc: the command line needs {package}: pip install 'posenc[cli]', "
        "or '.[cli]' in a clone\n"
    )
