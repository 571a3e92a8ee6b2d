"""torch.export and AOTInductor: programs that need neither this package nor its length."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.export import Dim

import posenc
from posenc.ops.rotation.rotation import exported_as
from support.models import Model, Rotations, dynamic_rotations, rotations_at

# Those whose tables depend on the length.
FEW = ("interleaved", "growing", "dynamic", "longrope")


@pytest.mark.parametrize(
    "kinds", [FEW, pytest.param((), marks=pytest.mark.slow)], ids=["few", "all"]
)
def test_every_rotation_exports_with_any_batch_and_length(kinds):
    model = Rotations(*kinds)
    exported = torch.export.export(model, rotations_at(2, 6), dynamic_shapes=dynamic_rotations())
    called = {n.target for n in exported.graph.nodes if isinstance(n.target, torch._ops.OpOverload)}
    assert {target.namespace for target in called} == {"aten"}
    program = exported.module()
    for batch, length in ((3, 41), (1, 9)):
        arguments = rotations_at(batch, length)
        wanted, got = model(*arguments), program(*arguments)
        for name in wanted:
            # Exported, the rotation is torch's own operations; here it is the kernel.
            torch.testing.assert_close(got[name], wanted[name], rtol=1e-6, atol=1e-6, msg=name)


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_another_thread_may_export_to_another_format(strict):
    """ONNX has an operator for the rotation, which a program of torch.export has not."""
    rope, (q, k) = posenc.RoPE(8, 16), torch.randn(2, 1, 2, 6, 8)

    def operations():
        nodes = torch.export.export(rope, (q, k), strict=strict).graph.nodes
        return {n.target for n in nodes if isinstance(n.target, torch._ops.OpOverload)}

    def other(x, cos, sin, rows, spec):
        return x.asinh()

    with ThreadPoolExecutor(1) as thread:
        with exported_as(other):
            meanwhile, here = thread.submit(operations).result(), operations()
        assert torch.ops.aten.asinh.default in here
        assert torch.ops.aten.asinh.default not in meanwhile | operations()


def exported(model):
    shapes = ({0: Dim("batch", max=64), 1: Dim("length", max=48)},)
    return torch.export.export(model, (torch.randint(0, 11, (2, 6)),), dynamic_shapes=shapes)


@pytest.mark.slow
def test_an_exported_model_runs_without_this_package(tmp_path):
    """An exported program is deployed where nobody has installed what made it."""
    model, ids = Model().eval(), torch.randint(0, 11, (3, 41))
    torch.export.save(exported(model), tmp_path / "model.pt2")
    torch.save((ids, model(ids)), tmp_path / "case.pt")
    script = f"""
import sys, torch
sys.modules["posenc"] = None
program = torch.export.load("{tmp_path}/model.pt2").module()
ids, wanted = torch.load("{tmp_path}/case.pt")
torch.testing.assert_close(program(ids), wanted)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
def test_aotinductor_builds_a_library_that_gives_the_eager_result(tmp_path):
    model = Model().eval()
    path = torch._inductor.aoti_compile_and_package(
        exported(model), package_path=str(tmp_path / "model.pt2")
    )
    run = torch._inductor.aoti_load_package(path)
    for batch, length in ((3, 41), (1, 48)):
        x = torch.randint(0, 11, (batch, length))
        torch.testing.assert_close(run(x), model(x), rtol=1e-6, atol=1e-6)
