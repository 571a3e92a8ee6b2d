import torch

from posenc.lab.comparison.memory import peak_bytes


def test_what_is_let_go_is_not_counted_twice():
    def chain():
        x = torch.zeros(1000)
        for _ in range(10):
            x = x + 1
        return x

    assert peak_bytes(chain) == 2 * 4000


def test_views_and_what_the_caller_brought_are_free():
    x = torch.zeros(1000)

    def look():
        x.add_(1)
        return x.view(10, 100).t()[2:]

    assert peak_bytes(look) == 0


def test_what_backward_needs_is_counted():
    """The first product is kept until the backward has used it: that is what training holds."""
    w = torch.randn(100, requires_grad=True)

    def forward():
        with torch.no_grad():
            return w.exp().exp().exp().sum()

    def training():
        w.exp().exp().exp().sum().backward()
        w.grad = None

    assert peak_bytes(forward) <= 2 * 400 + 8
    assert peak_bytes(training) >= 3 * 400
