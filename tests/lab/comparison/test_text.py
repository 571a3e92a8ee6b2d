import hashlib
import re
from collections import Counter

from posenc.lab.comparison import text
from posenc.lab.comparison.text import tales


def test_the_built_in_text_is_these_bytes_everywhere():
    """The digest is the definition of the text: losses can be compared because it never changes.

    Whoever changes the grammar changes the text, and every number and picture made with it.
    """
    assert hashlib.sha256(tales()).hexdigest() == (
        "7533b50a2023b77f0836c4bcf6d6bafdb2e37d169d1943cd9c8fb38caff06b87"
    )
    assert text.load().sha256 == hashlib.sha256(tales()).hexdigest()


def test_no_paragraph_of_the_built_in_text_comes_twice():
    """A held-out paragraph that was trained on would be no test."""
    paragraphs = re.split(rb"\n+", tales())
    assert len(paragraphs) > 1000
    assert len(paragraphs) == len(set(paragraphs))


def test_names_of_a_tale_come_back_within_it_and_in_few_others():
    """So only what stands before can tell them, and a longer context helps."""
    told = tales().decode().split("\n\n")[1:-1]
    people = [re.search(r"remembers (\w+), (\w+) and (\w+)\.$", tale) for tale in told]
    named = [(tale, found.groups()) for tale, found in zip(told, people, strict=True) if found]
    assert len(named) > 50
    tales_with = Counter(word for tale in told for word in set(re.findall(r"\w+", tale)))
    for tale, names in named:
        for name in names:
            assert tale.count(name) >= 2
            assert tales_with[name] < 20


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


def test_a_longer_text_goes_on_where_the_built_in_one_ends():
    assert tales(text.SIZE + 999)[: text.SIZE] == tales(text.SIZE)
    assert len(tales(text.SIZE + 999)) == text.SIZE + 999
