"""The page in headless Chromium: prompt, stream, reload, stop, keys; nothing leaves its origin."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from inferq import Client

STORY = "Once upon a time there was a queue in which everyone was served in turn. " * 4


@pytest.fixture
def page(open_tab: Callable[..., Iterator[Page]], gateway: Any) -> Iterator[Page]:
    """The gateway's page in a tab of its own."""
    yield from open_tab(gateway.url)


def ask(page: Page, prompt: str) -> None:
    expect(page.locator("#dot")).to_have_class("dot good")
    page.locator("#prompt").fill(prompt)
    page.keyboard.press("Enter")


def wait_for_end(page: Page) -> None:
    expect(page.locator("#send")).to_be_visible()
    expect(page.locator("#stop")).to_be_hidden()


def answer(page: Page) -> str:
    text: str = page.locator(".turn.assistant, .turn.continuation").last.evaluate(
        "e => e.textContent"
    )
    return text


def job_of(page: Page) -> str:
    """The job that the page follows."""
    page.wait_for_function("JSON.parse(sessionStorage['inferq.conversation']).run?.id")
    job_id: str = page.evaluate("JSON.parse(sessionStorage['inferq.conversation']).run.id")
    return job_id


def test_an_answer_goes_on_after_a_reload_and_is_the_jobs_result(
    page: Page, stand_in_worker: Any
) -> None:
    stand_in_worker.say(STORY)
    stand_in_worker.slow_down(0.05)
    ask(page, "Tell me a story.")
    expect(page.locator(".turn.assistant")).to_contain_text("Once upon")
    job_id = job_of(page)
    before = answer(page)
    page.reload()
    expect(page.locator(".turn.user")).to_have_text("Tell me a story.")
    expect(page.locator(".turn.assistant")).to_contain_text(before.strip())
    assert len(answer(page)) < len(STORY)  # it was in the middle
    stand_in_worker.slow_down(0.002)
    wait_for_end(page)

    with Client(stand_in_worker.url, queue=stand_in_worker.queue) as client:
        [output] = client.job(job_id).result(timeout_s=60).outputs
    assert answer(page) == output.text == STORY
    assert len(stand_in_worker.engine.requests) == 1
    page.reload()
    assert answer(page) == STORY


def test_a_request_whose_reply_is_lost_is_not_a_second_job(
    page: Page, stand_in_worker: Any
) -> None:
    keys: list[str] = []

    def lose_the_first(route: Route) -> None:
        keys.append(route.request.headers["idempotency-key"])
        if len(keys) > 1:
            route.continue_()
            return
        route.fetch()
        route.abort("connectionreset")

    stand_in_worker.say("The one and only answer.")
    page.route("**/v1/chat/completions", lose_the_first)
    ask(page, "Are you there?")
    expect(page.locator(".turn.assistant")).to_have_text("The one and only answer.")
    wait_for_end(page)
    assert len(keys) == 2
    assert len(set(keys)) == 1
    assert len(stand_in_worker.engine.requests) == 1


def test_a_stream_that_its_gateway_ends_goes_on_at_the_next(
    open_tab: Any, stand_in_worker: Any, start_gateway: Callable[..., Any]
) -> None:
    stand_in_worker.say(STORY)
    stand_in_worker.slow_down(0.05)
    first = start_gateway()
    for page in open_tab(first.url):
        ask(page, "Tell me a story.")
        expect(page.locator(".turn.assistant")).to_contain_text("Once upon")
        with page.expect_request(
            lambda request: "/v1/streams/" in request.url and request.response() is not None
        ) as resumed:
            first.stop()
            start_gateway(port=int(first.url.rpartition(":")[2]))
        assert "last-event-id" in resumed.value.headers
        stand_in_worker.slow_down(0.002)
        wait_for_end(page)
        assert answer(page) == STORY
    assert len(stand_in_worker.engine.requests) == 1


