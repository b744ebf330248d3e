"""The batches API as it stands before `inferq tasks` runs a batch: create, look, page, cancel."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

pytestmark = pytest.mark.usefixtures("no_batches")

LINE = b'{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {}}\n'
FIELDS = {
    *("id", "object", "endpoint", "model", "errors", "input_file_id", "completion_window"),
    *("status", "output_file_id", "error_file_id", "created_at", "in_progress_at", "expires_at"),
    *("finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at"),
    *("cancelled_at", "request_counts", "usage", "metadata"),
}


@pytest.fixture
def gateway(start_gateway: Callable[..., Any], tmp_path: Path) -> Any:
    return start_gateway(batch_storage=str(tmp_path / "storage"))


@pytest.fixture
def body(http: httpx.Client) -> dict[str, Any]:
    """A request for a batch of a file that is there."""
    return request_for(http)


def request_for(http: httpx.Client, **options: Any) -> dict[str, Any]:
    sent = {"data": {"purpose": "batch"}, "files": {"file": ("in.jsonl", LINE)}}
    file_id = http.post("/v1/files", **sent, **options).json()["id"]
    return {
        "input_file_id": file_id,
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }


def create(http: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
    answer = http.post("/v1/batches", json=body)
    assert answer.status_code == 200, answer.text
    made: dict[str, Any] = answer.json()
    return made


def error_of(answer: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def test_a_batch_is_an_object_of_openai_s_at_once(http: httpx.Client, body: dict[str, Any]) -> None:
    began = int(time.time())
    made = create(http, {**body, "metadata": {"customer": "7"}})
    assert set(made) == FIELDS
    assert made["id"].startswith("batch_")
    assert began <= made["created_at"] <= time.time()
    assert made["expires_at"] == made["created_at"] + 24 * 3600
    shown = {name: made[name] for name in ("object", "status", "endpoint", "completion_window")}
    assert shown == {
        "object": "batch",
        "status": "validating",
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }
    assert made["input_file_id"] == body["input_file_id"]
    assert made["metadata"] == {"customer": "7"}
    assert made["request_counts"] == {"total": 0, "completed": 0, "failed": 0}
    assert made["usage"]["total_tokens"] == 0
    nothing = FIELDS - set(shown) - {"id", "created_at", "expires_at", "input_file_id", "metadata"}
    assert all(made[name] is None for name in nothing - {"request_counts", "usage"})
    assert http.get(f"/v1/batches/{made['id']}").json() == made


def test_openai_s_client_pages_and_cancels(
    openai_client: openai.OpenAI, http: httpx.Client, body: dict[str, Any]
) -> None:
    ids = {create(http, body)["id"] for _ in range(3)}
    assert {each.id for each in openai_client.batches.list(limit=2)} == ids
    first = openai_client.batches.list(limit=2)
    assert (len(first.data), first.has_more) == (2, True)
    cancelled = openai_client.batches.cancel(first.data[0].id)
    assert cancelled.status in ("cancelling", "cancelled")
    assert cancelled.cancelling_at is not None
    assert openai_client.batches.cancel(first.data[0].id).id == cancelled.id
    assert openai_client.batches.retrieve(cancelled.id).status == cancelled.status


def test_a_repeated_request_makes_no_second_batch(http: httpx.Client, body: dict[str, Any]) -> None:
    headers = {"Idempotency-Key": "k"}
    made = [http.post("/v1/batches", json=body, headers=headers).json() for _ in range(2)]
    assert made[0] == made[1]
    assert len(http.get("/v1/batches").json()["data"]) == 1
    other = http.post("/v1/batches", json={**body, "metadata": {"a": "b"}}, headers=headers)
    assert (other.status_code, error_of(other)["code"]) == (409, "idempotency_conflict")
    assert create(http, body)["id"] != made[0]["id"]


def test_the_input_of_a_batch_that_goes_on_cannot_be_deleted(
    http: httpx.Client, body: dict[str, Any]
) -> None:
    create(http, body)
    answer = http.delete(f"/v1/files/{body['input_file_id']}")
    assert (answer.status_code, error_of(answer)["code"]) == (409, "file_in_use")
    assert http.get(f"/v1/files/{body['input_file_id']}/content").content == LINE


def test_a_bad_request_is_a_400_that_names_the_field(
    http: httpx.Client, body: dict[str, Any]
) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"endpoint": None}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"input_file_id": 7}, "input_file_id"),
        ({"input_file_id": ""}, "input_file_id"),
        ({"metadata": {"k": 1}}, "metadata.k"),
        ({"metadata": {"k": "v" * 513}}, "metadata.k"),
        ({"metadata": {"k" * 65: "v"}}, "metadata"),
        ({"metadata": {str(number): "v" for number in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at"}}, "output_expires_after.seconds"),
        ({"output_expires_after": {"anchor": "now", "seconds": 3600}}, "output_expires_after"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after"),
        ({"window": "24h"}, "window"),
    ]
    for changes, param in wrong:
        answer = http.post("/v1/batches", json={**body, **changes})
        assert answer.status_code == 400, changes
        assert error_of(answer)["param"].startswith(param), answer.text
    for name in body:
        answer = http.post("/v1/batches", json={k: v for k, v in body.items() if k != name})
        assert error_of(answer)["code"] == "missing_required_parameter"
    for content in (b"", b"[]", b"{"):
        assert http.post("/v1/batches", content=content).status_code == 400
    most = {str(number): "v" * 512 for number in range(16)}
    expiry = {"anchor": "created_at", "seconds": 3600}
    made = create(http, {**body, "metadata": most, "output_expires_after": expiry})
    assert made["metadata"] == most


def test_what_is_not_there_is_a_404(http: httpx.Client, body: dict[str, Any]) -> None:
    for file_id in ("file-" + "0" * 32, "nothing"):
        answer = http.post("/v1/batches", json={**body, "input_file_id": file_id})
        assert (answer.status_code, error_of(answer)["param"]) == (404, "input_file_id")
    for batch_id in ("batch_" + "0" * 32, "nothing", "%00", "x" * 5000):
        for method, path in (("GET", ""), ("POST", "/cancel")):
            answer = http.request(method, f"/v1/batches/{batch_id}{path}")
            assert answer.status_code == 404, batch_id
            assert error_of(answer)["code"] in ("batch_not_found", "unknown_url")


def test_a_bad_query_is_a_400(http: httpx.Client) -> None:
    for name, values in {
        "limit": ("0", "101", "many"),
        "after": ("batch_nowhere", "batch_" + "0" * 32),
    }.items():
        for value in values:
            answer = http.get("/v1/batches", params={name: value})
            assert (answer.status_code, error_of(answer)["param"]) == (400, name), value


@pytest.fixture
def keyed(start_gateway: Callable[..., Any], tmp_path: Path) -> Callable[..., httpx.Client]:
    """Clients of a gateway with keys: `alice` may do everything, `bob` is as the test says."""

    def make(**bob: Any) -> tuple[httpx.Client, httpx.Client]:
        entries = [
            {"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest(), **more}
            for name, more in (("alice", {}), ("bob", bob))
        ]
        (tmp_path / "keys.json").write_text(json.dumps(entries))
        running = start_gateway(
            batch_storage=str(tmp_path / "storage"), api_keys_file=tmp_path / "keys.json"
        )
        return tuple(
            httpx.Client(base_url=running.url, headers={"Authorization": f"Bearer {name}"})
            for name in ("alice", "bob")
        )

    return make


def test_a_key_s_batches_are_no_other_s(keyed: Callable[..., Any]) -> None:
    alice, bob = keyed()
    with alice, bob:
        body = request_for(alice)
        answer = bob.post("/v1/batches", json=body)
        assert (answer.status_code, error_of(answer)["code"]) == (404, "file_not_found")
        made = create(alice, body)
        for method, path in (("GET", ""), ("POST", "/cancel")):
            answer = bob.request(method, f"/v1/batches/{made['id']}{path}")
            assert (answer.status_code, error_of(answer)["code"]) == (404, "batch_not_found")
        assert bob.get("/v1/batches").json()["data"] == []
        assert bob.get("/v1/batches", params={"after": made["id"]}).status_code == 400
        assert alice.get(f"/v1/batches/{made['id']}").json()["status"] == "validating"


def test_a_key_without_the_low_lane_has_no_batches(keyed: Callable[..., Any]) -> None:
    alice, bob = keyed(lanes=["normal", "high"])
    with alice, bob:
        answer = bob.post("/v1/batches", json=request_for(bob))
        assert (answer.status_code, error_of(answer)["code"]) == (403, "lane_not_allowed")


def test_batches_count_as_requests_of_their_key(keyed: Callable[..., Any]) -> None:
    alice, bob = keyed(requests_per_minute=2, tokens_per_minute=1, max_concurrency=1)
    with alice, bob:
        body = request_for(bob)
        create(bob, body)
        answer = bob.post("/v1/batches", json=body)
        assert (answer.status_code, error_of(answer)["code"]) == (429, "rate_limit_exceeded")
        assert len(bob.get("/v1/batches").json()["data"]) == 1
