import pytest

from posenc.attention import chunked


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    """So that short sequences are cut, too."""
    monkeypatch.setattr(chunked, "SCORES", 2**12)
    monkeypatch.setattr(chunked, "DENSE_SCORES", 2**12)
    monkeypatch.setattr(chunked, "CHUNK", 32)
