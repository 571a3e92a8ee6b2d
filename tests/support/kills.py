"""A conversion that is stopped before each step that it takes on the disk, one after the other.

As a script, with the name of an empty folder: prints the steps and what went wrong as JSON. Python
announces each step to an audit hook, so no step can be forgotten here, and one that the hook does
not let pass fails as it would on the disk. A kill is a real one, of a forked child.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from posenc.interop.checkpoints import convert

WRITES = {
    "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "os.link", "os.symlink",
    "os.truncate",
}  # fmt: skip
READS = {"open", "os.listdir", "os.scandir", "shutil.rmtree"}
SIZES = {"num_heads": 1, "head_dim": 8, "check": 0}
Snapshot = dict[str, bytes]


def fail(number: int) -> None:
    raise OSError(number, os.strerror(number))


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt() -> None:
    """What Ctrl-C does, and in the command SIGTERM too: the handler raises KeyboardInterrupt."""
    signal.raise_signal(signal.SIGINT)


# What happens at a step, given how many steps after the chosen one it is, and which.
WAYS: dict[str, Callable[[int, str], None]] = {
    "interrupted": lambda late, event: interrupt() if late == 0 else None,
    "interrupted twice": lambda late, event: interrupt() if late in (0, 1) else None,
    "an error": lambda late, event: fail(errno.EIO) if late == 0 else None,
    "a disk that dies": lambda late, event: fail(errno.EIO),
    "renames that fail": lambda late, event: fail(errno.EIO) if event == "os.rename" else None,
}


def snapshot(path: Path) -> Snapshot | None:
    """Every file at or under ``path``."""
    if path.is_file():
        return {"": path.read_bytes()}
    found = [each for each in path.rglob("*") if each.is_file()]
    return {str(each.relative_to(path)): each.read_bytes() for each in found} or None


class Watch:
    """The audit hook. One cannot be taken out again, so this one can be told to look away."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.root = self.way = None
        sys.addaudithook(self.hook)

    def start(self, root: Path, way: Callable[[int, str], None], at: int) -> None:
        self.steps, self.root, self.way, self.at = [], str(root), way, at

    def stop(self) -> list[str]:
        self.root = None
        return self.steps

    def hook(self, event: str, args: tuple[object, ...]) -> None:
        if self.root is None or event not in WRITES | READS:
            return
        if event == "open":
            if not str(args[0]).startswith(self.root):
                return
            event = "write" if args[2] & (os.O_WRONLY | os.O_RDWR) else "read"
        self.steps.append(event)
        if len(self.steps) >= self.at:
            self.way(len(self.steps) - self.at, event)


watch = Watch()


