"""Gateways on free ports before a worker whose engine is a stand-in.

- `gateway`  a running gateway without keys, with one worker that serves the model `stand-in`
- `stand_in_worker`  that worker; its `say(text)` sets what it answers
- `start_gateway(**settings)`, `start_stand_in(**options)`  more of them, ended with the test
- `http`  a client of `gateway`
- `openai_client`  OpenAI's own
- `open_tab(url, **options)`  a page in headless Chromium
- `no_batches`  before the test there are no files and batches
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
import redis
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

from inferq.protocol.keys import BatchKeys

CHROMIUM = "chromium"
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
#: For a machine that others use too.
PATIENCE_MS = 60_000


@pytest.fixture
def no_batches(valkey_url: str) -> None:
    """Forget the files and batches of other tests, which are the server's and no queue's."""
    with redis.Redis.from_url(valkey_url) as client:
        for key in client.scan_iter(f"{BatchKeys.PREFIX}*"):
            client.delete(key)


@pytest.fixture
def stand_in_worker(start_stand_in: Callable[..., Any]) -> Any:
    return start_stand_in()


@pytest.fixture
def gateway(stand_in_worker: Any, start_gateway: Callable[..., Any]) -> Any:
    return start_gateway()


@pytest.fixture
def http(gateway: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=gateway.url, timeout=60) as client:
        yield client


@pytest.fixture
def openai_client(gateway: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=60
    ) as client:
        yield client


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Debian's Chromium; skips where it is not installed, fails in CI."""
    binary = shutil.which(CHROMIUM)
    if binary is None:
        if os.environ.get("CI"):
            pytest.fail(f"{CHROMIUM} is not installed, and CI must have it")
        pytest.skip(f"{CHROMIUM} is not installed")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=binary, args=list(FLAGS), timeout=PATIENCE_MS
        )
        yield started
        started.close()


@pytest.fixture
def open_tab(browser: Browser) -> Callable[..., Iterator[Page]]:
    """Open tabs (`for page in open_tab(url): …`), which must not complain nor call elsewhere."""

    def open_one(url: str, **options: Any) -> Iterator[Page]:
        return _tab(browser, url, **options)

    return open_one


def _tab(browser: Browser, url: str, **options: Any) -> Iterator[Page]:
    origin = "/".join(url.split("/")[:3])
    complaints: list[str] = []
    foreign: list[str] = []

    def note(message: ConsoleMessage) -> None:
        # a refused call is the test's; everything else, such as the content policy's, is a fault
        if message.type == "error" and "Failed to load resource" not in message.text:
            complaints.append(message.text)

    with browser.new_context(**options) as context:
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        expect.set_options(timeout=PATIENCE_MS)
        page.on("console", note)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        context.on(
            "request",
            lambda request: (
                foreign.append(request.url) if not request.url.startswith(origin) else None
            ),
        )
        page.goto(url)
        yield page
    assert complaints == []
    assert foreign == []
