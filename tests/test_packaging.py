"""What is installed is what is in the tree, and the light parts stay light."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import inferq

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGE_DIRS: dict[str, str] = PYPROJECT["tool"]["setuptools"]["package-dir"]
HEAVY = (
    *("torch", "transformers", "numpy", "tokenizers", "safetensors"),
    *("pydantic", "structlog", "fastapi", "starlette", "uvicorn", "orjson"),
)
#: Modules, and the data beside them.
SHIPPED = {".py", ".lua", ".cpp", ".h", ".html", ".css", ".js", ".svg"}


def source_folders() -> dict[str, Path]:
    """Every folder of the tree that holds modules or data, by package name."""
    folders = {}
    for package, top in PACKAGE_DIRS.items():
        for folder in [ROOT / top, *(p for p in (ROOT / top).rglob("*") if p.is_dir())]:
            if folder.name != "__pycache__" and any(p.is_file() for p in folder.iterdir()):
                inner = folder.relative_to(ROOT / top).parts
                folders[".".join([package, *inner])] = folder
    return folders


def test_every_folder_is_a_package_and_listed() -> None:
    folders = source_folders()
    assert sorted(PYPROJECT["tool"]["setuptools"]["packages"]) == sorted(folders)
    assert [name for name, f in folders.items() if not (f / "__init__.py").is_file()] == []


def test_no_test_folder_is_a_package() -> None:
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_the_wheel_built_from_the_sdist_holds_every_module_and_script(tmp_path: Path) -> None:
    # a copy without build/, which could ship modules that are gone
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", *PACKAGE_DIRS.values()):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tree / name)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path / "dist")]
    built = subprocess.run([*command, str(tree)], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = {n for n in archive.namelist() if ".dist-info/" not in n}
    wanted = {
        f"{package.replace('.', '/')}/{path.name}"
        for package, folder in source_folders().items()
        for path in folder.iterdir()
        if path.suffix in SHIPPED or path.name == "py.typed"
    }
    assert held == wanted


def loaded_by(code: str) -> set[str]:
    program = f"import sys\n{code}\nprint(*sys.modules)"
    # -P: the repository root must not make bare `kernels` importable
    run = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True
    )
    return set(run.stdout.split())


@pytest.mark.parametrize(
    "code",
    [
        "import inferq",
        "import inferq.protocol.messages, inferq.protocol.scripts",
        "import inferq.producer",
        "import inferq.cli",
        "from inferq import AsyncClient, Client, SamplingParams",
    ],
)
def test_what_a_producer_imports_is_light(code: str) -> None:
    assert loaded_by(code).isdisjoint(HEAVY)


def test_importing_the_offline_class_loads_no_model_library_yet() -> None:
    assert loaded_by("from inferq import LLM").isdisjoint({"torch", "transformers"})


def test_the_bare_package_loads_neither_redis_nor_msgpack() -> None:
    assert loaded_by("import inferq").isdisjoint({"redis", "msgpack", "asyncio"})


def test_the_public_names_are_complete_sorted_and_real() -> None:
    names = inferq.__all__
    # as ruff sorts them: constants, classes, the rest
    ranked = sorted(names, key=lambda n: (not n.isupper(), n.startswith("_"), n))
    assert names == ranked
    assert len(set(names)) == len(names)
    for name in names:
        if name != "LLM":  # loads an extra
            assert getattr(inferq, name) is not None
    errors = vars(sys.modules["inferq.protocol.errors"])
    public_errors = {
        n for n, v in errors.items()
        if isinstance(v, type) and v.__module__ == "inferq.protocol.errors"
    }  # fmt: skip
    assert public_errors <= set(names)
    assert set(names) <= set(dir(inferq))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Nope'"):
        _ = inferq.Nope  # type: ignore[attr-defined]


def test_the_version_is_the_distributions() -> None:
    run = subprocess.run(
        [sys.executable, "-P", "-m", "inferq", "--version"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert run.stdout == f"inferq {inferq.__version__}\n"


@pytest.mark.parametrize(
    ("command", "extra", "missing"),
    [("worker", "worker", "torch"), ("gateway", "gateway", "fastapi")],
)
def test_a_missing_extra_gives_the_install_command(command: str, extra: str, missing: str) -> None:
    program = (
        f"import sys\nsys.modules[{missing!r}] = None\nsys.modules['pydantic'] = None\n"
        f"import inferq.cli\nsys.exit(inferq.cli.main([{command!r}, '--help']))\n"
    )
    run = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False
    )
    assert run.returncode == 2
    assert f"pip install 'inferq[{extra}]'" in run.stderr
    assert "Traceback" not in run.stderr
