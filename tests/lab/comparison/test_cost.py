import pytest
import torch

from posenc.lab.comparison.cost import peak_bytes

# Python numbers in an expression become tensors of a few bytes.
NUMBERS = 100


def test_what_is_let_go_is_not_counted_twice():
    def chain():
        x = torch.zeros(1000)
        for _ in range(10):
            x = x + 1
        return x

    assert peak_bytes(chain) == pytest.approx(2 * 4000, abs=NUMBERS)


def test_views_and_what_the_caller_brought_are_free():
    x = torch.zeros(1000)

    def look():
        x.add_(1)
        return x.view(10, 100).t()[2:]

    assert peak_bytes(look) <= NUMBERS


def test_what_backward_needs_is_counted():
    """The first product is kept until the backward has used it: that is what training holds."""
    w = torch.randn(1000, requires_grad=True)

    def forward():
        with torch.no_grad():
            return w.exp().exp().exp().sum()

    def training():
        w.exp().exp().exp().sum().backward()
        w.grad = None

    assert peak_bytes(forward) == pytest.approx(2 * 4000, abs=NUMBERS)
    assert peak_bytes(training) >= 3 * 4000


def test_what_an_operation_needs_inside_itself_is_counted():
    """A matrix of scores that is gone when attention returns was memory all the same."""
    q = torch.randn(1, 1, 256, 8)
    mask = torch.zeros(256, 256)

    def attend():
        scores = torch.ops.aten._scaled_dot_product_attention_math(q, q, q, mask)[0]
        return scores.shape

    assert peak_bytes(attend) >= 256 * 256 * 4


def test_nothing_is_written_while_it_watches(capfd):
    peak_bytes(lambda: torch.zeros(10))
    assert capfd.readouterr() == ("", "")
