"""The pages' files: all of one origin, nothing inline, open without a key."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

STATIC = Path(__file__).parents[3] / "producer" / "gateway" / "static"
FILES = sorted(path.name for path in STATIC.iterdir() if path.suffix in {".css", ".js", ".svg"})
PAGES = {"/": "page.html", "/status": "status.html"}
TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


@pytest.mark.parametrize("path", PAGES)
def test_a_page_may_load_and_call_only_its_own_origin(http: httpx.Client, path: str) -> None:
    page = http.get(path)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(
        part.split(" ", 1) for part in page.headers["content-security-policy"].split("; ")
    )
    assert policy.pop("default-src") == "'none'"
    assert set(policy.values()) == {"'self'", "'none'"}
    assert "<script type=" in page.text


@pytest.mark.parametrize("name", FILES)
def test_each_file_comes_with_its_type_and_is_sent_once(http: httpx.Client, name: str) -> None:
    file = http.get(f"/static/{name}")
    assert file.status_code == 200
    assert file.headers["content-type"].startswith(TYPES[Path(name).suffix])
    assert file.headers["x-content-type-options"] == "nosniff"
    assert file.content == (STATIC / name).read_bytes()
    again = http.get(f"/static/{name}", headers={"If-None-Match": file.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_what_is_no_file_of_the_page_is_not_found(http: httpx.Client) -> None:
    for path in ("/static/nope.js", "/static/__init__.py", "/static/../page.py", "/static/"):
        assert http.get(path).status_code == 404


def test_the_pages_have_no_inline_code_and_name_no_other_place() -> None:
    for name in PAGES.values():
        page = (STATIC / name).read_text()
        assert not re.search(r"<script(?![^>]*\ssrc=)|<style|\sstyle=|\son[a-z]+=", page)
    for name in (*PAGES.values(), *FILES):
        text = (STATIC / name).read_text().replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert not re.search(r"https?://|//[a-z0-9-]+\.[a-z]", text), name
        assert not re.search(r"(src|href)=\"/", text), f"{name}: not relative"


def test_the_pages_are_small() -> None:
    assert sum((STATIC / name).stat().st_size for name in (*PAGES.values(), *FILES)) < 70_000


def test_the_pages_open_without_the_key_that_they_ask_for(
    start_gateway: Callable[..., Any], tmp_path: Path
) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps([{"name": "one", "sha256": hashlib.sha256(b"sk-1").hexdigest()}]))
    gateway = start_gateway(api_keys_file=keys)
    for path in PAGES:
        assert httpx.get(f"{gateway.url}{path}").status_code == 200
    assert httpx.get(f"{gateway.url}/static/page.js").status_code == 200
    assert httpx.get(f"{gateway.url}/v1/models").status_code == 401
