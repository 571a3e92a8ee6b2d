"""Every error of a JSON file is a ValueError that names the file."""

import json

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
