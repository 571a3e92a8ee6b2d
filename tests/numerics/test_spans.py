import torch

from posenc.numerics.spans import document_ends


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
