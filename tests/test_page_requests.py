"""Requests in pages and examples name the model that the pages serve, and end by themselves."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
#: Of what is measured elsewhere, with models of its own.
OTHERS = frozenset({"docs/benchmarks.md"})
PAGES = [
    path.relative_to(ROOT).as_posix()
    for path in sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
]
EXAMPLES = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "examples").glob("*.py"))]

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
SERVED = re.compile(r"^inferq serve (\S+) --port", re.M)
MODELS = re.compile(r"""["']?\bmodels?["']?\s*[:=]\s*\[?["']([^"']+)["']""")
#: A chat, whose answer goes to the end of the context unless it is told where to end.
CHAT = re.compile(r"""["']messages["']\s*:|chat\.completions\.create\(""")


def blocks(page: str) -> list[tuple[str, str]]:
    """The page's code, each piece with its language."""
    return FENCE.findall((ROOT / page).read_text(encoding="utf-8"))


def served() -> str:
    [name] = set(SERVED.findall((ROOT / "docs/quickstart.md").read_text(encoding="utf-8")))
    return name


@pytest.mark.parametrize("page", sorted({*PAGES} - OTHERS))
def test_requests_name_the_model_of_the_quick_start(page: str) -> None:
    named = {name for _, text in blocks(page) for name in MODELS.findall(text)}
    assert named <= {served()}


def test_there_are_requests_with_names_and_ends() -> None:
    for page in ("docs/gateway.md", "docs/batches.md"):
        texts = [text for _, text in blocks(page)]
        assert any(MODELS.search(text) for text in texts)
        assert any(CHAT.search(text) for text in texts)
    assert sum(1 for name in EXAMPLES for _ in chats(name)) >= 3


@pytest.mark.parametrize("page", PAGES)
def test_chats_of_pages_say_where_they_end(page: str) -> None:
    endless = [text for _, text in blocks(page) if CHAT.search(text) and "max_tokens" not in text]
    assert endless == []


def chats(name: str) -> Iterator[tuple[int, bool]]:
    """The line of each chat of an example, and whether it says where it ends."""
    for node in ast.walk(ast.parse((ROOT / name).read_text(encoding="utf-8"))):
        keys: set[object] = set()
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("completions.create"):
            keys = {keyword.arg for keyword in node.keywords}
        elif isinstance(node, ast.Dict):
            keys = {key.value for key in node.keys if isinstance(key, ast.Constant)}
        if "messages" in keys:
            yield node.lineno, "max_tokens" in keys


@pytest.mark.parametrize("name", EXAMPLES)
def test_chats_of_examples_say_where_they_end(name: str) -> None:
    assert [line for line, is_bounded in chats(name) if not is_bounded] == []
