"""API keys: digests in a file, read again when it changes, one header, and no word of them."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from inferq.producer.gateway.admission import keys as keys_module
from inferq.producer.gateway.admission.access import ANYONE, Access, KeyLimits
from inferq.producer.gateway.admission.keys import KeyRing
from inferq.producer.gateway.app import create_app
from inferq.producer.gateway.errors import HttpError
from inferq.producer.gateway.middleware import PUBLIC_PATHS, PUBLIC_PREFIX
from inferq.producer.gateway.settings import GatewaySettings
from inferq.protocol.errors import InvalidRequestError
from inferq.protocol.keys import Lane
from inferq.runtime.logs import configure_logging


def entry(name: str, key: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "sha256": hashlib.sha256(key.encode()).hexdigest(), **more}


def write(file: Path, *entries: dict[str, Any]) -> Path:
    file.write_text(json.dumps(entries))
    return file


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_a_key_says_what_its_owner_may_do(tmp_path: Path) -> None:
    limits = {"requests_per_minute": 3, "tokens_per_minute": 4, "max_concurrency": 5}
    alice = entry("alice", "ka", models=["m"], lanes=["low", "normal"], **limits)
    ring = KeyRing(write(tmp_path / "keys.json", entry("bob", "kb"), alice))
    assert ring.authenticate(bearer("kb")) == Access("bob")
    access = ring.authenticate(bearer("ka"))
    assert access.key_id == "alice"
    assert access.limits == KeyLimits(3, 4, 5)
    access.check_model("m")
    access.check_lane(Lane.LOW)
    with pytest.raises(HttpError) as raised:
        access.check_model("n")
    assert (raised.value.status, raised.value.code) == (403, "model_not_allowed")
    with pytest.raises(HttpError, match="may not use the high lane; it may use: normal, low"):
        access.check_lane(Lane.HIGH)


def test_without_a_file_anyone_may_call() -> None:
    assert KeyRing(None).authenticate({}) is ANYONE
    ANYONE.check_model("m")
    ANYONE.check_lane(Lane.HIGH)


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ({}, "No API key: send it in the header 'Authorization: Bearer KEY'."),
        ({"x-api-key": "good"}, r"'Authorization: Bearer KEY' \(x-api-key is not read\)"),
        ({"api-key": "good"}, r"'Authorization: Bearer KEY' \(api-key is not read\)"),
        ({"authorization": "good"}, "must be in the form 'Authorization: Bearer KEY'"),
        ({"authorization": "Basic good"}, "must be in the form"),
        ({"authorization": "Bearer "}, "must be in the form"),
        ({"authorization": "Bearer bad"}, "Incorrect API key provided."),
        ({"authorization": "Bearer good bad"}, "Incorrect API key provided."),
        ({"authorization": "Bearer \xff"}, "Incorrect API key provided."),
    ],
)
def test_no_key_a_wrong_one_and_one_in_another_form_are_401(
    tmp_path: Path, headers: dict[str, str], message: str
) -> None:
    ring = KeyRing(write(tmp_path / "keys.json", entry("a", "good")))
    with pytest.raises(HttpError, match=message) as raised:
        ring.authenticate(headers)
    assert raised.value.status == 401
    assert raised.value.headers == {"WWW-Authenticate": "Bearer", "x-should-retry": "false"}


def test_a_key_is_compared_with_all_digests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[tuple[bytes, bytes]] = []

    real = hmac.compare_digest

    def compare(known: bytes, given: bytes) -> bool:
        compared.append((known, given))
        return real(known, given)

    monkeypatch.setattr(keys_module.hmac, "compare_digest", compare)
    ring = KeyRing(write(tmp_path / "keys.json", *(entry(f"k{i}", f"{i}") for i in range(5))))
    assert ring.authenticate(bearer("0")).key_id == "k0"
    assert len(compared) == 5


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "Invalid JSON"),
        ("[]", "keys.json: must have at least 1 item$"),
        ('[{"name": "a"}]', "0.sha256: must be given"),
        ('[{"name": "a", "sha256": "xyz"}]', "0.sha256"),
        ('[{"name": "a b", "sha256": "' + "0" * 64 + '"}]', "0.name"),
        ('[{"name": "a", "sha256": "' + "0" * 64 + '", "key": "k"}]', "0.key"),
        ('[{"name": "a", "sha256": "' + "0" * 64 + '", "lanes": ["urgent"]}]', "0.lanes.0"),
        ('[{"name": "a", "sha256": "' + "0" * 64 + '", "requests_per_minute": 0}]', "0.requests"),
        (" " * (2**20 + 1), "longer than 1048576 bytes"),
    ],
)
def test_a_bad_file_is_refused_at_the_start_and_names_the_place(
    tmp_path: Path, content: str, message: str
) -> None:
    file = tmp_path / "keys.json"
    file.write_text(content)
    with pytest.raises(InvalidRequestError, match=message) as raised:
        KeyRing(file)
    assert raised.value.field == "api_keys_file"


def test_two_keys_of_one_name_or_digest_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    with pytest.raises(InvalidRequestError, match="two keys have the name a"):
        KeyRing(write(file, entry("a", "1"), entry("a", "2")))
    with pytest.raises(InvalidRequestError, match="two keys have the sha256"):
        KeyRing(write(file, entry("a", "1"), entry("b", "1")))
    with pytest.raises(InvalidRequestError, match="cannot be read: No such file"):
        KeyRing(tmp_path / "nowhere")


def test_a_changed_file_is_read_again_and_a_broken_one_keeps_the_old_keys(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write(tmp_path / "keys.json", entry("a", "old"))
    ring = KeyRing(file)
    file.unlink()
    write(file, entry("a", "new"))
    ring.refresh()
    assert ring.authenticate(bearer("new")).key_id == "a"
    with pytest.raises(HttpError):
        ring.authenticate(bearer("old"))
    for breakage in (lambda: file.write_text("["), file.unlink):
        breakage()
        ring.refresh()
        assert ring.authenticate(bearer("new")).key_id == "a"
    write(file, entry("a", "newest"))
    ring.refresh()
    assert ring.authenticate(bearer("newest")).key_id == "a"


def test_a_secret_that_kubernetes_swaps_is_read_again(tmp_path: Path) -> None:
    """A mounted secret is a link to a link; an update swaps the inner one."""
    for name, key in (("one", "k1"), ("two", "k2")):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "keys.json", entry("a", key))
    (tmp_path / "..data").symlink_to("one")
    (tmp_path / "keys.json").symlink_to("..data/keys.json")
    ring = KeyRing(tmp_path / "keys.json")
    assert ring.authenticate(bearer("k1")).key_id == "a"
    (tmp_path / "..data_tmp").symlink_to("two")
    (tmp_path / "..data_tmp").replace(tmp_path / "..data")
    ring.refresh()
    assert ring.authenticate(bearer("k2")).key_id == "a"


@pytest.fixture
def make_client(valkey_url: str, queue: str, tmp_path: Path) -> Callable[..., httpx.AsyncClient]:
    def make(**settings: Any) -> httpx.AsyncClient:
        file = write(tmp_path / "keys.json", entry("a", "sk-the-secret"))
        given = {"redis_url": valkey_url, "queues": (queue,), "api_keys_file": file, **settings}
        app = create_app(GatewaySettings(**given))
        return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway")

    return make


async def test_every_path_but_health_and_pages_needs_a_key(
    make_client: Callable[..., httpx.AsyncClient],
) -> None:
    async with make_client() as client:
        for path in ("/v1/models", "/v1/models/m", "/v1/nothing", "/nothing", "/v1/embeddings"):
            answer = await client.get(path)
            assert answer.status_code == 401, path
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
            assert (await client.post(path, json={})).status_code == 401, path
        for path in ("/livez", "/version", "/openapi.json", "/docs", "/"):
            assert (await client.get(path)).status_code == 200, path
        answer = await client.get("/v1/models", headers=bearer("sk-the-secret"))
        assert answer.json() == {"object": "list", "data": []}


def test_the_page_names_every_path_that_needs_no_key() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "gateway.md").read_text()
    before, found, _ = text.partition(" need no key")
    assert found
    named = set(re.findall(r"`(/[^`]*)`", before.rpartition(". ")[2]))
    assert named == {*PUBLIC_PATHS, f"{PUBLIC_PREFIX}…"}


async def test_a_key_is_never_logged(
    make_client: Callable[..., httpx.AsyncClient], capfd: pytest.CaptureFixture[str]
) -> None:
    configure_logging("debug", "json")
    async with make_client() as client:
        await client.get("/v1/models", headers=bearer("sk-the-secret"))
        await client.get("/v1/models?key=sk-the-secret", headers={"api-key": "sk-the-secret"})
        await client.get("/v1/models", headers={"Authorization": "sk-the-secret"})
    logged = capfd.readouterr().err
    assert '"path": "/v1/models"' in logged
    assert "sk-the-secret" not in logged


async def test_other_origins_may_call_only_where_the_settings_say_so(
    make_client: Callable[..., httpx.AsyncClient],
) -> None:
    asked = {
        "Origin": "https://app.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }
    async with make_client() as client:
        answer = await client.options("/v1/chat/completions", headers=asked)
        assert answer.status_code == 401
        assert "access-control-allow-origin" not in answer.headers
    async with make_client(cors_origins=("https://app.example",)) as client:
        answer = await client.options("/v1/chat/completions", headers=asked)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        headers = {"Origin": "https://app.example"}
        answer = await client.get("/v1/models", headers=headers)
        assert answer.status_code == 401  # which the page may read
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        other = await client.get("/v1/models", headers={"Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers
