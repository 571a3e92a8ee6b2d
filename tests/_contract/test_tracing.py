import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from posenc._contract.tracing import is_exporting, is_plain, is_readable


def test_an_ordinary_tensor_is_plain():
    assert is_plain(torch.ones(2))
    assert is_readable(torch.nn.Parameter(torch.ones(2)))


def test_a_fake_tensor_is_not_plain():
    with FakeTensorMode() as mode:
        assert not is_plain(torch.ones(2))
    assert not is_plain(mode.from_tensor(torch.ones(2)))


def test_a_batched_tensor_is_not_plain():
    seen = []
    torch.func.vmap(lambda x: (seen.append(is_plain(x)), x)[1])(torch.ones(2))
    assert seen == [False]


def test_a_compiled_call_is_not_plain():
    def probe(x):
        return x + 1 if is_plain(x) else x - 1

    assert torch.compile(probe, backend="eager", fullgraph=True)(torch.zeros(1)).item() == -1


def test_a_compiled_call_is_no_export():
    class Probe(torch.nn.Module):
        def forward(self, x):
            return x + 1 if is_exporting() else x - 1

    x = torch.zeros(1)
    assert torch.compile(Probe(), backend="eager", fullgraph=True)(x).item() == -1
    for strict in (False, True):
        assert torch.export.export(Probe(), (x,), strict=strict).module()(x).item() == 1
    assert torch.compile(Probe(), backend="eager", fullgraph=True)(x).item() == -1


def test_meta_values_cannot_be_read():
    assert not is_readable(torch.ones(2, device="meta"))
