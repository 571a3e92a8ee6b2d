import hashlib

import pytest
import torch

from posenc.lab.comparison.plan import Plan
from posenc.lab.comparison.tasks import IGNORED, TASKS, Reading
from posenc.lab.comparison.text import SIZE, Text, load, tales

LENGTHS = [8, 9, 16, 30, 64]
PLAN = Plan(train_length=16, steps=6, batch=40, windows=40)


def game(task, plan=PLAN):
    return TASKS[task].load(plan)


def strings(data, batch):
    """Letters of each sequence up to the first question, which has all places but the last."""
    for tokens, targets in zip(*(part.tolist() for part in batch), strict=True):
        first = min(i for i, each in enumerate(targets) if each != IGNORED)
        letters = [i for i, each in enumerate(tokens[: first + 1]) if each < data.letters]
        begin = letters[0]
        yield tokens, targets, begin, tokens[begin : begin + data.size]


def test_the_data_order_of_a_text_is_a_function_of_the_seed_and_stays_in_it():
    text = torch.arange(50)
    data, plan = Reading(Text("", text, text, 50, "")), Plan(steps=200, batch=4, train_length=8)

    def order(seed):
        return torch.stack([batch.tokens for batch in data.training(plan, seed)])

    found = order(5)
    assert found.shape == (200, 4, 8)
    assert torch.equal(found, order(5))
    assert not torch.equal(found, order(6))
    assert found.min() == 0
    # The last sequence has 8 symbols and the one after them.
    assert found.max() == 50 - 2
    for batch in data.training(plan, 5):
        assert torch.equal(batch.targets, batch.tokens + 1)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_copy_asks_for_the_whole_string_after_its_sign(length):
    plan = Plan(train_length=length, steps=2, batch=40)
    data = game("copy", plan)
    for batch in data.training(plan, 0):
        assert batch.tokens.shape == batch.targets.shape == (40, length)
        assert batch.tokens.max() < data.symbols
        for tokens, targets, _, string in strings(data, batch):
            assert len(set(string)) == data.size == min(8, length // 4)
            assert targets == [IGNORED] * (length - data.size) + string
            assert tokens[-data.size] > data.blank
            assert tokens[-data.size + 1 :] == string[:-1] or data.size == 1


@pytest.mark.parametrize("length", LENGTHS)
def test_an_index_asks_for_the_neighbours_of_a_letter(length):
    """What is asked is worked out here from the string, the sign and the last letter alone."""
    plan, seen = Plan(train_length=length, steps=2, batch=40), set()
    data = game("index", plan)
    for batch in data.training(plan, 0):
        for tokens, targets, _, string in strings(data, batch):
            sign = None
            for at, (token, answer) in enumerate(zip(tokens, targets, strict=True)):
                sign = token if token > data.blank else sign
                if answer != IGNORED:
                    shift = {data.blank + 1: 1, data.blank + 2: -1}[sign]
                    seen.add(shift)
                    assert answer == string[string.index(token) + shift]
                    assert at == length - 1 or tokens[at + 1] == answer
            assert sum(each != IGNORED for each in targets) == data.size // 2 * 2
    assert seen == {-1, 1}


@pytest.mark.parametrize("task", ["copy", "index"])
def test_longer_tests_have_the_same_strings_and_questions_farther_apart(task):
    data = game(task)
    short, *longer = (data.testing(PLAN, length) for length in PLAN.lengths)
    assert {begin for *_, begin, _ in strings(data, short)} == {0}
    for length, batch in zip(PLAN.lengths[1:], longer, strict=True):
        assert batch.tokens.shape == (40, length)
        assert torch.equal(batch.tokens[:, : data.size], short.tokens[:, : data.size])
        assert torch.equal(batch.targets[:, -8:], short.targets[:, -8:])
        assert (batch.targets[:, :-8] == IGNORED).all()
        between = batch.tokens[:, data.size : -8]
        assert (between == data.blank).all()


@pytest.mark.parametrize("task", ["copy", "index"])
def test_a_game_is_a_function_of_the_seed_and_its_strings_begin_anywhere(task):
    data = game(task)

    def drawn(seed):
        return torch.cat([batch.tokens for batch in data.training(PLAN, seed)])

    assert torch.equal(drawn(3), drawn(3))
    assert not torch.equal(drawn(3), drawn(4))
    begins = {b for batch in data.training(PLAN, 3) for _, _, b, _ in strings(data, batch)}
    question = 1 + 4 if task == "copy" else 8
    assert begins == set(range(16 + 1 - question - 4 + 1))


def test_the_built_in_text_is_these_bytes_everywhere():
    """The digest is the definition of the text: losses can be compared because it never changes.

    Whoever changes the grammar changes the text, and every number and picture made with it.
    """
    assert hashlib.sha256(tales()).hexdigest() == (
        "7533b50a2023b77f0836c4bcf6d6bafdb2e37d169d1943cd9c8fb38caff06b87"
    )
    assert load().sha256 == hashlib.sha256(tales()).hexdigest()


def test_a_file_is_split_in_order_and_known_by_its_bytes(tmp_path):
    file = tmp_path / "poem.txt"
    file.write_bytes(bytes([7, 200, 7, 9, 9, 9, 9, 9, 9, 7]))
    found = load(file)
    assert found.name == "poem.txt"
    assert found.train.tolist() == [0, 2, 0, 1, 1, 1, 1, 1, 1]
    assert found.held.tolist() == [0]
    assert found.symbols == 3
    file.write_bytes(bytes([7, 200, 7, 9, 9, 9, 9, 9, 9, 8]))
    assert load(file).sha256 != found.sha256


def test_a_longer_text_goes_on_where_the_built_in_one_ends():
    assert tales(SIZE + 999)[:SIZE] == tales(SIZE)
    assert len(tales(SIZE + 999)) == SIZE + 999
