"""What pages, docstrings and comments name is there: files, headings, modules, tests, commands."""

from __future__ import annotations

import argparse
import ast
import os
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml

from inferq.cli import serve_flags
from inferq.cli.parser import build_parser
from inferq.producer.gateway.command import build_parser as gateway_parser
from inferq.producer.tasks.command import build_parser as tasks_parser
from inferq.worker.command import build_parser as worker_parser

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("inferq", "protocol", "producer", "worker", "kernels")
#: Folders that are no part of the project.
FOREIGN_FOLDERS = frozenset({".git", ".venv", "build", "dist", "node_modules", "__pycache__"})
#: Names that look like files of ours and are others'.
FOREIGN = frozenset({"Node.js", "llama.cpp", "results.md"})

FILE = re.compile(
    r"(?<![\w/.*<>{}-])((?:\.\./)*(?:[\w-][\w.-]*/)*[\w-]+\.(?:py|lua|md|mjs|cpp|h|tpl|js))\b(?!\()"
)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.M)
MODULE = re.compile(r"\binferq(?:\.[a-z_0-9]+)+(?:\.[A-Z]\w+)?\b")
TEST = re.compile(r"(test_\w+\.py)::(test_\w+)(…?)")
SHELL = re.compile(r"^```(?:sh|bash)\n(.*?)^```$", re.M | re.S)
FENCES = re.compile(r"^```.*?^```$", re.M | re.S)


def _tree() -> Iterator[str]:
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in FOREIGN_FOLDERS]
        for file in files:
            yield Path(folder, file).relative_to(ROOT).as_posix()


TREE = frozenset(_tree())
#: Every file by its name, and by its name behind one folder, two and so on.
ENDS = frozenset(
    "/".join(parts[start:])
    for parts in (name.split("/") for name in TREE)
    for start in range(len(parts))
)
PAGES = sorted(name for name in TREE if name.endswith(".md") and not name.startswith("."))
SOURCES = sorted(
    name
    for name in TREE
    if name.startswith(PACKAGES) and name.endswith((".py", ".lua", ".cpp", ".h"))
)
TEXTS = {name: (ROOT / name).read_text(encoding="utf-8") for name in (*PAGES, *SOURCES)}


def _is_there(named: str, page: str) -> bool:
    if named.startswith("../"):
        return (ROOT / page).parent.joinpath(named).resolve().exists()
    return named in ENDS


def test_every_file_that_is_named_is_there() -> None:
    missing = {
        f"{place}: {named}"
        for place, text in TEXTS.items()
        for named in set(FILE.findall(text)) - FOREIGN
        if not _is_there(named, place)
    }
    assert sorted(missing) == []


def _anchors(text: str) -> set[str]:
    plain = FENCES.sub("", text)
    return {
        re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")
        for title in HEADING.findall(plain)
    }


def _leads_somewhere(link: str, page: str) -> bool:
    if link.startswith(("http://", "https://", "mailto:")):
        return True
    path, _, anchor = link.partition("#")
    target = (ROOT / page).parent.joinpath(path).resolve() if path else ROOT / page
    return target.exists() and (not anchor or anchor in _anchors(target.read_text()))


def test_every_link_leads_somewhere() -> None:
    broken = [
        f"{page}: {link}"
        for page in PAGES
        for link in LINK.findall(FENCES.sub("", TEXTS[page]))
        if not _leads_somewhere(link, page)
    ]
    assert broken == []


def _module(name: str) -> Path | None:
    parts = name.split(".")
    folder = ROOT.joinpath(*parts) if parts[1:] and parts[1] not in PACKAGES else ROOT
    folder = folder if folder != ROOT else ROOT.joinpath(*parts[1:])
    if folder.with_suffix(".py").is_file():
        return folder.with_suffix(".py")
    return folder / "__init__.py" if (folder / "__init__.py").is_file() else None


