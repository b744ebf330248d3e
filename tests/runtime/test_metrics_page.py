"""The text of metrics: both forms that monitoring asks for, through the health port."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from inferq.runtime.health import HealthServer
from inferq.runtime.histogram import Histogram
from inferq.runtime.metrics import Families, MetricsPage

#: What Prometheus sends.
ACCEPT = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.1"


@pytest.fixture
def page() -> MetricsPage:
    make, histogram = Families({"queue": "chat"}), Histogram((0.5, 2))
    histogram.observe(1.5, 3)

    def collect() -> Any:
        yield make.counters("inferq_things", "Things", ("kind",), {("a",): 1, ("b",): 2})
        yield make.gauge("inferq_level", 'A "level"\n', 2.5)
        yield make.histogram("inferq_wait_seconds", "Waits", histogram)

    return MetricsPage("1.2.3", collect)


@pytest.mark.parametrize("accept", ["", "*/*", "text/plain", ACCEPT])
async def test_both_forms_say_the_same(page: MetricsPage, accept: str, metrics_text: Any) -> None:
    kind, text = await page.answer(accept)
    is_openmetrics = accept == ACCEPT
    assert kind.startswith("application/openmetrics-text" if is_openmetrics else "text/plain;")
    scrape = metrics_text.Scrape(text.decode(), openmetrics=is_openmetrics)
    assert scrape.value("inferq_things_total", kind="b", queue="chat") == 2
    assert scrape.value("inferq_level", queue="chat") == 2.5
    assert scrape.value("inferq_wait_seconds_bucket", le="0.5") == 0
    assert scrape.value("inferq_wait_seconds_bucket", le="+Inf") == 3
    assert scrape.value("inferq_wait_seconds_sum") == 4.5
    assert scrape.value("inferq_build_info", version="1.2.3") == 1
    assert scrape.value("process_resident_memory_bytes") > 2**20
    assert not [name for name, _ in scrape.series if name.endswith("_created")]


async def test_the_health_port_answers_pages_by_what_the_client_accepts(page: MetricsPage) -> None:
    checks = {"/livez": lambda: None}
    pages = {"/metrics": page.answer}
    async with (
        HealthServer(checks, port=0, host="127.0.0.1", pages=pages) as server,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as client,
    ):
        plain = await client.get("/metrics?x=1")
        assert plain.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert "inferq_level" in plain.text
        other = await client.get("/metrics", headers={"accept": ACCEPT})
        assert other.headers["content-type"].startswith("application/openmetrics-text")
        assert other.text.endswith("# EOF\n")
        assert (await client.head("/metrics")).content == b""
        assert (await client.get("/livez")).text == "ok\n"
        assert (await client.get("/")).text == "there are /livez, /metrics\n"
        assert (await client.post("/metrics")).status_code == 405


async def test_a_page_is_brought_up_to_date_before_it_is_told(metrics_text: Any) -> None:
    level = 0

    async def refresh() -> None:
        nonlocal level
        level += 1

    page = MetricsPage("1", lambda: [Families().gauge("level", "", level)], refresh=refresh)
    for expected in (1, 2):
        _, text = await page.answer("")
        assert metrics_text.Scrape(text.decode()).value("level") == expected


async def test_two_pages_share_nothing() -> None:
    first = MetricsPage("1", lambda: [Families().gauge("of_the_first", "", 1)])
    second = MetricsPage("1", lambda: [Families().gauge("of_the_second", "", 1)])
    assert b"of_the_second" not in (await first.answer(""))[1]
    assert b"of_the_first" not in (await second.answer(""))[1]
