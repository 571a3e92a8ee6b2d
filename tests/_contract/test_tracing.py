import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import posenc
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


def test_under_a_transform_what_is_not_batched_can_be_read():
    one, seen = torch.ones(()), []

    def probe(x):
        seen.append((is_readable(x), is_readable(one), is_readable(torch.ones(()))))
        return x * 2

    torch.func.vmap(probe)(torch.ones(2))
    torch.func.grad(probe)(one)
    torch.func.vmap(torch.func.grad(probe))(torch.ones(2))
    assert seen == [(False, True, True), (True, True, True), (False, True, True)]


def test_positions_are_held_to_the_table_under_transforms():
    rope, x, ids = posenc.RoPE(8, 16), torch.randn(3, 1, 2, 4, 8), torch.tensor([0, 1, 2, 16])
    table = posenc.SinusoidalPE(16, 8)
    for call in (
        lambda a: rope.rotate(a, position_ids=ids),
        lambda a: rope.rotate(a, position_ids=ids - 1 - ids % 2),
        lambda a: table(a[0], position_ids=ids),
        lambda a: posenc.ALiBi(2).attention(a, a, a, query_offset=torch.tensor(1)),
    ):
        with pytest.raises(ValueError, match="must "):
            torch.func.vmap(call)(x)
        with pytest.raises(ValueError, match="must "):
            torch.func.grad(lambda a, call=call: call(a).sum())(x[0])


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
