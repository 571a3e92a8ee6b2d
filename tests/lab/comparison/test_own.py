import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import posenc.cli
from posenc.lab.comparison import own
from posenc.lab.comparison.plan import Plan
from posenc.lab.comparison.run import RESULTS, Run
from posenc.lab.comparison.training import Decoder

PAGE = Path(__file__).parents[3] / "docs" / "recipes" / "own-encoding.md"
SIZES = {"train_length": 8, "steps": 2, "batch": 2, "width": 16, "layers": 1, "heads": 2}
TINY = "--train-length 8 --steps 2 --batch 2 --width 16 --layers 1 --heads 2 --windows 2".split()


@pytest.fixture
def write(tmp_path):
    """Writes a file, and returns the name of its class Mine."""

    def name_of(text, wanted="Mine"):
        path = tmp_path / "mine.py"
        path.write_text(f"import torch\nfrom torch import nn\n\n\n{text}")
        return f"{path}:{wanted}"

    return name_of


@pytest.fixture
def run(monkeypatch):
    app = posenc.cli.application()
    monkeypatch.setattr("posenc.lab.comparison.training.REPEATS", 1)
    monkeypatch.setattr("posenc.cli.compare._draw", lambda run: {})
    return lambda *words: CliRunner().invoke(app, ["compare", *TINY, "--jobs", "1", *words])


def forward(body, arguments="q, k, v", init=""):
    return f"class Mine(nn.Module):\n{init}    def forward(self, {arguments}):\n        {body}\n"


CAUSAL = "return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)"
PLAIN = forward(CAUSAL)


def test_the_classes_of_the_manual_are_trained_among_the_others(run, tmp_path, monkeypatch):
    """As the page says it: the file in the current folder, and its name."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 2
    (tmp_path / "mine.py").write_text("".join(blocks))
    monkeypatch.chdir(tmp_path)
    assert "--encodings none,rope,alibi,mine.py:SquareRoot" in PAGE.read_text()
    named = "none,rope,mine.py:SquareRoot,mine.py:Slower"
    done = run("--encodings", named, "-o", "out")
    assert done.exit_code == 0, done.output
    rows = {line.split()[0]: line.split() for line in done.stdout.splitlines()}
    assert {"mine.SquareRoot", "mine.Slower"} < rows.keys()
    # Two heads have a slope each.
    assert rows["mine.SquareRoot"][1] == "2"
    found = json.loads(Path("out", RESULTS).read_text())
    assert found["complete"]
    for row in found["summary"]["text"]:
        assert len(row["score"]) == 4


def test_a_class_that_attends_without_an_encoding_is_the_built_in_none(write):
    """The user's module gets the queries, keys and values of the model, and no other."""
    tokens = torch.arange(8)[None] % 5
    plan = Plan(**SIZES)
    own_model, none = (Decoder(name, plan, symbols=5, seed=0) for name in (write(PLAIN), "none"))
    torch.testing.assert_close(own_model(tokens), none(tokens), rtol=0, atol=1e-6)


PAIR, DOUBLED = "return q, k", "return q.repeat(1, 1, 1, 2), k.repeat(1, 1, 1, 2)"


@pytest.mark.parametrize(
    ("arguments", "body", "acts_on"),
    [
        pytest.param("x", "return x", "input", id="added"),
        pytest.param("x, position_ids=None", "return x", "input", id="added-with-a-default"),
        pytest.param("q, k", PAIR, "queries and keys", id="rotates"),
        pytest.param("q, k", "return [q, k]", "queries and keys", id="rotates-to-a-list"),
        pytest.param("q, k=None", PAIR, "queries and keys", id="rotates-without-k-too"),
        pytest.param("a, b, *, offset=0", "return a, b", "queries and keys", id="other-names"),
        pytest.param("q, k", DOUBLED, "queries and keys", id="wider"),
        pytest.param("q, k, v", CAUSAL, "scores", id="attends"),
        pytest.param("q, k, v, scale=None, *more", CAUSAL, "scores", id="attends-with-defaults"),
    ],
)
def test_the_call_says_what_a_class_does(write, arguments, body, acts_on):
    name, plan = write(forward(body, arguments)), Plan(**SIZES)
    own.check(name, plan)
    model = Decoder(name, plan, symbols=5, seed=0)
    assert model.acts_on == acts_on
    assert model(torch.arange(8)[None] % 5).shape == (1, 8, 5)


