"""The files API: upload, look, page, download, delete; one key's files are no other's."""

from __future__ import annotations

import hashlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from inferq.producer.batches.storage import FileStorage
from inferq.producer.gateway import batch_files
from inferq.producer.gateway.routes import files as files_module

pytestmark = pytest.mark.usefixtures("no_batches")

LINE = b'{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {}}\n'
FIELDS = {
    *("id", "object", "bytes", "created_at", "expires_at", "filename", "purpose"),
    *("status", "status_details"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "storage"


@pytest.fixture
def gateway(start_gateway: Callable[..., Any], folder: Path) -> Any:
    return start_gateway(batch_storage=str(folder))


def stored(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def upload(http: httpx.Client, name: str = "in.jsonl", **options: Any) -> dict[str, Any]:
    answer = http.post(
        "/v1/files", data={"purpose": "batch"}, files={"file": (name, LINE)}, **options
    )
    assert answer.status_code == 200, answer.text
    made: dict[str, Any] = answer.json()
    return made


def error_of(answer: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def test_openai_s_client_uploads_looks_downloads_and_deletes(
    openai_client: openai.OpenAI, folder: Path, tmp_path: Path
) -> None:
    content = LINE * 10_000
    (tmp_path / "requests.jsonl").write_bytes(content)
    began = int(time.time())
    made = openai_client.files.create(file=tmp_path / "requests.jsonl", purpose="batch")
    assert made.id.startswith("file-")
    assert (made.filename, made.bytes, made.purpose) == ("requests.jsonl", len(content), "batch")
    assert (made.object, made.status) == ("file", "processed")
    assert began <= made.created_at <= time.time()
    assert made.expires_at is not None
    assert made.expires_at > made.created_at
    assert openai_client.files.retrieve(made.id) == made
    assert openai_client.files.wait_for_processing(made.id) == made
    assert openai_client.files.list().data == [made]
    assert openai_client.files.content(made.id).read() == content
    with openai_client.files.with_streaming_response.content(made.id) as streamed:
        assert streamed.headers["content-length"] == str(len(content))
        assert b"".join(streamed.iter_bytes()) == content
    gone = openai_client.files.delete(made.id)
    assert (gone.id, gone.deleted, gone.object) == (made.id, True, "file")
    with pytest.raises(openai.NotFoundError):
        openai_client.files.retrieve(made.id)
    assert openai_client.files.list().data == []
    assert stored(folder) == []


def test_a_file_expires_when_its_owner_says(openai_client: openai.OpenAI) -> None:
    made = openai_client.files.create(
        file=("in.jsonl", LINE),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 7200},
    )
    assert made.expires_at == made.created_at + 7200
    with pytest.raises(openai.BadRequestError) as raised:
        openai_client.files.create(
            file=("in.jsonl", LINE),
            purpose="batch",
            expires_after={"anchor": "created_at", "seconds": 60},
        )
    assert raised.value.param == "expires_after[seconds]"


def test_every_field_is_there_and_a_download_is_named(http: httpx.Client) -> None:
    made = upload(http, "Fragen ü.jsonl")
    assert set(made) == FIELDS
    answer = http.get(f"/v1/files/{made['id']}/content")
    assert answer.content == LINE
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["x-content-type-options"] == "nosniff"
    named = answer.headers["content-disposition"]
    assert named == "attachment; filename*=UTF-8''Fragen%20%C3%BC.jsonl"


def test_lists_come_in_pages_in_either_order(http: httpx.Client) -> None:
    ids = [upload(http, f"{number}.jsonl")["id"] for number in range(5)]
    whole = [each["id"] for each in http.get("/v1/files", params={"order": "asc"}).json()["data"]]
    assert sorted(whole) == sorted(ids)
    for order, expected in (("asc", whole), ("desc", whole[::-1])):
        seen: list[str] = []
        more: dict[str, str] = {}
        while True:
            page = http.get("/v1/files", params={"limit": 2, "order": order, **more}).json()
            found = [each["id"] for each in page["data"]]
            assert (page["object"], page["first_id"], page["last_id"]) == (
                *("list", found[0]),
                found[-1],
            )
            seen += found
            if not page["has_more"]:
                break
            more = {"after": page["last_id"]}
        assert seen == expected
    assert http.get("/v1/files", params={"purpose": "batch"}).json()["data"] != []
    nothing = http.get("/v1/files", params={"purpose": "batch_output"}).json()
    assert nothing == {
        "object": "list",
        "data": [],
        "first_id": None,
        "last_id": None,
        "has_more": False,
    }


def test_openai_s_client_pages_by_itself(openai_client: openai.OpenAI, http: httpx.Client) -> None:
    ids = [upload(http)["id"] for _ in range(3)]
    assert sorted(each.id for each in openai_client.files.list(limit=1)) == sorted(ids)


def test_a_bad_query_is_a_400(http: httpx.Client) -> None:
    for name, values in {
        "limit": ("0", "-1", "10001", "many", "1.5"),
        "order": ("up",),
        "after": ("file-nowhere",),
    }.items():
        for value in values:
            answer = http.get("/v1/files", params={name: value})
            assert answer.status_code == 400, value
            assert error_of(answer)["param"] == name


def test_a_file_that_is_not_there_is_a_404(http: httpx.Client) -> None:
    for file_id in ("file-" + "0" * 32, "nothing", "file-..%2F..%2Fetc", "%00", "x" * 5000):
        for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/content")):
            answer = http.request(method, f"/v1/files/{file_id}{path}")
            assert answer.status_code == 404, file_id
            assert error_of(answer)["code"] in ("file_not_found", "unknown_url")


def test_a_wrong_form_is_an_error_of_openai_s_shape_and_leaves_nothing(
    http: httpx.Client, folder: Path
) -> None:
    file = ("file", ("in.jsonl", LINE))
    wrong: list[tuple[dict[str, Any], int, str | None]] = [
        ({"files": [file], "data": {"purpose": "fine-tune"}}, 400, "purpose"),
        ({"files": [file]}, 400, "purpose"),
        ({"files": [file, file], "data": {"purpose": "batch"}}, 400, "file"),
        ({"files": [("other", ("in.jsonl", LINE))], "data": {"purpose": "batch"}}, 400, "other"),
        ({"json": {"purpose": "batch"}}, 415, None),
        ({"data": {"purpose": "batch"}}, 415, None),
        ({"content": b"x", "headers": {"content-type": "multipart/form-data"}}, 400, None),
        ({"files": [file], "headers": {"content-encoding": "gzip"}}, 415, "Content-Encoding"),
    ]
    for request, status, param in wrong:
        answer = http.post("/v1/files", **request)
        assert (answer.status_code, error_of(answer)["param"]) == (status, param), answer.text
    assert stored(folder) == []
    assert http.get("/v1/files").json()["data"] == []


def test_a_file_that_is_too_long_is_a_413_while_it_comes(
    http: httpx.Client, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_module, "MAX_FILE_BYTES", 500_000)
    just_right = {"file": ("in.jsonl", b"x" * 500_000)}
    assert http.post("/v1/files", data={"purpose": "batch"}, files=just_right).status_code == 200
    before = stored(folder)

    def endless() -> Iterator[bytes]:
        yield b'--cut\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
        for _ in range(100):
            yield b"x" * 20_000

    kind = {"content-type": "multipart/form-data; boundary=cut"}
    answer = http.post("/v1/files", content=endless(), headers=kind)
    assert answer.status_code == 413
    assert error_of(answer)["code"] == "request_too_large"
    announced = {"file": ("in.jsonl", b"x" * 700_000)}
    assert http.post("/v1/files", data={"purpose": "batch"}, files=announced).status_code == 413
    assert stored(folder) == before


def test_a_client_that_goes_away_midway_leaves_nothing(
    http: httpx.Client, gateway: Any, folder: Path
) -> None:
    url = httpx.URL(gateway.url)
    head = (
        "POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Length: 10000000\r\n"
        "Content-Type: multipart/form-data; boundary=cut\r\n\r\n"
        '--cut\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        '--cut\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
    )
    with socket.create_connection((url.host, url.port)) as connection:
        connection.sendall(head.encode() + b"x" * 2_000_000)
        wait_for(lambda: stored(folder) != [])
    wait_for(lambda: stored(folder) == [])
    assert http.get("/v1/files").json()["data"] == []
    wait_for(lambda: http.get("/health").json()["requests"] == 0)


def test_a_storage_that_fails_is_a_503_and_a_lost_file_a_404_that_can_be_deleted(
    http: httpx.Client, folder: Path
) -> None:
    made = upload(http)
    for path in stored(folder):
        path.unlink()
    answer = http.get(f"/v1/files/{made['id']}/content")
    assert (answer.status_code, error_of(answer)["code"]) == (404, "file_not_found")
    folder.rmdir()
    folder.write_bytes(b"a file where the folder was")
    answer = http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("f", LINE)})
    assert (answer.status_code, error_of(answer)["code"]) == (503, "storage_unavailable")
    assert "Retry-After" in answer.headers
    assert len(http.get("/v1/files").json()["data"]) == 1
    assert http.delete(f"/v1/files/{made['id']}").json()["deleted"] is True
    assert http.get("/v1/files").json()["data"] == []


def test_beyond_what_may_be_held_uploads_and_downloads_are_503s(
    http: httpx.Client, gateway: Any
) -> None:
    made = upload(http)
    held = gateway.app.state.gateway.batches.memory
    held.take(batch_files.MAX_HELD_BYTES)
    try:
        answers = [
            http.get(f"/v1/files/{made['id']}/content"),
            http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("f", LINE)}),
        ]
    finally:
        held.take(-batch_files.MAX_HELD_BYTES)
    for answer in answers:
        assert (answer.status_code, error_of(answer)["code"]) == (503, "overloaded")
        assert "Retry-After" in answer.headers
    assert http.get(f"/v1/files/{made['id']}/content").content == LINE


