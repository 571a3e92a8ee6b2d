import torch

from posenc.numerics.spans import document_ends, spans


def brute(ids):
    first, last = [], []
    for i, x in enumerate(ids):
        a = b = i
        while a > 0 and ids[a - 1] == x:
            a -= 1
        while b + 1 < len(ids) and ids[b + 1] == x:
            b += 1
        first.append(a)
        last.append(b)
    return first, last


def test_a_document_ends_where_the_id_changes():
    """The same id in two places is two documents: packing does not join them."""
    for ids in ([0], [3, 3, 3], [0, 1, 1, 0, 0, 2], [-1, -1, 0, -1]):
        first, last = document_ends(torch.tensor(ids))
        assert (first.tolist(), last.tolist()) == brute(ids)


def test_a_query_sees_up_to_itself_or_everything():
    seen = spans(2, 5, causal=True, offset=3)
    assert [x.tolist() for x in seen] == [[[3, 4]], [[0, 0]], [[3, 4]]]
    assert spans(2, 5, causal=False, offset=3).last.tolist() == [[4, 4]]


def test_each_sequence_may_have_another_offset():
    seen = spans(2, 6, causal=True, offset=torch.tensor([0, 4]))
    assert seen.last.tolist() == [[0, 1], [4, 5]]


def test_a_query_sees_only_its_document():
    ends = document_ends(torch.tensor([[0, 0, 1, 1], [0, 0, 0, 0]]))
    seen = spans(2, 4, causal=False, offset=2, ends=ends)
    assert seen.first.tolist() == [[2, 2], [0, 0]]
    assert seen.last.tolist() == [[3, 3], [3, 3]]
