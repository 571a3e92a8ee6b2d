import pytest


@pytest.fixture(autouse=True)
def briefly(monkeypatch):
    """Times matter to no test."""
    monkeypatch.setattr("posenc.lab.comparison.training.REPEATS", 1)