def test_a_class_is_built_with_the_sizes_that_it_names(write):
    init = (
        "    def __init__(self, num_heads, *, base, max_seq_len=1, head_dim=2, slope=3, **more):\n"
        "        super().__init__()\n"
        "        self.got = num_heads, base, max_seq_len, head_dim, slope, more\n"
    )
    built = own.Own(write(forward(CAUSAL, init=init)), Plan(**SIZES)).module
    assert built.got == (2, 8.0, 64, 8, 3, {})


def built_with(arguments, then="super().__init__()"):
    return forward(CAUSAL, init=f"    def __init__(self, {arguments}):\n        {then}\n")


SEES_ALL = "return nn.functional.scaled_dot_product_attention(q, k, v)"
# A file, and what is said of it.
WRONG = {
    "no-such-class": (
        "class Other(nn.Module): pass",
        "mine.py must have a subclass of torch.nn.Module that is called Mine; it has Other.",
    ),
    "no-module": ("class Mine: pass", "that is called Mine; it has none."),
    "import": ("import no_such", "mine.py:5: ModuleNotFoundError: No module named 'no_such'"),
    "syntax": ("class Mine(:", "mine.py: SyntaxError: "),
    "argument": (
        built_with("slope, num_heads"),
        "mine.Mine: its __init__ is called with those of head_dim, num_heads, embed_dim, "
        "max_seq_len, base that it names; slope is none of them: give it a default.",
    ),
    "positional-only": (built_with("head_dim, /"), "head_dim is none of them"),
    "fails-to-build": (built_with("", "raise KeyError('no')"), "mine.py:7: KeyError: 'no'"),
    "call": (
        forward("return q", "q, k, v, mask"),
        "mine.Mine: its forward must take (x), (q, k) or (q, k, v); got (q, k, v, mask).",
    ),
    "any-call": (forward("return 1", "*q"), "got (*q)."),
    "by-keyword": (forward("return q", "q, *, k"), "got (q, *, k)."),
    "fails-when-called": (forward("return 1 / 0"), "mine.py:7: ZeroDivisionError: division by"),
    "shape": (
        forward("return q[..., :1]"),
        "mine.Mine: m(q, k, v) must return a tensor of shape (1, 2, 8, 8); got a tensor of shape "
        "(1, 2, 8, 1).",
    ),
    "rotates-for-attends": (
        forward(PAIR),
        "m(q, k, v) must return a tensor of shape (1, 2, 8, 8); got a tuple of a tensor of shape",
    ),
    "nothing": (
        forward("return None", "x"),
        "m(x) must return a tensor of shape (1, 8, 16); got NoneType.",
    ),
    "one-of-two": (
        forward("return q", "q, k"),
        "mine.Mine: m(q, k) must return q and k, both of shape (1, 2, 8, 8) or of another width "
        "than it; got a tensor of shape (1, 2, 8, 8).",
    ),
    "three": (forward("return q, k, k", "q, k"), "must return q and k"),
    "two-widths": (forward("return q, k[..., :4]", "q, k"), "must return q and k"),
    "fewer-heads": (forward("return q[:, :1], k[:, :1]", "q, k"), "must return q and k"),
    "scores-not-causal": (
        forward(SEES_ALL),
        "mine.Mine: no token may see a later one, and earlier results change with the last token: "
        "attend with a causal mask.",
    ),
    "input-not-causal": (forward("return x.flip(1)", "x"), "no token may see a later one"),
    "keys-not-causal": (forward("return q, k.flip(2)", "q, k"), "no token may see a later one"),
}


