import re

import torch

from posenc.lab.comparison import text


def test_pythons_help_has_no_paragraph_twice():
    """Topics quote each other: a held-out paragraph that was trained on would be no test."""
    found = text.load()
    whole = torch.cat([found.train, found.held]).tolist()
    distinct = sorted(set(text._topics()))
    assert found.symbols == len(distinct)
    spelled = bytes(distinct[i] for i in whole)
    paragraphs = re.split(rb"\n{2,}", spelled)
    assert len(paragraphs) > 1000
    assert len(paragraphs) == len(set(paragraphs))


def test_a_file_is_split_in_order_and_known_by_its_bytes(tmp_path):
    file = tmp_path / "poem.txt"
    file.write_bytes(bytes([7, 200, 7, 9, 9, 9, 9, 9, 9, 7]))
    found = text.load(file)
    assert found.name == "poem.txt"
    assert found.train.tolist() == [0, 2, 0, 1, 1, 1, 1, 1, 1]
    assert found.held.tolist() == [0]
    assert found.symbols == 3
    file.write_bytes(bytes([7, 200, 7, 9, 9, 9, 9, 9, 9, 8]))
    assert text.load(file).sha256 != found.sha256


def test_an_empty_file_is_text_too(tmp_path):
    file = tmp_path / "empty"
    file.touch()
    assert len(text.load(file).held) == 0