def _defined(path: Path) -> set[str]:
    """Names that a module has, imported ones too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
            ):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.alias(name=name, asname=other):
                found.add(other or name)
    return found


def _exists(name: str) -> bool:
    if _module(name) is not None:
        return True
    parent, _, last = name.rpartition(".")
    if parent == "inferq":
        return last in _defined(ROOT / "inferq" / "__init__.py") or last.istitle()
    path = _module(parent)
    return path is not None and last in _defined(path)


def _docstrings(source: str) -> str:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, documented)]
    return "\n".join(filter(None, map(ast.get_docstring, nodes)))


def test_every_module_that_a_page_or_docstring_names_is_there() -> None:
    texts = {page: TEXTS[page] for page in PAGES}
    texts |= {name: _docstrings(TEXTS[name]) for name in SOURCES if name.endswith(".py")}
    named = {
        (name, place)
        for place, text in texts.items()
        for name in MODULE.findall(text)
        # hosts and images, such as inferq.example.com, end otherwise than modules
        if not name.endswith((".com", ".io"))
    }
    missing = {name for name, _ in named if not _exists(name)}
    assert sorted(f"{place}: {name}" for name, place in named if name in missing) == []


def test_every_test_that_a_page_names_is_there() -> None:
    missing = []
    for page in PAGES:
        for file, test, rest in TEST.findall(TEXTS[page]):
            (path,) = [name for name in TREE if name.endswith(f"/{file}")]
            tests = re.findall(r"def (test_\w+)", (ROOT / path).read_text())
            if not any(name == test or (rest and name.startswith(test)) for name in tests):
                missing.append(f"{page}: {file}::{test}")
    assert missing == []


@cache
def _parser_of(command: str) -> argparse.ArgumentParser:
    """Return the parser of a command that reads its own flags, else of all others."""
    match command:
        case "gateway":
            return gateway_parser()
        case "tasks":
            return tasks_parser()
        case "worker":
            return worker_parser()
        case "serve":
            return serve_flags.build_parser()
        case _:
            return build_parser()


def _commands(page: str) -> Iterator[list[str]]:
    """Yield the words of each `inferq` command in a page's shell blocks."""
    for block in SHELL.findall(TEXTS[page]):
        for line in block.replace("\\\n", " ").splitlines():
            for part in re.split(r"\||&&|\$\(|;", line.replace('"$(', "$(")):
                try:
                    words = shlex.split(part.replace(")", " ").rstrip(), comments=True)
                except ValueError:
                    continue  # half of a quoted text
                while words and ("=" in words[0] or words[0] in ("!", "time")):
                    words.pop(0)
                if words[:1] == ["inferq"]:
                    yield [word for word in words[1:] if word not in (">", "&")]


def test_every_command_of_a_page_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = []
    for page in PAGES:
        for words in _commands(page):
            if {"--help", "-h", "--version"}.intersection(words):
                continue
            reads_own_flags = words[0] in ("gateway", "tasks", "worker", "serve")
            parser = _parser_of(words[0] if reads_own_flags else "")
            try:
                parser.parse_args(words[1:] if reads_own_flags else words)
            except SystemExit:
                wrong.append(f"{page}: inferq {shlex.join(words)}: {capsys.readouterr().err}")
    assert wrong == []


def test_the_index_lists_every_page() -> None:
    listed = {link for link in LINK.findall(TEXTS["docs/README.md"]) if "/" not in link}
    pages = {Path(page).name for page in PAGES if re.fullmatch(r"docs/[\w-]+\.md", page)}
    assert listed == pages - {"README.md"}
    linked = {Path(link).name for link in LINK.findall(TEXTS["README.md"])}
    assert pages <= linked


def test_every_example_is_run_by_a_test() -> None:
    tests = [(ROOT / name).read_text() for name in TREE if re.match(r"tests/.*test_\w+\.py", name)]
    examples = [
        Path(name).name for name in TREE if re.fullmatch(r"examples/[\w/]+\.(py|mjs)", name)
    ]
    imported = {"msgpack.mjs", "redis.mjs"}  # by the client in Node.js
    forgotten = [
        example
        for example in examples
        if example not in imported and not any(f'"{example}"' in text for text in tests)
    ]
    assert forgotten == []


def test_every_hook_calls_a_target_of_the_makefile() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    for hook in hooks:
        program, target = hook["entry"].split()
        assert program == "make"
        assert target in targets