@pytest.mark.parametrize("way", ["button", "key"])
def test_stop_cancels_the_job_and_keeps_what_came(
    page: Page, stand_in_worker: Any, way: str
) -> None:
    stand_in_worker.slow_down(0.05)
    ask(page, "Go on for ever.")
    expect(page.locator(".turn.assistant")).to_contain_text("quick")
    if way == "button":
        page.locator("#stop").click()
    else:
        page.keyboard.press("Escape")
    expect(page.locator("#status")).to_have_text("Stopped")
    expect(page.locator("#problem")).to_be_hidden()
    wait_for_end(page)
    assert len(stand_in_worker.engine.aborted) == 1
    kept = answer(page)
    page.reload()
    assert answer(page) == kept


def test_without_the_right_key_it_says_so_and_with_it_it_works(
    open_tab: Any,
    stand_in_worker: Any,
    start_gateway: Callable[..., Any],
    tmp_path: Path,
) -> None:
    keys = tmp_path / "keys.json"
    digest = hashlib.sha256(b"sk-right").hexdigest()
    keys.write_text(json.dumps([{"name": "one", "sha256": digest}]))
    gateway = start_gateway(api_keys_file=keys)
    stand_in_worker.say("Welcome.")
    for page in open_tab(gateway.url):
        expect(page.locator("#model")).to_contain_text("needs an API key")
        page.locator("#key").fill("sk-wrong")
        page.locator("#prompt").fill("Hello?")
        page.keyboard.press("Enter")
        expect(page.locator("#problem")).to_contain_text("Incorrect API key")
        expect(page.locator("#key")).to_be_focused()

        page.locator("#key").fill("sk-right")
        page.keyboard.press("Tab")
        ask(page, "Hello?")
        expect(page.locator(".turn.assistant")).to_have_text("Welcome.")
        expect(page.locator("#problem")).to_be_hidden()
        assert "sk-right" not in page.url
        assert page.evaluate("localStorage.length + document.cookie.length") == 0
        page.reload()
        expect(page.locator("#key")).to_have_value("sk-right")


def test_the_parameters_reach_the_worker_and_an_impossible_one_is_refused_here(
    page: Page, stand_in_worker: Any
) -> None:
    page.get_by_text("Completion").click()
    for name, value in {
        "max_tokens": "7",
        "temperature": "0.5",
        "seed": "3",
        "top_p": "1.5",
    }.items():
        page.locator(f"#{name}").fill(value)
    page.locator("#stop_at").fill("dog\ncat")
    page.locator("#prompt").fill("Once")
    page.keyboard.press("Control+Enter")
    expect(page.locator("#top_p")).to_be_focused()
    assert stand_in_worker.engine.requests == []

    page.locator("#top_p").fill("0.9")
    page.locator("#prompt").focus()
    page.keyboard.press("Control+Enter")
    expect(page.locator("#status")).to_contain_text("7 tokens")
    params = stand_in_worker.last_request
    assert (params.max_tokens, params.temperature, params.top_p) == (7, 0.5, 0.9)
    assert (params.seed, params.stop) == (3, ("dog", "cat"))
    assert page.locator(".turn.given").text_content() == "Once"


def test_what_the_gateway_refuses_is_shown_in_its_words(page: Page) -> None:
    page.locator("#seed").fill("1e30")
    ask(page, "Hello?")
    expect(page.locator("#problem")).to_contain_text("seed")
    wait_for_end(page)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_and_every_field_has_a_label(
    open_tab: Any, gateway: Any, scheme: str
) -> None:
    options = {"viewport": {"width": 360, "height": 640}, "color_scheme": scheme}
    for page in open_tab(gateway.url, **options):
        page.get_by_role("button", name="Settings").click()
        expect(page.locator("#panel")).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        unlabelled = page.evaluate(
            "[...document.querySelectorAll('input, select, textarea')]"
            ".filter((field) => field.labels.length === 0).map((field) => field.id)"
        )
        assert unlabelled == []
        page.get_by_role("button", name="Settings").click()
        expect(page.locator("#panel")).to_be_hidden()
        ask(page, "Hello?")
        expect(page.locator(".turn.assistant")).to_contain_text("quick")
        page.locator("#stop").click()
        wait_for_end(page)
