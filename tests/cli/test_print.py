import re

import pytest

from posenc.cli import _print

ROWS = [["plain", "7"], ["[x]", "10"]]


@pytest.fixture
def terminal(monkeypatch):
    """Rich takes any stream for a terminal under FORCE_COLOR."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")


def test_a_table_in_a_pipe_is_padded_text(capsys):
    """Another program reads it: the first column to the left, numbers to the right, no codes."""
    _print.table("title", ("", "n"), ROWS, ["a note"])
    assert capsys.readouterr().out == "title\n          n\n  plain   7\n  [x]    10\n  a note\n"


def test_no_control_character_of_a_file_reaches_the_terminal(terminal, capsys):
    """An escape sequence renames the window, or writes over what was said."""
    evil = "\x1b]0;owned\x07\x9b31m\u202e\ud800"
    _print.say(evil)
    _print.say(evil, err=True)
    _print.table(evil, (evil, "n"), [[evil, evil]], [evil])
    out, err = capsys.readouterr()
    assert out.count("\\x1b]0;owned\\x07\\x9b31m\\u202e\\ud800") >= 5
    # Rich itself writes only colours and styles.
    left = re.sub(r"\x1b\[[0-9;]*m", "", out + err)
    assert left.replace("\n", "").isprintable()


def test_progress_in_a_log_is_a_line_for_each_tenth(capsys):
    with _print.progress() as progress:
        for hundredths in range(0, 36, 5):
            progress("one\x1b", hundredths / 100)
    assert capsys.readouterr() == ("", "".join(f"{n} % one\\x1b\n" for n in (10, 20, 30)))


def test_a_bar_begins_with_the_first_message(terminal, capsys):
    """A download before it draws its own."""
    with _print.progress() as progress:
        assert capsys.readouterr() == ("", "")
        progress("one", 0.5)
        assert "one" in capsys.readouterr().err


def test_progress_on_a_terminal_is_a_bar_on_stderr(terminal, capsys):
    """Stdout may go to a file while somebody watches, and a tensor's name may hold brackets."""
    with _print.progress() as progress:
        progress("[x]\x1b[2J", 0.5)
    out, err = capsys.readouterr()
    assert out == ""
    assert "50%" in err
    assert "[x]\\x1b[2J" in err
