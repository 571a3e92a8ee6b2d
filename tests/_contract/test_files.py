"""Files that a stranger wrote are read within bounds, or refused with a reason."""

import json
import os

import pytest

from posenc import RoPE
from posenc._contract import files

needs_pipes = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no pipes")


def test_a_file_is_read_as_json_reads_it(tmp_path):
    found = {"a": [1, 2.5, None, {"b": "größer"}], "c": {}}
    (tmp_path / "x").write_text(json.dumps(found))
    assert files.read_json("who", tmp_path / "x") == found
    (tmp_path / "x").write_bytes(b"\xef\xbb\xbf" + json.dumps(found).encode())
    assert files.read_json("who", tmp_path / "x") == found, "with a byte order mark"


@needs_pipes
def test_a_pipe_is_refused_instead_of_waited_for(tmp_path):
    """Nobody writes to it: opening it as usual would wait for ever."""
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ValueError, match="must be a regular file"):
        RoPE.from_config(tmp_path)


def test_a_device_and_a_folder_are_refused(tmp_path):
    """/dev/zero has no end."""
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ValueError, match=r"cannot read|must be a regular file"):
        files.read_json("who", tmp_path / "config.json")
    if os.path.exists("/dev/zero"):
        (tmp_path / "config.json").rmdir()
        (tmp_path / "config.json").symlink_to("/dev/zero")
        with pytest.raises(ValueError, match="must be a regular file"):
            RoPE.from_config(tmp_path)


def test_a_file_too_large_for_a_config_is_not_read(tmp_path):
    """A sparse file takes no disk, and would take all of the memory."""
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ValueError, match="must have at most"):
        files.read_json("who", path)


def test_deep_json_is_a_clear_error(tmp_path):
    """Python's own reader ends in a RecursionError."""
    (tmp_path / "config.json").write_text('{"a":' * 100_000)
    with pytest.raises(ValueError, match=r"JSON object, got lists or dicts that are nested too"):
        RoPE.from_config(tmp_path)


@pytest.mark.parametrize(
    "text",
    [b'{"\\ud800": 1}', b'{"a": ["\\uDC00\\ud800"]}', b'{"a": "\xed\xa0\x80"}'],
    ids=["key", "value", "bytes"],
)
def test_half_of_a_surrogate_pair_is_refused_when_it_is_read(tmp_path, text):
    """It can be neither printed nor written; a whole pair is a character."""
    (tmp_path / "x.json").write_bytes(text)
    with pytest.raises(ValueError, match=r"JSON object, got text with half of a surrogate pair"):
        files.read_json("who", tmp_path / "x.json")
    (tmp_path / "x.json").write_bytes(b'{"\\ud83d\\ude00": 1}')
    assert files.read_json("who", tmp_path / "x.json") == {"\U0001f600": 1}


@pytest.mark.parametrize("text", ["{", "", "[1]", '"x"', "\xff"])
def test_json_that_is_no_object_is_an_error_with_the_files_name(tmp_path, text):
    (tmp_path / "x.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"who: .*x\.json must hold a JSON object, got .*JSON"):
        files.read_json("who", tmp_path / "x.json")


def test_a_name_with_control_characters_is_escaped(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read .*\\x1b\[2J") as error:
        files.read_json("who", tmp_path / "\x1b[2J")
    assert "\x1b" not in str(error.value)
