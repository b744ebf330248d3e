"""The status page in headless Chromium: the cells are the engine's books, and what is behind them.

The worker's engine is a stand-in, its blocks are those of a real engine on a simulated model.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_simulation import Simulation
from playwright.sync_api import Page, expect

from inferq.embedded import EmbeddedServer
from inferq.protocol.keys import new_job_id
from inferq.protocol.snapshots import BlockSnapshot, HoldingSequence

STATES = ("free", "cached", "used", "shared", "swapped")
NO_END = {"ignore_eos": True}

#: The colour in the middle of each cell, as the state whose colour that is.
COUNT_CELLS = """canvas => {
  const style = getComputedStyle(canvas);
  const hex = (r, g, b) => '#' + [r, g, b].map((v) => v.toString(16).padStart(2, '0')).join('');
  const states = new Map(%s.map((name) => [style.getPropertyValue(`--${name}`).trim(), name]));
  const [columns, size] = [Number(canvas.dataset.columns), Number(canvas.dataset.size)];
  const scale = devicePixelRatio;
  const rows = Math.round(canvas.height / scale / size);
  const {data, width} =
    canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  const counts = {};
  for (let place = 0; place < columns * rows; place++) {
    const x = Math.floor((place %% columns + 0.4) * size * scale);
    const y = Math.floor((Math.floor(place / columns) + 0.4) * size * scale);
    const [r, g, b, a] = data.slice(4 * (y * width + x), 4 * (y * width + x) + 4);
    if (a < 255) continue;  // no cell there
    const name = states.get(hex(r, g, b)) ?? hex(r, g, b);
    counts[name] = (counts[name] ?? 0) + 1;
  }
  return counts;
}""" % json.dumps(STATES)  # noqa: UP031 - braces are JavaScript's


class BusyEngine:
    """An engine with free, cached, used, shared and swapped blocks."""

    def __init__(self) -> None:
        self.sim = Simulation(num_blocks=60, num_swap_blocks=14)
        self.ids = {name: f"{new_job_id()}:1" for name in ("ended", "forked", "single", "away")}
        self.sim.add(self.ids["ended"], [*range(20, 36)], max_tokens=2, **NO_END)
        self.sim.run()
        self.sim.add(self.ids["forked"], [*range(3, 16)], n=4, max_tokens=90, **NO_END)
        self.sim.step()
        self.sim.add(self.ids["single"], [*range(3, 15), 50], max_tokens=90, **NO_END)
        self.sim.add(self.ids["away"], [*range(40, 53)], max_tokens=90, **NO_END)
        for _ in range(4):
            self.sim.step()
        self.sim.preempt(self.ids["away"], by_swap=True)
        self.sim.step()
        assert all(self.counts().values()), self.counts()

    def snapshot(self) -> BlockSnapshot:
        return self.sim.engine.block_map()

    def counts(self) -> dict[str, int]:
        """How many blocks are what, by the books and the block tables."""
        stats, live = self.sim.engine.stats(), self.sim.engine.live_sequences()
        tables = [block for sequence in live for block in sequence.block_table]
        shared = len({block for block in tables if tables.count(block) > 1})
        return {
            "free": stats.blocks_free - stats.blocks_cached,
            "cached": stats.blocks_cached,
            "used": stats.blocks_used - shared,
            "shared": shared,
            "swapped": stats.swap_blocks_used,
        }

    def cells(self) -> dict[str, int]:
        """The same with the free blocks of the host, which have cells too."""
        stats = self.sim.engine.stats()
        counts = self.counts()
        counts["free"] += stats.swap_blocks_total - counts["swapped"]
        return {name: number for name, number in counts.items() if number}

    def sequence(self, name: str, index: int = 0) -> Any:
        [found] = [
            s
            for s in self.sim.engine.live_sequences()
            if (s.request_id, s.child_index) == (self.ids[name], index)
        ]
        return found

    def told(self, name: str, index: int = 0) -> str:
        digits = self.ids[name].split("-")[0][-6:]
        tokens = self.sequence(name, index).num_tokens
        return f"job …{digits}, output {index}, {tokens} tokens"


@pytest.fixture
def busy(stand_in_worker: Any) -> BusyEngine:
    engine = BusyEngine()
    stand_in_worker.engine.snapshot = engine.snapshot()
    return engine


@pytest.fixture
def page(open_tab: Callable[..., Iterator[Page]], gateway: Any, busy: BusyEngine) -> Iterator[Page]:
    for page in open_tab(f"{gateway.url}/status"):
        expect_counts(page, busy.counts())
        yield page


def expect_counts(page: Page, counts: dict[str, int]) -> None:
    words = [f"{number:,} {name}" for name, number in counts.items()]
    legend = re.compile(r"\s*".join(map(re.escape, words)))
    expect(page.locator(".legend")).to_have_text(legend)


def cells(page: Page) -> Any:
    return page.locator("canvas").evaluate(COUNT_CELLS)


def point(page: Page, block: int, *, first_row: int = 0) -> None:
    """Move the pointer to a block, counted from the beginning of a row."""
    canvas = page.locator("canvas")
    canvas.scroll_into_view_if_needed()
    columns, size = (int(canvas.get_attribute(f"data-{n}") or 0) for n in ("columns", "size"))
    box = canvas.bounding_box()
    assert box is not None
    row, column = divmod(block, columns)
    page.mouse.move(
        box["x"] + (column + 0.5) * size, box["y"] + (first_row + row + 0.5) * size, steps=2
    )


def test_the_cells_are_the_engines_books_and_follow_them(
    page: Page, stand_in_worker: Any, busy: BusyEngine
) -> None:
    assert cells(page) == busy.cells()
    for _ in range(6):
        busy.sim.step()
    stand_in_worker.engine.snapshot = busy.snapshot()
    expect_counts(page, busy.counts())
    assert cells(page) == busy.cells()


def test_dark_and_light_change_while_it_is_open(page: Page, busy: BusyEngine) -> None:
    colours = []
    for scheme in ("dark", "light"):
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        is_dark = "want => matchMedia('(prefers-color-scheme: dark)').matches === want"
        page.wait_for_function(is_dark, arg=scheme == "dark")
        assert cells(page) == busy.cells()
        colours.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(set(colours)) == 2


def test_the_pointer_tells_who_is_behind_a_block(page: Page, busy: BusyEngine) -> None:
    tip = page.locator(".tip")
    expect(tip).to_be_hidden()
    shared = busy.sequence("forked").block_table[0]
    point(page, shared)
    expect(tip).to_have_text(
        f"Block {shared}: shared by 5 sequences; the first: {busy.told('forked')}"
    )
    own = busy.sequence("forked", 2).block_table[-1]
    point(page, own)
    expect(tip).to_have_text(f"Block {own}: used; {busy.told('forked', 2)}")
    away = busy.sequence("away").host_table[0]
    device_rows = -(-60 // int(page.locator("canvas").get_attribute("data-columns") or 1))
    point(page, away, first_row=device_rows + 1)
    expect(tip).to_have_text(f"Host block {away}: swapped; {busy.told('away')}")
    page.mouse.move(1, 1)
    expect(tip).to_be_hidden()
    assert cells(page) == busy.cells()  # nothing is marked any more


def test_the_keyboard_goes_from_block_to_block(page: Page, busy: BusyEngine) -> None:
    tip = page.locator(".tip")
    page.locator("canvas").focus()
    expect(tip).to_contain_text("Block 0: ")
    page.keyboard.press("End")
    expect(tip).to_contain_text("Host block 13: ")
    page.keyboard.press("Home")
    for _ in range(busy.sequence("single").block_table[-1]):
        page.keyboard.press("ArrowRight")
    expect(tip).to_contain_text(busy.told("single"))
    page.keyboard.press("Home")
    page.keyboard.press("ArrowLeft")
    expect(tip).to_contain_text("Block 0: ")
    page.keyboard.press("Tab")
    expect(tip).to_be_hidden()
    label = page.locator("canvas").get_attribute("aria-label") or ""
    for name, number in busy.counts().items():
        assert f"{number} {name}" in label


def test_a_worker_that_dies_while_it_is_shown_is_marked_and_its_map_is_pale(
    page: Page, stand_in_worker: Any
) -> None:
    expect(page.locator(".state")).to_have_text("serving")
    stand_in_worker.die()
    expect(page.locator(".state")).to_have_text(re.compile("late|gone"))
    expect(page.locator(".worker.stale")).to_be_visible()
    expect(page.locator("canvas")).to_be_visible()  # what it held last


def test_a_worker_that_leaves_goes_and_another_comes(
    page: Page, stand_in_worker: Any, start_stand_in: Callable[..., Any]
) -> None:
    start_stand_in(name="another-worker")
    expect(page.locator("h3")).to_contain_text(["another-worker", "stand-in-worker"])
    stand_in_worker.stop()
    expect(page.locator("h3")).to_have_count(1)
    expect(page.locator("h3")).to_contain_text("another-worker")


def test_queues_without_workers_say_so(
    open_tab: Callable[..., Iterator[Page]], start_gateway: Callable[..., Any], queue: str
) -> None:
    gateway = start_gateway(queues=(f"{queue}-a", f"{queue}-b"))
    for page in open_tab(f"{gateway.url}/status"):
        expect(page.locator("h2")).to_contain_text([f"{queue}-a", f"{queue}-b"])
        expect(page.get_by_text("No worker serves this queue.")).to_have_count(2)
        expect(page.locator("[data-is=waiting]").first).to_have_text("0")
        expect(page.locator("svg").first).to_have_attribute("aria-label", re.compile("0 wait"))


@pytest.mark.slow
def test_a_server_that_goes_away_is_said_and_what_was_known_is_pale(
    open_tab: Callable[..., Iterator[Page]],
    start_gateway: Callable[..., Any],
) -> None:
    with EmbeddedServer() as server:
        gateway = start_gateway(redis_url=server.url)
        tabs = open_tab(f"{gateway.url}/status")
        page = next(tabs)
        expect(page.locator("[data-is=running]")).to_have_text("0")
        expect(page.locator("[data-is=unreached]")).to_be_hidden()
    expect(page.locator("[data-is=unreached]")).to_be_visible()
    expect(page.locator(".tiles.old")).to_be_visible()
    assert list(tabs) == []


def test_without_a_key_it_asks_for_one_and_keeps_it_in_the_tab(
    open_tab: Callable[..., Iterator[Page]],
    start_gateway: Callable[..., Any],
    stand_in_worker: Any,
    tmp_path: Path,
) -> None:
    keys = tmp_path / "keys.json"
    digest = hashlib.sha256(b"sk-right").hexdigest()
    keys.write_text(json.dumps([{"name": "one", "sha256": digest}]))
    gateway = start_gateway(api_keys_file=keys)
    for page in open_tab(f"{gateway.url}/status"):
        expect(page.locator("#key")).to_be_focused()
        page.keyboard.type("sk-wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#problem")).to_contain_text("Incorrect API key")
        page.locator("#key").fill("sk-right")
        page.keyboard.press("Enter")
        expect(page.locator("h3")).to_contain_text("stand-in-worker")
        expect(page.locator("#ask")).to_be_hidden()
        expect(page.locator("#problem")).to_be_hidden()
        page.reload()
        expect(page.locator("h3")).to_contain_text("stand-in-worker")
        assert "sk-right" not in page.url
        assert page.evaluate("localStorage.length + document.cookie.length") == 0


def test_a_hundred_thousand_blocks_are_all_there(
    open_tab: Callable[..., Iterator[Page]], gateway: Any, stand_in_worker: Any
) -> None:
    runs = [number for _ in range(25_000) for number in (1, 2, 1, 7, 1, 3, 2, 8, 2, 0, 0, 0)]
    sequences = [HoldingSequence("abc123", index, 1_000) for index in range(9)]
    stand_in_worker.engine.snapshot = BlockSnapshot(100_000, 0, runs, sequences)
    for page in open_tab(f"{gateway.url}/status"):
        expect(page.locator(".legend")).to_contain_text("50,000 free")
        assert cells(page) == {"free": 50_000, "used": 25_000, "shared": 25_000}
        point(page, 99_997)
        expect(page.locator(".tip")).to_have_text(
            "Block 99997: shared by 2 sequences; the first: job …abc123, output 8, 1000 tokens"
        )


def test_it_fits_a_phone(
    open_tab: Callable[..., Iterator[Page]], gateway: Any, busy: BusyEngine
) -> None:
    options = {"viewport": {"width": 360, "height": 640}, "color_scheme": "dark"}
    for page in open_tab(f"{gateway.url}/status", **options):
        page.locator(".worker").scroll_into_view_if_needed()  # blocks are asked for when in view
        expect_counts(page, busy.counts())
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert cells(page) == busy.cells()
