"""What the tests of biased attention share."""

import pytest

from posenc.interop.huggingface import biased


@pytest.fixture
def calls(monkeypatch):
    """The biases of the calls of our attention."""
    seen = []

    def spy(q, k, v, bias, *others, **named):
        seen.append(bias)
        return ours(q, k, v, bias, *others, **named)

    ours = biased._attend
    monkeypatch.setattr(biased, "_attend", spy)
    return seen
