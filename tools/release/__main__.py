"""Whether a release could be made from this tree: `make release-check`, after the manual is built.

Builds the source distribution and the wheels, checks their files and their metadata, and runs the
smoke test of each in an environment with torch and nothing else.
"""

from __future__ import annotations

import shutil
import subprocess
import tarfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import links
import version
from distributions import BUILD, build, tools, tracked_files
from environment import ROOT, run
from install import try_wheel

# What an sdist has besides the tracked files of src: what builds it, and what setuptools adds. The
# tests are not in it, because they need the manual, the examples and the tools.
SDIST = "CITATION.cff CHANGELOG.md LICENSE MANIFEST.in README.md pyproject.toml setup.py".split()
ADDED = ("PKG-INFO", "setup.cfg")
TOP = "posenc,posenc_command.py"


@contextmanager
def step(words: str) -> Iterator[None]:
    """Say what is checked, and how long that took."""
    print(f"release-check: {words} ...", flush=True)
    began = time.monotonic()
    yield
    print(f"release-check: {words}: {time.monotonic() - began:.0f} s", flush=True)


def demand(holds: object, words: str) -> None:
    """Stop where something does not hold."""
    if not holds:
        raise SystemExit(f"release-check: {words}")


def files_of(archive: Path) -> dict[str, bytes]:
    """The files of an sdist, without its folder, or of a wheel."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return {name: wheel.read(name) for name in wheel.namelist()}
    with tarfile.open(archive) as sdist:
        found = {member.name: sdist.extractfile(member) for member in sdist.getmembers()}
        return {name.split("/", 1)[1]: file.read() for name, file in found.items() if file}


def check_contents(source: Path, sdist: Path, wheels: dict[str, Path]) -> None:
    """Every file of a wheel and of the sdist is one that git tracks, and none is missing."""
    tracked = {
        path.relative_to(source).as_posix(): path.read_bytes()
        for path in source.rglob("*")
        if path.is_file() and "egg-info" not in path.parent.name
    }
    package = {name: data for name, data in tracked.items() if name.startswith("src/")}

    found = {name: data for name, data in files_of(sdist).items() if "egg-info/" not in name}
    wanted = package | {name: tracked[name] for name in SDIST}
    found = {name: data for name, data in found.items() if name not in ADDED}
    compare("the sdist", found, wanted)

    wanted = {name.removeprefix("src/"): data for name, data in package.items()}
    wanted = {name: data for name, data in wanted.items() if not name.endswith((".c", ".h"))}
    for name, wheel in wheels.items():
        found = {n: data for n, data in files_of(wheel).items() if ".dist-info/" not in n}
        extensions = [n for n in found if n.endswith((".so", ".pyd"))]
        demand(len(extensions) == (name != "pure"), f"the {name} wheel has {extensions}")
        compare(
            f"the {name} wheel", {n: d for n, d in found.items() if n not in extensions}, wanted
        )


def compare(what: str, found: dict[str, bytes], wanted: dict[str, bytes]) -> None:
    """Both have the same files with the same bytes."""
    demand(wanted.keys() <= found.keys(), f"{what} lacks {sorted(wanted.keys() - found.keys())}")
    demand(found.keys() <= wanted.keys(), f"{what} has also {sorted(found.keys() - wanted.keys())}")
    other = [name for name in found if found[name] != wanted[name]]
    demand(not other, f"{what} has other bytes than the checkout in {other}")


def main() -> None:
    """Check everything, and stop at the first thing that does not hold."""
    with step("version, citation and changelog"):
        why = version.problem()
        demand(why is None, str(why))
    with step("links of the manual and of the pages beside it"):
        demand((ROOT / "site" / "index.html").is_file(), "there is no manual: run make docs")
        dead = links.dead_links_of_site(ROOT / "site") + links.dead_links_of_pages(ROOT)
        demand(not dead, "these links lead nowhere:\n  " + "\n  ".join(dead))
    with step("source distribution and wheels"):
        python = tools()
        source = tracked_files(BUILD / "source")
        sdist = build(python, source, BUILD / "sdist", "sdist")
        shutil.rmtree(BUILD / "unpacked", ignore_errors=True)
        with tarfile.open(sdist) as packed:
            packed.extractall(BUILD / "unpacked", filter="data")
        unpacked = BUILD / "unpacked" / sdist.name.removesuffix(".tar.gz")
        wheels = {
            "platform's": build(python, source, BUILD / "wheel", "wheel"),
            "sdist's": build(python, unpacked, BUILD / "wheel-of-sdist", "wheel"),
            "pure": build(python, unpacked, BUILD / "wheel-pure", "wheel", extension="none"),
        }
        check_contents(source, sdist, wheels)
    with step("metadata"):
        run(python, "-m", "twine", "--no-color", "check", "--strict", sdist, *wheels.values())
        for name, wheel in wheels.items():
            run(python, "-m", "check_wheel_contents", "--toplevel", TOP, wheel)
            if name != "pure":
                run(python, "-m", "abi3audit", "--strict", "--assume-minimum-abi3", "3.10", wheel)
        run(python.with_name("cffconvert"), "--validate", "--infile", ROOT / "CITATION.cff")
    with step("smoke test of each wheel, with torch only"):
        for wheel in wheels.values():
            try_wheel(wheel)
    print("release-check: all passed")
    if why := version.unready():
        print(f"release-check: not ready for a tag: {why}")


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as failed:
        raise SystemExit(f"release-check: this failed: {failed}") from None