@pytest.mark.parametrize(("text", "said"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_said_before_anything_is_written(write, tmp_path, text, said):
    run = Run(tmp_path / "out", Plan(**SIZES, encodings=("none", write(text))))
    with pytest.raises(ValueError, match=re.escape(said)):
        run.begin()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        pytest.param("no-such.py:Mine", "there is no file /", id="no-file"),
        pytest.param("mine.py", "--encodings must be among none, ", id="no-class"),
        pytest.param(":Mine", "there is no file ", id="no-path"),
    ],
)
def test_an_error_of_a_name_is_one_line(run, tmp_path, name, said):
    done = run("--encodings", f"none,{name}", "-o", str(tmp_path / "out"))
    assert done.exit_code == 2
    assert done.stderr.startswith("posenc: --encodings ")
    assert done.stderr.count("\n") == 1
    assert said in done.stderr
    assert "FILE.py:CLASS" in done.stderr or "there is no file" in done.stderr


def test_results_name_no_file_that_is_executed_unless_the_command_names_it_too(
    run, write, tmp_path
):
    """Anybody may have written a folder of results, and its file."""
    name, out = write(PLAIN), tmp_path / "out"
    Run(out, Plan(**SIZES, windows=2, encodings=("none", name))).begin()
    (tmp_path / "mine.py").write_text(f"raise SystemExit('executed')\n{PLAIN}")
    found = json.loads((out / RESULTS).read_text())
    found["files"] = {name: own.digest(name)}
    (out / RESULTS).write_text(json.dumps(found))
    done = run("--resume", "-o", str(out))
    assert done.exit_code == 2
    path = name.removesuffix(":Mine")
    assert done.stderr == (
        f"posenc: the run in {out} executes {path}: to resume, repeat its --encodings, "
        f"none,{name}.\n"
    )


def test_a_run_is_resumed_with_the_same_file_only(run, write, tmp_path):
    name, out = write(PLAIN), tmp_path / "out"
    Run(out, Plan(**SIZES, windows=2, encodings=("none", name))).begin()
    text = (tmp_path / "mine.py").read_text()
    write(f"{PLAIN}\n")
    words = "--resume", "--encodings", f"none,{name}", "-o", str(out)
    done = run(*words)
    assert done.exit_code == 2
    assert "mine.py has changed since" in done.stderr
    (tmp_path / "mine.py").write_text(text)
    done = run(*words)
    assert done.exit_code == 0, done.output
    assert json.loads((out / RESULTS).read_text())["complete"]


def test_a_file_that_changes_while_it_is_trained_ends_the_run(write, tmp_path):
    """Otherwise the seeds would be of two encodings."""
    run = Run(tmp_path / "out", Plan(**SIZES, windows=2, encodings=(write(PLAIN),)))
    run.begin()
    with pytest.raises(ValueError, match="has changed since"):
        run.go(lambda label, done: write(f"{PLAIN}\n"))
    assert run.results["units"] == {}


@pytest.mark.slow
def test_processes_load_the_file_by_its_path(write, tmp_path):
    """And the numbers are those of one process."""
    (tmp_path / "neighbour.py").write_text("from torch.nn.functional import *\n")
    text = PLAIN.replace("nn.functional.", "")
    name = write(f"from neighbour import scaled_dot_product_attention\n\n{text}")
    plan = Plan(**SIZES, windows=2, encodings=(name, "none"))
    found = []
    for jobs in (1, 2):
        run = Run(tmp_path / f"out{jobs}", plan)
        run.begin()
        run.go(jobs=jobs)
        found.append(run.results["units"])
    assert found[0] == found[1]


def test_a_class_is_called_in_the_dtype_of_the_products(write):
    """Under autocast, as the others are."""
    body = f"assert q.dtype == torch.bfloat16; {CAUSAL}"
    plan = dataclasses.replace(Plan(**SIZES), dtype="bf16")
    model = Decoder(write(forward(body)), plan, symbols=5, seed=0)
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.arange(8)[None] % 5)
