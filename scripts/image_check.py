"""Builds the gateway's image without a Docker engine and looks into it: `make image-check`.

Debian's `buildah` builds the Dockerfile as it stands, in a chroot, as root. No registry is asked: a
Debian made by `debootstrap` stands in for the base image under its name, with Debian's own Python,
and packages are downloaded before, so that the build needs no network.
Takes some minutes, and is no part of CI.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from inferq.embedded import EmbeddedServer
from inferq.version import __version__

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "image-check"
DOCKERFILE = (ROOT / "Dockerfile").read_text()
IMAGE = "localhost/inferq-gateway:check"
#: Debian 12, whose Python is 3.11: the oldest that inferq runs on.
DEBIAN, PYTHON = "bookworm", "3.11"
#: What redis-py needs on its 3.11.2, but not on the Python that downloads.
BESIDES = ("async-timeout>=4.0.3",)
#: What an image of Python has beyond a minimal Debian.
PACKAGES = ("python3", "python3-venv", "python3-pip", "python-is-python3", "ca-certificates")
BUILDAH = (
    *("buildah", "--storage-driver", "vfs"),
    *("--root", str(WORK / "storage"), "--runroot", str(WORK / "run")),
)
#: What the image answers as one line of JSON, asked inside it.
LOOK = """
import json, os, sys
import inferq
tops = [f"/{name}" for name in os.listdir("/") if name not in ("proc", "sys", "dev")]
files = [os.path.join(at, name) for top in tops for at, _, names in os.walk(top) for name in names]
print(json.dumps({
    "user": os.getuid(), "group": os.getgid(), "folder": os.getcwd(),
    "source": sorted(os.listdir(".")), "module": inferq.__file__, "path": sys.path,
    "secrets": [path for path in files if os.path.basename(path).startswith(".env")],
}))
"""
#: Starts a gateway, asks it as the health check does, and ends it.
SERVE = """
inferq gateway & gateway=$!
for _ in $(seq 120); do
  if $HEALTHCHECK $gateway 2>/dev/null; then kill $gateway; wait $gateway; exit $?; fi
  kill -0 $gateway || exit 1
  sleep 1
done
kill $gateway; exit 1
"""


def main() -> int:
    """Build what is missing, then the image, and look into it; raise `SystemExit` for a fault."""
    for program in ("buildah", "debootstrap"):
        if shutil.which(program) is None:
            raise SystemExit(f"{program} is not there: apt-get install buildah debootstrap")
    if os.geteuid() != 0:
        raise SystemExit("make image-check makes a root file system: it runs as root only")
    WORK.mkdir(parents=True, exist_ok=True)
    _make_base(_argument("SLIM_IMAGE"))
    _download_packages()
    _build()
    _check()
    _buildah("rmi", "--prune", "--force", stdout=subprocess.DEVNULL)
    print(f"{IMAGE} is as it should be")
    return 0


def _argument(name: str) -> str:
    [value] = re.findall(rf"^ARG {name}=(\S+)$", DOCKERFILE, flags=re.MULTILINE)
    return str(value)


def _buildah(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*BUILDAH, *arguments], check=True, text=True, **options)


def _make_base(name: str) -> None:
    """Keep a Debian with Python under the name of the image that the Dockerfile begins with."""
    reference = f"docker.io/library/{name}"
    known = _buildah("images", "--json", stdout=subprocess.PIPE).stdout
    if any(reference in (image["names"] or ()) for image in json.loads(known or "null") or ()):
        return
    base = WORK / "base"
    if not (base / "usr" / "bin" / "python3").exists() or (base / "debootstrap").exists():
        shutil.rmtree(base, ignore_errors=True)
        include = f"--include={','.join(PACKAGES)}"
        command = ["debootstrap", "--variant=minbase", include, DEBIAN, str(base)]
        subprocess.run(command, check=True)
    # an image of Python lets pip install into it
    (base / "usr" / "lib" / f"python{PYTHON}" / "EXTERNALLY-MANAGED").unlink(missing_ok=True)
    container = _buildah("from", "scratch", stdout=subprocess.PIPE).stdout.strip()
    _buildah("add", "--quiet", container, str(base), "/")
    _buildah("commit", "--quiet", "--rm", container, reference)


def _download_packages() -> None:
    """Put the wheels that the gateway's image needs into a folder."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [extras] = re.findall(r'"inferq\[([\w,]+)\] @', DOCKERFILE.partition("worker-packages")[0])
    builders = re.findall(r"setuptools==[\d.]+", DOCKERFILE)
    needed = [*builders, *BESIDES, *project["dependencies"]]
    for extra in extras.split(","):
        needed += project["optional-dependencies"][extra]
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(WORK / "wheels")),
        *("--only-binary=:all:", "--python-version", PYTHON),
        *("--constraint", str(ROOT / "image-constraints.txt")),
    ]
    subprocess.run([*command, *needed], check=True)
    (WORK / "pip.conf").write_text("[global]\nno-index = true\nfind-links = /wheels-of-others\n")


