"""A results.json that somebody else wrote is refused in one line, or shown without harm."""

import copy
import json
import math
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import posenc.cli
from posenc.cli.compare import _show
from posenc.lab.comparison import report
from posenc.lab.comparison.plan import Plan
from posenc.lab.comparison.results import RESULTS, read
from posenc.lab.comparison.run import Run

TINY = Plan(
    encodings=("none", "rope-yarn"), tasks=("copy", "text"), seeds=2, train_length=8, steps=3,
    batch=2, width=16, layers=1, heads=2, windows=2, times=(1, 2),
)  # fmt: skip
EVIL = "\x1b]0;owned\x07<script>alert(1)</script>{{ 7 * 7 }}"
HOSTILE = [
    None, True, -1, 0, 10**6, 10**400, 1.5, -1e29, 1e31, math.nan, math.inf, "", EVIL, [], [[]],
    ["none"], [EVIL], {}, {EVIL: 1}, [1] * 1000,
]  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    run = Run(tmp_path_factory.mktemp("finished"), TINY)
    run.begin()
    run.go()
    return json.loads((run.folder / RESULTS).read_text())


def places(value, path=()):
    """The path of every field; the first item of a list and the last training stand for all."""
    yield path
    keys = [0] if isinstance(value, list) and value else []
    if isinstance(value, dict):
        keys = list(value)[-1:] if path == ("units",) else list(value)
    for key in keys:
        yield from places(value[key], (*path, key))


def changed(results, path, change):
    """A copy in which ``change`` was made to the container of the field, with its key."""
    copied = copy.deepcopy(results)
    container = copied
    for key in path[:-1]:
        container = container[key]
    change(container, path[-1])
    return copied


def variants(results, field):
    """Everything in the field with every hostile value, left out, and with one neighbour more."""
    for path in places(results[field], (field,)):
        for value in HOSTILE:
            yield path, value, changed(results, path, lambda held, key, v=value: _set(held, key, v))
        yield path, "left out", changed(results, path, lambda held, key: held.pop(key))
        yield path, "one more", changed(results, path, _add)


def _set(held, key, value):
    held[key] = value


def _add(held, key):
    held.append(held[key]) if isinstance(held, list) else held.update({f"{key}!": held[key]})


@pytest.fixture
def undrawn(monkeypatch):
    """Pictures take a second each, and show numbers alone."""
    monkeypatch.setattr("posenc.lab.comparison.report.in_page", lambda drawn: "data:,")
    monkeypatch.setattr("posenc.lab.comparison.report.sheet", lambda *_, **__: None)
    monkeypatch.setattr("posenc.lab.comparison.report.board", lambda *_: None)
    monkeypatch.setattr("posenc.lab.comparison.report._shown", lambda *_: [])


def attempt(folder):
    """What is read, or the words of the refusal."""
    try:
        return read(folder), ""
    except ValueError as error:
        return None, str(error)


FIELDS = "posenc command machine plan text units costs".split()


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("field", FIELDS)
def test_every_field_with_any_value_is_refused_in_one_line_or_shown(
    finished, tmp_path, capsys, field
):
    """Never a traceback, never an escape on the terminal, never a tag in the page."""
    taken = 0
    for path, value, results in variants(finished, field):
        (tmp_path / RESULTS).write_text(json.dumps(results))
        found, refused = attempt(tmp_path)
        if found is None:
            assert f"{RESULTS} is damaged, or from another version" in refused, (path, value)
            continue
        taken, (plan, results) = taken + 1, found
        _show(SimpleNamespace(plan=plan, results=results))
        shown = "".join(capsys.readouterr())
        assert shown.replace("\n", "").isprintable(), (path, value)
        if any(results["summary"].values()):
            page = report.page(plan, results)
            assert "<script" not in page, (path, value)
            assert "}" not in page.partition("</style>")[2].replace("{{ 7 * 7 }}", ""), (
                path,
                value,
            )
    assert taken


def test_what_follows_from_the_units_is_not_read(finished, tmp_path):
    """Labels, ranks and means of a stranger are never shown."""
    row = finished["summary"]["text"][0] | {"rank": [EVIL, EVIL], "label": EVIL, "score": [0, 0]}
    hostile = {**finished, "summary": {"text": [row]}, "complete": False}
    (tmp_path / RESULTS).write_text(json.dumps(hostile))
    plan, results = read(tmp_path)
    assert plan == TINY
    assert json.loads(json.dumps(results)) == finished


def test_the_command_shows_a_stranger_s_results_and_draws_them(finished, tmp_path):
    """The words that may be any: of the command line, the version and the machine."""
    hostile = {**finished, "command": EVIL, "posenc": EVIL, "summary": EVIL}
    hostile["machine"] = dict.fromkeys(finished["machine"], EVIL)
    (tmp_path / RESULTS).write_text(json.dumps(hostile))
    words = ["compare", "--resume", "-o", str(tmp_path)]
    done = CliRunner().invoke(posenc.cli.application(), words)
    assert done.exit_code == 0, done.output
    assert done.output.replace("\n", "").isprintable()
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "<script" not in page
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;{{ 7 * 7 }}") == 6


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("plan", "heads"), 0),
        (("plan", "seeds"), 10**12),
        (("units", "text-none-0", "tests", "none", "score"), [1.0]),
        (("units", "text-none-0", "curve", "loss", 0), math.nan),
        (("costs", "none", "read"), "x"),
        (("machine", "torch"), []),
        (("text",), None),
    ],
    ids=lambda each: ".".join(map(str, each)) if isinstance(each, tuple) else "",
)
def test_a_wrong_shape_is_one_line_of_error(finished, tmp_path, path, value):
    hostile = changed(finished, path, lambda held, key: _set(held, key, value))
    (tmp_path / RESULTS).write_text(json.dumps(hostile))
    words = ["compare", "--resume", "-o", str(tmp_path)]
    done = CliRunner().invoke(posenc.cli.application(), words)
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("posenc: ")
