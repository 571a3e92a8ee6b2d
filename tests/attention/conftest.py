import pytest

from posenc.attention import chunked


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    """So that short sequences are cut and pruned, too."""
    for name, size in (("SCORES", 2**12), ("DENSE_SCORES", 2**12), ("CHUNK", 32)):
        monkeypatch.setattr(chunked, name, size)
