"""examples/train.py: every mesh has the losses and the parameters of one process."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.run

from support.processes import assert_passed, run
from support.train import MESHES, SMALL, example, trained

SCRIPT = Path(__file__).parents[1] / "examples" / "train.py"


@pytest.fixture
def _one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Has the results of one process, for every encoding."""
    path = tmp_path_factory.mktemp("train")
    assert_passed(run(1, "support.train:one_process", path))
    return path


@pytest.mark.usefixtures("_one_process")
def test_two_processes_train_as_one(tmp_path):
    """With a bias whose learned numbers are of heads, which tensor parallel shards."""
    torch.save(trained("T5Bias"), tmp_path / "T5Bias.pt")
    assert_passed(run(2, "support.train:as_one_process", tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_encoding_on_every_mesh(folder, ranks):
    assert_passed(run(ranks, "support.train:as_one_process", folder, limit=600))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_losses_in_float32(folder, ranks):
    assert_passed(run(ranks, "support.train:in_float32", folder))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_losses_in_bfloat16(folder, ranks):
    assert_passed(run(ranks, "support.train:in_bfloat16", folder))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_compiled_blocks_train_the_same(folder, ranks):
    assert_passed(run(ranks, "support.train:compiled", folder, limit=600))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"), [(1, 1), (4, 1), (1, 4), (4, 2)], ids=lambda ranks: str(ranks)
)
def test_a_run_goes_on_on_any_mesh(folder, before, after):
    assert_passed(run(before, "support.train:stopped", folder))
    assert_passed(run(after, "support.train:resumed", folder))


@pytest.mark.parametrize(
    ("arguments", "ranks", "message"),
    [
        ("--tp 2", 3, "--dp x --tp x --cp must be the number of ranks, 3, got 2"),
        ("--tp 3", 3, "--heads must be a multiple of --tp, 3, got 4"),
        ("--cp 2 --length 34", 2, "--length must be a multiple of 2 x --cp, 4, got 34"),
        ("--batch 3", 2, "--batch must be a multiple of --dp, 2, got 3"),
        ("--encoding CoPE --tp 2", 2, "--tp must be 1 for CoPE"),
        ("--encoding CoPE --cp 2", 2, "--cp must be 1 for CoPE"),
        ("--encoding PoPE --tp 2", 2, "--tp must be 1 for PoPE: it rotates each head by"),
    ],
)
def test_what_a_mesh_cannot_do_is_refused(arguments, ranks, message, capsys):
    with pytest.raises(SystemExit):
        example.parse(arguments.split(), ranks)
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("_one_process")
def test_a_text_shorter_than_a_sequence_is_refused(tmp_path):
    text = tmp_path / "text"
    text.write_bytes(b"0123456789abcdef")
    with pytest.raises(SystemExit, match=r"--text must have more than --length bytes, 16, got 16"):
        trained("RoPE", f"--text {text}")


def test_the_ranks_that_are_left_share_the_batch():
    assert example.parse(["--tp", "2"], 8).dp == 4


@pytest.mark.slow
def test_the_command_prints_the_losses_of_one_process_and_goes_on(tmp_path):
    def losses(launcher, *more):
        command = [sys.executable, *map(str, launcher), str(SCRIPT), *SMALL.split()]
        command += ["--every", "1", *map(str, more)]
        said = subprocess.run(command, check=True, timeout=240, capture_output=True, text=True)
        return [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", said.stdout)]

    torchrun = [torch.distributed.run.__file__, "--standalone", "--nproc-per-node", 4]
    unbroken = losses([])
    first = losses(torchrun, *MESHES[4][0].split(), "--steps", 3, "--checkpoint", tmp_path)
    second = losses(torchrun, *MESHES[4][2].split(), "--checkpoint", tmp_path)
    assert len(unbroken) == 6
    assert first + second == pytest.approx(unbroken, rel=1e-5)
