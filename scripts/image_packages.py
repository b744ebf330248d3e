"""Writes `image-constraints.txt`: the packages of the images in the versions that were tested.

Run by `make image-packages` in the environment of the tests. Packages that only CUDA's torch needs
are not there; torch itself asks for each of them in one version. With `--check` nothing is written:
exits with 1 where the file lacks a package that an image needs.
"""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

PATH = Path(__file__).resolve().parents[1] / "image-constraints.txt"
#: Extras that an image installs.
EXTRAS = ("gateway", "tasks", "worker", "s3", "tracing", "cli")
#: What the images' Python has: a package for another one only would not be missed.
ENVIRONMENT = {"python_version": "3.12", "python_full_version": "3.12.11"}
#: CUDA's torch asks for one version of Triton, which may not be the one of the tests.
LEFT_OUT = ("inferq", "triton")

_HEAD = """\
# What the images hold beside inferq, in the versions that the tests ran with. Made by
# `make image-packages`.
"""


def needed() -> dict[str, str]:
    """Return the version of every package that an image needs, by name."""
    found: dict[str, str] = {}
    waiting = [Requirement(f"inferq[{','.join(EXTRAS)}]")]
    seen: set[str] = set()
    while waiting:
        requirement = waiting.pop()
        if str(requirement) in seen:
            continue
        seen.add(str(requirement))
        name = canonicalize_name(requirement.name)
        try:
            installed = distribution(requirement.name)
        except PackageNotFoundError:
            continue
        # a local version, as of torch for the CPU, is not what the index offers to all
        found[name] = Version(installed.version).public
        for text in installed.requires or ():
            inner = Requirement(text)
            if _applies(inner, requirement.extras):
                waiting.append(inner)
    return {name: version for name, version in found.items() if name not in LEFT_OUT}


def _applies(requirement: Requirement, extras: set[str]) -> bool:
    if requirement.marker is None:
        return True
    return any(
        requirement.marker.evaluate({**ENVIRONMENT, "extra": extra}) for extra in (*extras, "")
    )


def main() -> int:
    """Write the file, or with `--check` look whether it names all packages."""
    parser = argparse.ArgumentParser(description="Write image-constraints.txt.")
    parser.add_argument("--check", action="store_true", help="only look whether all are there")
    packages = needed()
    if not parser.parse_args().check:
        lines = [f"{name}=={version}" for name, version in sorted(packages.items())]
        PATH.write_text(_HEAD + "\n".join(lines) + "\n")
        return 0
    pinned = {line.partition("==")[0] for line in PATH.read_text().splitlines() if "==" in line}
    for name in sorted(packages.keys() - pinned):
        print(f"{name} is not in {PATH.name}: run `make image-packages`")
    return 1 if packages.keys() - pinned else 0


if __name__ == "__main__":
    sys.exit(main())
