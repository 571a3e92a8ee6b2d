"""What the tests of biased attention share."""

import pytest

from posenc.interop.huggingface import biased


@pytest.fixture
def calls(monkeypatch):
    """The biases of the calls of our attention."""
    seen = []

    def spy(q, k, v, bias, **others):
        seen.append(bias)
        return ours(q, k, v, bias, **others)

    ours = biased.biased_attention
    monkeypatch.setattr(biased, "biased_attention", spy)
    return seen