def test_an_upload_reserves_what_the_storage_holds_of_it(
    start_gateway: Callable[..., Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int | None] = []

    def writer_bytes(_: FileStorage, size: int | None) -> int:
        asked.append(size)
        return 0 if size is not None and size < 2000 else batch_files.MAX_HELD_BYTES

    monkeypatch.setattr(FileStorage, "writer_bytes", writer_bytes)
    with httpx.Client(base_url=start_gateway(batch_storage=str(folder)).url) as http:
        assert upload(http)["bytes"] == len(LINE)
        made = httpx.Request(
            "POST", "http://x", data={"purpose": "batch"}, files={"file": ("f", LINE * 30)}
        )
        kind, body = {"content-type": made.headers["content-type"]}, made.read()
        whole = http.post("/v1/files", content=body, headers=kind)
        streamed = http.post("/v1/files", content=iter([body]), headers=kind)
    for answer in (whole, streamed):
        assert (answer.status_code, error_of(answer)["code"]) == (503, "overloaded")
    assert asked[1:] == [len(body), None]
    assert len(stored(folder)) == 1


def test_a_key_s_files_are_no_other_s(
    start_gateway: Callable[..., Any], folder: Path, tmp_path: Path
) -> None:
    keys = [
        {"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest()}
        for name in ("alice", "bob")
    ]
    (tmp_path / "keys.json").write_text(json.dumps(keys))
    running = start_gateway(batch_storage=str(folder), api_keys_file=tmp_path / "keys.json")
    with httpx.Client(base_url=running.url) as http:
        assert http.get("/v1/files").status_code == 401
        alice, bob = ({"Authorization": f"Bearer {name}"} for name in ("alice", "bob"))
        file_id = upload(http, headers=alice)["id"]
        for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
            answer = http.request(method, f"/v1/files/{file_id}{path}", headers=bob)
            assert answer.status_code == 404
            assert error_of(answer)["code"] == "file_not_found"
        assert http.get("/v1/files", headers=bob).json()["data"] == []
        after = http.get("/v1/files", params={"after": file_id}, headers=bob)
        assert after.status_code == 400
        assert [each["id"] for each in http.get("/v1/files", headers=alice).json()["data"]] == [
            file_id
        ]
        assert http.delete(f"/v1/files/{file_id}", headers=alice).json()["deleted"] is True


def test_uploads_count_as_requests_of_their_key(
    start_gateway: Callable[..., Any], folder: Path, tmp_path: Path
) -> None:
    digest = hashlib.sha256(b"k").hexdigest()
    entry = {"name": "a", "sha256": digest, "requests_per_minute": 1, "max_concurrency": 1}
    (tmp_path / "keys.json").write_text(json.dumps([entry]))
    running = start_gateway(batch_storage=str(folder), api_keys_file=tmp_path / "keys.json")
    headers = {"Authorization": "Bearer k"}
    with httpx.Client(base_url=running.url, headers=headers) as http:
        upload(http)
        sent = {"data": {"purpose": "batch"}, "files": {"file": ("f", LINE)}}
        answer = http.post("/v1/files", **sent)
        assert answer.status_code == 429
        assert error_of(answer)["code"] == "rate_limit_exceeded"
        assert len(http.get("/v1/files").json()["data"]) == 1
        assert len(stored(folder)) == 1


def test_without_a_storage_every_route_says_which_setting_is_missing(
    start_gateway: Callable[..., Any],
) -> None:
    running = start_gateway()
    for route in (
        *("POST /v1/files", "GET /v1/files", "GET /v1/files/file-1", "DELETE /v1/files/file-1"),
        *("GET /v1/files/file-1/content", "POST /v1/batches", "GET /v1/batches"),
        *("GET /v1/batches/batch_1", "POST /v1/batches/batch_1/cancel"),
    ):
        method, path = route.split()
        answer = httpx.request(method, f"{running.url}{path}")
        assert answer.status_code == 501, route
        error = error_of(answer)
        assert error["code"] == "batches_not_configured"
        assert "INFERQ_BATCH_STORAGE" in error["message"]
        assert answer.headers["x-should-retry"] == "false"


def wait_for(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    give_up = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.02)
