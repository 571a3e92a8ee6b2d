"""A release: the version in its three places, and workflows that call what exists."""

import importlib.util
import re
from importlib import metadata
from pathlib import Path

import pytest
import yaml

import posenc

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def tool(name):
    """A script of tools/release, which is not in a package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / "release" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


version, links = tool("version"), tool("links")


@pytest.fixture
def tree(tmp_path):
    """The three files with a version, ready for the release of 1.2.3."""
    urls = '[project.urls]\nChangelog = "https://x.org/c"\nRepository = "https://x.org"\n'
    (tmp_path / "pyproject.toml").write_text(f'[project]\nversion = "1.2.3"\n\n{urls}')
    (tmp_path / "CITATION.cff").write_text("cff-version: 1.2.0\nversion: 1.2.3\n")
    (tmp_path / "CHANGELOG.md").write_text("## 1.2.3 (2027-01-31)\n\n## 1.0.0 (2026-12-01)\n")
    return tmp_path


def test_the_version_is_the_same_in_all_places():
    """pyproject.toml, the newest heading of the changelog and CITATION.cff say the same."""
    assert version.problem() is None


def test_a_checkout_that_is_not_installed_has_no_version(monkeypatch):
    """It can be imported all the same."""
    assert posenc.__version__ == metadata.version("posenc")

    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert posenc.__version__ == "0+not.installed"


def test_a_tag_is_released_if_everything_says_its_version(tree):
    assert version.problem(tree, tag="v1.2.3") is None
    assert "Name the tag v1.2.3" in version.problem(tree, tag="v1.2.4")


@pytest.mark.parametrize("name", version.PLACES)
def test_a_version_that_was_forgotten_stops_the_release(tree, name):
    path = tree / name
    path.write_text(path.read_text().replace("1.2.3", "1.2.2"))

    assert "the versions differ" in version.problem(tree)


def test_a_release_has_a_date(tree):
    path = tree / "CHANGELOG.md"
    path.write_text(path.read_text().replace("(2027-01-31)", "(unreleased)"))

    assert version.problem(tree) is None
    assert "has no date" in version.problem(tree, tag="v1.2.3")


@pytest.mark.parametrize(
    "left", ["", "[project.urls]\n", '[project.urls]\nChangelog = "https://x.org"\n']
)
def test_a_release_says_where_the_project_is(tree, left):
    """The page of the package would lead nowhere; a tree that is not tagged may lack it."""
    path = tree / "pyproject.toml"
    path.write_text(path.read_text().partition("[project.urls]")[0] + left)

    assert version.problem(tree) is None
    assert "Add [project.urls]" in version.problem(tree, tag="v1.2.3")


def jobs():
    for path in WORKFLOWS:
        for name, job in yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"].items():
            yield pytest.param(job, id=f"{path.stem}-{name}")


@pytest.mark.parametrize("job", [*jobs()])
def test_a_job_calls_targets_and_scripts_that_exist(job):
    """So that each of its steps runs on any machine, and none is forgotten when it is renamed."""
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    commands = [step["run"] for step in job.get("steps", []) if "run" in step]
    for command in commands:
        make = re.fullmatch(r"make ([\w-]+)( PYTHON=python)?", command)
        script = re.fullmatch(r"python (tools/release/\w+\.py)( [^;&|\n]+)?", command)
        assert make or script, command
        assert make is None or make[1] in targets, command
        assert script is None or (ROOT / script[1]).is_file(), command
    if "uses" in job:
        assert (ROOT / job["uses"]).is_file(), job["uses"]


def test_the_suite_runs_on_every_supported_python():
    """From the first that pip accepts to the last that the package names."""
    suite = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())["jobs"][
        "suite"
    ]
    cells = suite["strategy"]["matrix"]["include"]
    named = re.findall(r"Python :: (3\.\d+)", PYPROJECT)
    first = re.search(r'requires-python = ">=([\d.]+)"', PYPROJECT)[1]

    assert {cell["python"] for cell in cells} == set(named)
    assert named[0] == first
    assert {cell["torch"] for cell in cells} == {"oldest", "pinned", "newest"}


def test_nothing_but_the_publication_may_do_more_than_read():
    for path in WORKFLOWS:
        workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert workflow["permissions"] == {"contents": "read"}, path
        for name, job in workflow["jobs"].items():
            allowed = {"id-token": "write"} if (path.stem, name) == ("release", "publish") else None
            assert job.get("permissions") == allowed, f"{path}: {name}"


def test_a_release_waits_for_every_other_job():
    release = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())["jobs"]
    assert set(release["publish"]["needs"]) == set(release) - {"publish"}


def test_links_of_the_pages_beside_the_manual_lead_somewhere():
    assert links.dead_links_of_pages(ROOT) == []


def test_a_dead_link_of_the_manual_is_found(tmp_path):
    """To a page, and to a place of one."""
    (tmp_path / "b").mkdir()
    (tmp_path / "a.html").write_text('<a href="b/c.html#here">x</a><a href="https://x.org">y</a>')
    (tmp_path / "b" / "c.html").write_text('<p id="here"><a href="../a.html">x</a>')
    assert links.dead_links_of_site(tmp_path) == []

    (tmp_path / "b" / "c.html").write_text('<p id="there"><a href="../d.html">x</a>')
    assert links.dead_links_of_site(tmp_path) == ["a.html: b/c.html#here", "b/c.html: ../d.html"]
