import ast
import re
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import posenc
from posenc._contract import tracing
from posenc._contract.tracing import is_exporting, is_plain, is_readable

SOURCE = Path(posenc.__file__).parent


def test_an_unbatched_tensor_can_be_read_under_a_transform():
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


def _private_names(source):
    """Private names of torch that a file imports, reads or sets, each once."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.split(".")[0] == "torch"
        ):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name for name in names if "._" in name}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("torch._")}
        elif isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            of_torch = name.startswith(("torch.", "forward_ad.")) and "._" in name.replace(
                ".__", "."
            )
            if of_torch or node.attr in ("_base", "_version", "_op") or "_dynamo" in node.attr:
                found.add(name if of_torch else node.attr)
    # Of a chain such as torch._C._functorch.get the longest name counts.
    return {name for name in found if not any(other.startswith(name + ".") for other in found)}


def test_private_names_of_torch_are_in_one_file():
    for path in SOURCE.rglob("*.py"):
        names = _private_names(path.read_text())
        if path.name == "tracing.py":
            assert 1 <= len(names) <= 18, names
        else:
            assert not names, f"{path} uses {names}: give _contract/tracing.py a function for it"


def test_what_torch_calls_experimental_is_in_two_files():
    """ARCHITECTURE.md names both: they may need a change with a new torch."""
    using = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if re.search(r"(from|import) torch[\w.]*\.experimental", path.read_text())
    }
    assert using == {"interop/distributed.py", "interop/onnx.py"}


def test_private_names_of_modules_exist():
    """The library sets or reads these of nn.Module."""
    overridden = "_apply", "_replicate_for_data_parallel"
    weights = "_parameters", "_buffers", "_modules"
    hooks = "_forward_hooks", "_backward_hooks", "_backward_pre_hooks"
    assert all(hasattr(torch.nn.Linear(1, 1), name) for name in (*overridden, *weights, *hooks))


def test_every_private_name_has_a_canary():
    """So that a torch that drops one fails in a test with its name."""
    names = {
        name.split(".")[-1]
        for name in _private_names((SOURCE / "_contract/tracing.py").read_text())
    }
    assert names == CANARIES.keys()


def _is_batched_by_autograd():
    seen = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, g):
            seen.append((is_plain(g), is_readable(g)))
            return g

    x = torch.ones(2, requires_grad=True)
    torch.autograd.grad(Probe.apply(x), x, torch.eye(2), is_grads_batched=True)
    return seen == [(False, False)]


def _asserts_on_the_device():
    tracing.device_assert(torch.tensor(True), "is true")
    with pytest.raises(RuntimeError, match="is false"):
        tracing.device_assert(torch.tensor(False), "is false")
    return True


def _is_constant_under_compile():
    @tracing.constant_under_compile
    def number():
        return len(str(object()))  # not to be traced

    return torch.compile(lambda x: x + number(), backend="eager", fullgraph=True)(torch.ones(1)) > 1


def _keeps_sizes_static():
    graphs = []

    def backend(graph, inputs):
        graphs.append(inputs)
        return graph.forward

    compiled = torch.compile(lambda x: x + 1, backend=backend)
    for length in (3, 4):
        compiled(tracing.fix_sizes(torch.ones(length)))
    return [tuple(x.shape) for (x,) in graphs] == [(3,), (4,)]


def _is_in_forward_mode():
    with forward_ad.dual_level():
        return tracing.in_forward_mode()


def _is_in_func():
    seen = []
    torch.func.vmap(lambda x: (seen.append((tracing.in_func(), tracing.in_transform())), x)[1])(
        torch.ones(2)
    )
    return seen == [(True, True)] and not tracing.in_func()


def _knows_modes():
    with FakeTensorMode():
        inside = is_plain()
    return is_plain() and not inside


def _reads_under_a_mode():
    with FakeTensorMode():
        fake = torch.ones(2)
        with tracing.without_modes():
            return type(torch.ones(2)) is torch.Tensor and type(fake) is not torch.Tensor


def _attends_with_strided_masks():
    """Heads share keys, the mask overlaps itself, and a query that sees no key gets zeros."""
    q = torch.randn(2, 4, 5, 16, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn_like(q[:, :2]).detach().requires_grad_() for _ in range(2))
    line = torch.tensor([0.3, -1.0, 2.0, 0.5, *[-torch.inf] * 5], dtype=torch.float64)
    mask = line.as_strided((1, 1, 5, 5), (0, 0, 1, 1))
    scores = q @ k.repeat_interleave(2, 1).mT * 0.25 + mask
    weights = torch.cat((scores[:, :, :4].softmax(-1), torch.zeros_like(scores[:, :, 4:])), 2)
    exact, g = weights @ v.repeat_interleave(2, 1), torch.randn_like(q)
    wanted = exact, scores.logsumexp(-1).where(torch.arange(5) < 4, 0)
    with torch.no_grad():
        got = tracing.cpu_flash_attention(q, k, v, mask, 0.25)
        gradients = tracing.cpu_flash_gradients(g, q, k, v, *got, mask, 0.25)
    wanted += torch.autograd.grad(exact, (q, k, v), g)
    return all(map(torch.allclose, (*got, *gradients), wanted))


def _knows_what_outlived_a_transform():
    kept = []
    torch.func.vmap(lambda x: (kept.append(x), x)[1])(torch.ones(2))
    wrapped = tracing._is_of_func
    return wrapped(kept[0]) and not wrapped(torch.ones(2))


CANARIES = {
    "_len_torch_dispatch_stack": _knows_modes,
    "peek_interpreter_stack": _is_in_func,
    "is_legacy_batchedtensor": _is_batched_by_autograd,
    "is_functorch_wrapped_tensor": _knows_what_outlived_a_transform,
    "_current_level": _is_in_forward_mode,
    "_assert_async": _asserts_on_the_device,
    "_dynamo_marked_constant": _is_constant_under_compile,
    "_dynamo_static_indices": _keeps_sizes_static,
    "_is_exporting_flag": lambda: tracing.is_exporting() is False,
    "_disable_current_modes": _reads_under_a_mode,
    "_is_mkldnn_bf16_supported": lambda: tracing.has_native_bf16() in (True, False),
    "_scaled_dot_product_flash_attention_for_cpu": _attends_with_strided_masks,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attends_with_strided_masks,
    "_op": lambda: tracing.builtin_of(torch.ops.aten.neg.default)(torch.ones(())).item() == -1,
}


def test_a_function_is_applied_without_steps_of_torch_func():
    """A tensor that has outlived its transform needs them, and no other."""
    x, kept, applied = torch.ones((), requires_grad=True), [], []

    class Twice(torch.autograd.Function):
        @classmethod
        def apply(cls, *arguments):
            applied.append(arguments)
            return super().apply(*arguments)

        @staticmethod
        def forward(ctx, x, factor):
            return x * factor

        @staticmethod
        def backward(ctx, g):
            return g * 2, None

    torch.func.grad(lambda x: (kept.append(x), x)[1])(x)
    apply = tracing.apply_of(Twice, (0,))
    assert torch.autograd.grad(apply(x, 2), x)[0].item() == 2
    assert applied == []
    assert torch.autograd.grad(apply(kept[0], 2), x)[0].item() == 2
    assert len(applied) == 1


@pytest.mark.parametrize("name", CANARIES)
def test_torch_still_has(name):
    assert CANARIES[name](), f"torch's private {name} has gone, or means something else now"
