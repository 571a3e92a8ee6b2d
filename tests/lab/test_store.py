import os

import pytest

from posenc.lab import store


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path):
    path = tmp_path / "new" / "numbers.json"
    store.write(path, b"first")
    store.write(path, b"second")
    assert path.read_bytes() == b"second"
    assert os.listdir(path.parent) == ["numbers.json"]


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file_whole(tmp_path, monkeypatch, broken):
    """A full disk, an interrupt: whatever ends a write, the last whole result stays."""
    path = tmp_path / "numbers.json"
    store.write(path, b"whole")

    def fail(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, broken, fail)
    with pytest.raises(KeyboardInterrupt):
        store.write(path, b"half")
    assert path.read_bytes() == b"whole"
    assert os.listdir(tmp_path) == ["numbers.json"]


@pytest.mark.parametrize("name", ["numbers.json", ".numbers.json.partial"])
def test_a_link_is_replaced_and_what_it_leads_to_stays(tmp_path, name):
    outside = tmp_path / "outside"
    outside.write_bytes(b"not ours")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / name).symlink_to(outside)
    store.write(folder / "numbers.json", b"ours")
    assert outside.read_bytes() == b"not ours"
    assert (folder / "numbers.json").read_bytes() == b"ours"
    assert [path.is_symlink() for path in folder.iterdir()] == [False]
