import pytest

from support.attention import cut_into_small_pieces


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    cut_into_small_pieces(monkeypatch)
