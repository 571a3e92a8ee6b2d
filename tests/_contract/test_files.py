"""Every error of a JSON file is a ValueError that names the file."""

import json
import os

import pytest

from posenc import RoPE
from posenc._contract import files


def test_a_file_is_read_as_json_reads_it(tmp_path):
    content = {"a": [1, 2.5, None, {"b": "größer"}], "c": {}}
    (tmp_path / "x").write_text(json.dumps(content))
    assert files.read_json("who", tmp_path / "x") == content
    (tmp_path / "x").write_bytes(b"\xef\xbb\xbf" + json.dumps(content).encode())
    assert files.read_json("who", tmp_path / "x") == content, "with a byte order mark"


def test_a_folder_in_place_of_a_file_cannot_be_read(tmp_path):
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ValueError, match=r"cannot read .*config\.json"):
        RoPE.from_config(tmp_path)


@pytest.mark.parametrize(
    "text", ["{", "", "[1]", '"x"', "\xff", '{"a":' * 100_000], ids=lambda t: t[:9] or "empty"
)
def test_json_that_is_no_object_is_an_error_with_the_name_of_the_file(tmp_path, text):
    (tmp_path / "x.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"who: .*x\.json must hold a JSON object, got"):
        files.read_json("who", tmp_path / "x.json")


def test_a_name_with_control_characters_is_escaped(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read .*\\x1b\[2J") as error:
        files.read_json("who", tmp_path / "\x1b[2J")
    assert "\x1b" not in str(error.value)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no named pipes among its files")
def test_a_pipe_is_refused_instead_of_waited_for(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    for path in (tmp_path, tmp_path / "config.json"):
        with pytest.raises(
            ValueError, match=r"cannot read .*config\.json: a folder, a pipe or a device, not"
        ):
            RoPE.from_config(path)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no devices among its files")
def test_a_device_is_refused(tmp_path):
    """Some have no end."""
    (tmp_path / "config.json").symlink_to("/dev/null")
    with pytest.raises(
        ValueError, match=r"cannot read .*config\.json: a folder, a pipe or a device, not"
    ):
        RoPE.from_config(tmp_path)


@pytest.mark.skipif(not os.path.exists("/proc/sys/kernel/pid_max"), reason="only Linux has it")
def test_a_file_of_proc_is_as_empty_as_it_says(tmp_path):
    """It says that it is a regular file of no bytes; some wait, or never end."""
    (tmp_path / "config.json").symlink_to("/proc/sys/kernel/pid_max")
    with pytest.raises(ValueError, match=r"not JSON: Expecting value: line 1 column 1 \(char 0\)"):
        RoPE.from_config(tmp_path)


def test_a_file_too_large_for_a_config_is_not_read(tmp_path):
    """All of it would be in memory, several times."""
    with open(tmp_path / "config.json", "wb") as file:
        file.truncate(64 * 2**20 + 1)
    with pytest.raises(ValueError, match=r"cannot read .*config\.json: more than 67108864 bytes"):
        RoPE.from_config(tmp_path)


def test_a_link_to_a_config_is_read_wherever_it_is(tmp_path):
    """In the hub's cache every file is a link."""
    (tmp_path / "blob").write_text('{"head_dim": 8, "rope_theta": 5e5}')
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").symlink_to("../blob")
    assert RoPE.from_config(tmp_path / "folder").base == 5e5