class Case:
    """A source, a target, and what may stand there."""

    def __init__(self, root: Path, kind: str) -> None:
        self.root, self.source, self.target = root, root / "source", root / "target"
        self.room = root / "target.posenc-convert"
        root.mkdir()
        tensors = {f"layers.0.{part}_proj.weight": torch.randn(8, 3) for part in "qk"}
        self.old: Snapshot | None = {"mine.safetensors": b"old", "sub/note.txt": b"old"}
        if kind == "a file":
            save_file(tensors, self.source)
            self.old = {"": b"old"}
        else:
            (self.source / "tokenizer").mkdir(parents=True)
            save_file(tensors, self.source / "model.safetensors")
            (self.source / "tokenizer" / "vocab.txt").write_text("a b")
            config = {"model_type": "llama", "hidden_size": 8}
            (self.source / "config.json").write_text(json.dumps(config))
        if kind == "nothing":
            self.old = None
        self.before = snapshot(self.source)
        self.overwrite = self.old is not None
        self.convert()
        self.new = snapshot(self.target)

    def convert(self, overwrite: bool = True) -> None:
        convert(self.source, self.target, to="interleaved", overwrite=overwrite, **SIZES)

    def reset(self) -> None:
        for path in (self.target, self.room):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        for name, content in (self.old or {}).items():
            path = self.target / name if name else self.target
            path.parent.mkdir(exist_ok=True, parents=True)
            path.write_bytes(content)

    def attempt(self, way: Callable[[int, str], None], at: int) -> list[str]:
        """The steps of a run that meets ``way`` from step ``at`` on."""
        self.reset()
        watch.start(self.root, way, at)
        with contextlib.suppress(OSError, ValueError, KeyboardInterrupt):
            self.convert(self.overwrite)
        return watch.stop()

    def killed(self, at: int) -> int:
        """The signal that ended a child before step ``at``, as a negative number."""
        pid = os.fork()
        if pid == 0:
            signal.alarm(60)
            try:
                self.attempt(lambda late, event: kill() if late == 0 else None, at)
            finally:
                os._exit(1)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def judge(self, overwrite: bool, clean: bool) -> list[str]:
        """What is wrong after a run was stopped, and after the way out of the next one's error."""
        wrong = []
        stands, kept = snapshot(self.target), snapshot(self.room / "old")
        if stands not in (None, self.old, self.new):
            wrong.append("the target is not whole")
        if self.old and stands is None and kept != self.old:
            wrong.append("no whole copy is left")
        if snapshot(self.source) != self.before:
            wrong.append("the source has changed")
        if clean and self.room.exists():
            wrong.append("the workspace is left behind")
        if self.room.exists():
            wrong += self.follow_the_way_out(overwrite)
        try:
            self.convert(overwrite)
        except FileExistsError as refused:
            if overwrite or "target must be new" not in str(refused):
                wrong.append(f"the next run says {refused}")
        wanted = [self.new] if overwrite else [self.old, self.new]
        if snapshot(self.target) not in wanted or self.left() != ["source", "target"]:
            wrong.append(f"after the next run there is {self.left()}")
        return wrong

    def follow_the_way_out(self, overwrite: bool) -> list[str]:
        """Do what the error of the next run says, which must leave a whole target or none."""
        try:
            self.convert(overwrite)
        except FileExistsError as refused:
            said = str(refused)
        else:
            return ["the next run shares the workspace"]
        if f"move {self.room / 'old'}, the complete former checkpoint, to {self.target}" in said:
            os.rename(self.room / "old", self.target)
        if f"delete {self.room} and run again" not in said:
            return [f"the next run says {said}"]
        shutil.rmtree(self.room)
        found = snapshot(self.target)
        return [] if found in (self.old, self.new) else ["the way out loses the checkpoint"]

    def left(self) -> list[str]:
        return sorted(os.listdir(self.root))


def main(root: Path) -> None:
    torch.set_num_threads(1)
    # Power stays on here, and a disk takes its time.
    os.fsync = lambda handle: None
    all_steps, failures = {}, []

    def judge(case: Case, what: str, overwrite: bool, clean: bool = False) -> None:
        try:
            wrong = case.judge(overwrite, clean)
        except Exception as error:
            wrong = [f"a later run ends in {error!r}"]
        failures.extend(f"{what}: {each}" for each in wrong)

    for kind in ("a folder", "a file", "nothing"):
        case = Case(root / kind.replace(" ", "-"), kind)
        steps = all_steps[kind] = case.attempt(lambda late, event: None, 1)
        last = len(steps) - steps[::-1].index("os.rename")
        for at, event in enumerate(steps, 1):
            what = f"{kind}, step {at} ({event})"
            # What only reads leaves the disk as the next step finds it.
            if event in WRITES or event == "write":
                case.reset()
                status = case.killed(at)
                assert status == -signal.SIGKILL, f"{what} ended with {status}"
                judge(case, f"{what}, killed", overwrite=at % 2 == 0)
            for number, (name, way) in enumerate(WAYS.items()):
                if kind == "a folder" or name == "interrupted":
                    case.attempt(way, at)
                    # After the last rename, what an error stops is the removal itself.
                    clean = "interrupted" in name or (name == "an error" and at <= last)
                    judge(case, f"{what}, {name}", at % 2 == number % 2, clean)
    print(json.dumps({"steps": all_steps, "failures": failures}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