def _build() -> None:
    _buildah(
        *("build", "--isolation", "chroot", "--pull-never", "--format", "docker"),
        *("--volume", f"{WORK / 'wheels'}:/wheels-of-others:ro"),
        *("--volume", f"{WORK / 'pip.conf'}:/etc/pip.conf:ro"),
        *(
            "--build-arg",
            f"VERSION={__version__}",
            "--target",
            "gateway",
            "--tag",
            IMAGE,
            str(ROOT),
        ),
    )


def _check() -> None:
    container = _buildah("from", "--pull-never", IMAGE, stdout=subprocess.PIPE).stdout.strip()
    try:
        description = json.loads(
            _buildah("inspect", "--type", "image", IMAGE, stdout=subprocess.PIPE).stdout
        )["Docker"]["config"]
        _expect("user", description["User"], "10001:10001")
        _expect("entry point", description["Entrypoint"], ["inferq"])
        _expect("command", description["Cmd"], ["gateway"])
        label = "org.opencontainers.image.version"
        _expect(label, description["Labels"][label], __version__)
        _expect("inferq --version", _run(container, "inferq", "--version"), f"inferq {__version__}")
        _check_contents(json.loads(_run(container, "python", "-c", LOOK)))
        _check_service(container, description["Healthcheck"]["Test"])
    finally:
        _buildah("rm", container, stdout=subprocess.DEVNULL)


def _check_contents(found: dict[str, Any]) -> None:
    _expect("user", (found["user"], found["group"]), (10001, 10001))
    _expect("folder", found["folder"], "/home/inferq")
    _expect("modules in the folder", [n for n in found["source"] if not n.startswith(".")], [])
    _expect("module", found["module"].startswith("/opt/inferq/lib/"), True)
    _expect("folder on the path", "" in found["path"] or found["folder"] in found["path"], False)
    _expect("secrets", found["secrets"], [])


def _check_service(container: str, health_check: list[str]) -> None:
    """Start the gateway as the image's user, and ask it as the image's health check does."""
    _expect("health check", health_check, ["CMD", "python", "-m", "inferq.healthcheck"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with EmbeddedServer() as server:
        _run(
            container, "sh", "-c", SERVE,
            INFERQ_REDIS_URL=server.url, INFERQ_GATEWAY_PORT=str(port),
            HEALTHCHECK=" ".join(health_check[1:]),
        )  # fmt: skip


def _run(container: str, *command: str, **environment: str) -> str:
    """Run a command in the container and return what it says."""
    given = [f"--env={name}={value}" for name, value in environment.items()]
    arguments = ["run", "--isolation", "chroot", *given, container, "--", *command]
    return _buildah(*arguments, stdout=subprocess.PIPE).stdout.strip()


def _expect(what: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise SystemExit(f"{what}: {found!r} instead of {wanted!r}")


if __name__ == "__main__":
    sys.exit(main())
