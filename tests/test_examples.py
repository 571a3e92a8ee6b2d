import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed.run

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
# What each must have said: the claim it makes, as a number small enough to be rounding.
CLAIMS = {
    "alibi_attention": ["off from the bias matrix by", "as in decoding: off by"],
    "context_parallel": ["losses of four processes are those of one to"],
    "decode_with_cache": ["off from reading all at once by", "are those of new positions, to"],
    "drope": ["and back: logits are off by"],
    "packed_sequences": ["text 2,  9 tokens: packed and alone differ by"],
    "rotary_block": ["3000 positions later differs by"],
    "serve": [f"{name} answers that differ from those alone:" for name in ("Llama", "Qwen3")],
    "swap_encodings": ["decoding is off from reading all at once by"],
    "tour": [],
    "train": [],
}
# What its numbers follow from: two prompts begin with the same 19 tokens, and a request of 80, the
# last of which is not read, has a window of 48 and pages of 8.
FACTS = {
    "serve": ["19 tokens of a prompt were shared, 32 were evicted"],
    "swap_encodings": ["all learned: True"],
}


def run(script, *arguments):
    command = [sys.executable, "-W", "error", *map(str, (script, *arguments))]
    return subprocess.run(command, check=True, timeout=300, capture_output=True, text=True).stdout


LONG = ("context_parallel", "drope", "serve")
# Those that read no arguments; test_train.py runs the one of many processes.
SCRIPTS = [path for path in EXAMPLES if path.stem not in ("tour", "train")]


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short(script):
    # Several processes need a model, a loss and a launcher; a server is one to begin with.
    limits = {"context_parallel": 160, "serve": 200, "swap_encodings": 130, "train": 300}
    # A table of encodings is as long as there are encodings.
    text = re.sub(r"(?ms)^ENCODINGS = \{$.*?^\}$", "", script.read_text())
    assert len(text.splitlines()) < limits.get(script.stem, 60)


def assert_claims_hold(script, said):
    for claim in CLAIMS[script.stem]:
        assert float(said.split(f"{claim} ")[1].split()[0]) < 2e-5, said
    for fact in FACTS.get(script.stem, []):
        assert fact in said


@pytest.mark.parametrize(
    "script", [p for p in SCRIPTS if p.stem not in LONG], ids=lambda path: path.stem
)
def test_the_claims_of_an_example_hold(script, capsys):
    """In this process, where warnings are errors too."""
    runpy.run_path(str(script), run_name="__main__")
    assert_claims_hold(script, capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_an_example_runs_on_its_own_and_its_claims_hold(script):
    assert_claims_hold(script, run(script))


@pytest.mark.slow
def test_encodings_are_swapped_in_two_processes():
    script = Path(EXAMPLES[0].parent, "swap_encodings.py")
    launcher = Path(torch.distributed.run.__file__)
    said = run(launcher, "--standalone", "--nproc-per-node", "2", script)
    assert_claims_hold(script, said)


@pytest.mark.slow
def test_the_tour_draws_its_picture(tmp_path):
    picture = tmp_path / "picture.png"
    said = run(Path(EXAMPLES[0].parent, "tour.py"), "-o", str(picture))
    assert str(picture) in said
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_every_example_is_known():
    assert sorted(CLAIMS) == [path.stem for path in EXAMPLES]
