"""The rotation as PyTorch ops."""

import pytest
import torch
from torch.autograd import gradcheck

from oracles import tables
from posenc.kernels import ops, reference
from posenc.kernels.spec import Rows, Turn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
GPU = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("rows", [Rows(1), Rows(0, torch.tensor([[3, 1, 3], [0, 0, 3]]))], ids=str)
@pytest.mark.parametrize("batched", [False, True])
def test_ops_have_gradients_to_their_tables(rows, batched):
    turn = Turn(True, False, 2)
    q = torch.randn(2, 2, 3, 8, dtype=torch.float64, requires_grad=True)
    cos, sin = (t.requires_grad_() for t in tables(8 if batched else 4, 3))
    if batched:
        cos, sin = cos.unflatten(0, (2, 4)), sin.unflatten(0, (2, 4))

    def turned(q, cos, sin):
        return ops.rotate(q, cos, sin, *ops.flat(rows, turn))

    assert gradcheck(turned, (q, cos, sin))
    got = torch.autograd.grad(turned(q, cos, sin).square().sum(), (cos, sin), retain_graph=True)
    plain = reference.rotate(q, cos, sin, rows, turn)
    wanted = torch.autograd.grad(plain.square().sum(), (cos, sin))
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("count", "in_place"), [(1, False), (2, False), (1, True)], ids=["one", "q-and-k", "in-place"]
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_opcheck(dtype, count, in_place):
    device = GPU
    xs = [torch.randn(2, heads, 4, 8).to(device, DTYPES[dtype]) for heads in (3, 1)[:count]]
    name = ("rotate" if count == 1 else "rotate_qk") + ("_" if in_place else "")
    op = getattr(torch.ops.posenc, name).default
    cos, sin = tables(9, 3, device)
    for rows in (Rows(2), Rows(0, torch.tensor([[0, 1, 2, 8]], device=device))):
        for grad in (False, not in_place):
            inputs = [x.clone().requires_grad_(grad) for x in xs]
            torch.library.opcheck(op, (*inputs, cos, sin, *ops.flat(rows, Turn(False, True, 2))))
