"""`inferq doctor` looks at a server: healthy, and broken in each way that it knows."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import redis

from inferq.embedded import EmbeddedServer
from inferq.protocol.acl import COMMANDS, Role, acl_rules

Doctor = Callable[..., tuple[int, dict[tuple[str, str], dict[str, Any]]]]
RunHere = Callable[..., tuple[int, str, str]]
Impostor = Callable[[Mapping[str, bytes]], str]

HEALTHY = {"maxmemory": "256mb"}
RULES = {"stream-node-max-bytes": "4096", "maxmemory-policy": "allkeys-lru"}


@pytest.fixture(scope="module")
def healthy_url() -> Iterator[str]:
    with EmbeddedServer(password="s3cret/!", appendonly=True, settings=HEALTHY) as server:
        yield server.url


@pytest.fixture(scope="module")
def careless_url() -> Iterator[str]:
    """A server as somebody left it: it evicts, keeps nothing, and wastes memory."""
    with EmbeddedServer(settings=RULES) as server:
        yield server.url


@pytest.fixture
def user(valkey_server: EmbeddedServer) -> Iterator[Callable[[str], str]]:
    """URLs of users with the rules that the test says."""
    names: list[str] = []
    with redis.Redis.from_url(valkey_server.url) as admin:

        def make(rules: str) -> str:
            names.append(f"doctor-{secrets.token_hex(4)}")
            admin.execute_command("ACL", "SETUSER", names[-1], "on", ">pass word", *rules.split())
            return f"redis://{names[-1]}:pass%20word@127.0.0.1:{valkey_server.port}/0"

        yield make
        for name in names:
            admin.execute_command("ACL", "DELUSER", name)


def statuses(findings: Mapping[tuple[str, str], Mapping[str, Any]], area: str) -> dict[str, str]:
    return {check: each["status"] for (where, check), each in findings.items() if where == area}


def test_a_healthy_server_has_no_finding_but_ok(doctor: Doctor, healthy_url: str) -> None:
    code, findings = doctor("--only", "redis", "--only", "rights", "--redis-url", healthy_url)
    assert code == 0
    found = statuses(findings, "redis")
    del found["latency"]  # a busy machine is no fault of the server's
    assert set(found) >= {
        *("connection", "encryption", "version", "part", "maxmemory-policy", "maxmemory"),
        *("persistence", "stream-node-max-bytes", "replicas", "clock"),
    }
    assert set(found.values()) == {"ok"}
    assert findings["rights", "enough for"]["message"] == "producer, gateway, worker, tasks"
    assert findings["redis", "persistence"]["message"] == "append-only file, everysec"
    assert "p50" in findings["redis", "latency"]["message"]


def test_nothing_is_left_on_the_server_and_no_password_is_shown(
    run_here: RunHere, healthy_url: str
) -> None:
    code, output, errors = run_here(
        *("doctor", "--only", "redis", "--only", "rights", "--only", "queue"),
        *("--redis-url", healthy_url),
    )
    assert code == 0
    assert "s3cret" not in output + errors
    assert "ok" in output.splitlines()[-1]
    with redis.Redis.from_url(healthy_url) as client:
        assert client.keys("*") == []


def test_an_evicting_policy_fails_and_what_wastes_or_loses_warns(
    doctor: Doctor, careless_url: str
) -> None:
    code, findings = doctor("--only", "redis", "--redis-url", careless_url)
    assert code == 1
    policy = findings["redis", "maxmemory-policy"]
    assert policy["status"] == "failure"
    assert policy["message"].startswith("allkeys-lru")
    assert "maxmemory-policy noeviction" in policy["advice"]
    found = statuses(findings, "redis")
    assert (found["persistence"], found["maxmemory"]) == ("warning", "warning")
    assert found["stream-node-max-bytes"] == "warning"
    assert "appendonly yes" in findings["redis", "persistence"]["advice"]
    assert "1024" in findings["redis", "stream-node-max-bytes"]["advice"]


def test_a_wrong_password_is_told_from_a_server_that_is_away(
    run_here: RunHere, doctor: Doctor, healthy_url: str
) -> None:
    wrong = healthy_url.replace("s3cret", "wr0ng")
    code, findings = doctor("--only", "redis", "--redis-url", wrong)
    assert (code, len(findings)) == (1, 1)
    found = findings["redis", "connection"]
    assert "password is wrong" in found["message"]
    assert "check user, password" in found["advice"]
    assert "wr0ng" not in "".join(run_here("doctor", "--only", "redis", "--redis-url", wrong)[1:])


def test_an_address_where_nobody_answers_is_named(doctor: Doctor) -> None:
    with socket.socket() as taken:  # bound, and not listening
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        code, findings = doctor("--only", "redis", "--redis-url", f"redis://127.0.0.1:{port}")
    assert code == 1
    assert f"127.0.0.1:{port}" in findings["redis", "connection"]["message"]
    assert "host and port" in findings["redis", "connection"]["advice"]


def test_a_server_that_takes_the_connection_and_is_silent_is_waited_for_in_time(
    doctor: Doctor,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}"
        code, findings = doctor("--only", "redis", "--timeout", "0.2", "--redis-url", url)
    assert code == 1
    assert "within 0.2 s" in findings["redis", "connection"]["message"]


def test_tls_that_the_server_does_not_speak_is_no_traceback(
    doctor: Doctor, healthy_url: str
) -> None:
    url = healthy_url.replace("redis://", "rediss://")
    code, findings = doctor("--only", "redis", "--timeout", "0.3", "--redis-url", url)
    assert code == 1
    assert findings["redis", "connection"]["status"] == "failure"


def test_a_url_that_is_none_is_refused_without_its_password(doctor: Doctor) -> None:
    code, findings = doctor("--only", "redis", "--redis-url", "redis://:hush@host:port/")
    assert code == 1
    assert "hush" not in str(findings)
    assert "must be redis://" in findings["redis", "connection"]["message"]


def test_a_server_that_is_too_old_says_so(
    doctor: Doctor, impostor: Impostor, array: Callable[..., bytes], bulk: Callable[[str], bytes]
) -> None:
    url = impostor({"HELLO": array("server", "redis", "version", "6.0.16", "role", "master")})
    code, findings = doctor("--only", "redis", "--redis-url", url)
    assert code == 1
    assert findings["redis", "version"]["status"] == "failure"
    assert "6.0.16 is too old" in findings["redis", "version"]["message"]
    older = {
        "HELLO": b"-ERR unknown command `HELLO`\r\n",
        "INFO": bulk("redis_version:5.0.14\r\n"),
    }
    code, findings = doctor("--only", "redis", "--redis-url", impostor(older))
    assert (code, findings["redis", "version"]["status"]) == (1, "failure")


@pytest.mark.parametrize(
    ("hello", "advice"),
    [
        (("mode", "cluster", "role", "master"), "redis+cluster://"),
        (("mode", "sentinel"), "redis+sentinel://"),
        (("mode", "standalone", "role", "replica"), "primary"),
    ],
)
def test_a_server_of_another_part_is_told_by_its_url(
    doctor: Doctor,
    impostor: Impostor,
    array: Callable[..., bytes],
    hello: tuple[str, ...],
    advice: str,
) -> None:
    url = impostor({"HELLO": array("server", "redis", "version", "7.4.0", *hello)})
    code, findings = doctor("--only", "redis", "--redis-url", url)
    assert code == 1
    assert advice in findings["redis", "part"]["advice"]


def test_a_clock_that_is_off_is_found(doctor: Doctor, impostor: Impostor, array: Any) -> None:
    url = impostor({"TIME": array(str(int(time.time()) + 3600), "0")})
    _, findings = doctor("--only", "redis", "--redis-url", url)
    assert findings["redis", "clock"]["status"] == "warning"
    assert findings["redis", "clock"]["message"].startswith("the server is +3")
    assert "NTP" in findings["redis", "clock"]["advice"]


@pytest.mark.parametrize(
    ("lines", "check", "status", "advice"),
    [
        ("aof_enabled:1\r\naof_last_write_status:err\r\n", "persistence", "failure", "disk"),
        ("maxmemory:1000000\r\nused_memory:990000\r\n", "maxmemory", "warning", "raise maxmemory"),
        ("connected_slaves:2\r\n", "replicas", "warning", "min-replicas-to-write 1"),
    ],
)
def test_what_info_tells_is_judged(
    doctor: Doctor,
    impostor: Impostor,
    bulk: Callable[[str], bytes],
    lines: str,
    check: str,
    status: str,
    advice: str,
) -> None:
    info = bulk(f"redis_version:7.4.0\r\nmaxmemory_policy:noeviction\r\n{lines}")
    _, findings = doctor("--only", "redis", "--redis-url", impostor({"INFO": info}))
    assert findings["redis", check]["status"] == status
    assert advice in findings["redis", check]["advice"]


@pytest.mark.parametrize("role", list(Role))
def test_a_user_with_the_documented_rights_has_enough_for_its_role(
    doctor: Doctor, user: Callable[[str], str], queue: str, role: Role
) -> None:
    url = user(acl_rules(role, queue))
    code, findings = doctor(
        *("--only", "redis", "--only", "rights", "--only", "queue", "--role", role.value),
        *("--redis-url", url),
    )
    assert code == 0
    assert role.value in findings["rights", "enough for"]["message"].split(", ")
    if role is not Role.TASKS:  # who may not look, is told so
        assert findings["redis", "configuration"]["status"] == "skipped"


def test_one_right_that_is_missing_is_named_with_the_rules_that_bring_it(
    doctor: Doctor, user: Callable[[str], str], queue: str
) -> None:
    rules = acl_rules(Role.WORKER, queue).replace("+xclaim ", "")
    code, findings = doctor("--only", "rights", "--role", "worker", "--redis-url", user(rules))
    assert code == 1
    assert findings["rights", "worker"]["message"] == "this user lacks xclaim"
    assert acl_rules(Role.WORKER, queue) in findings["rights", "worker"]["advice"]
    assert findings["rights", "enough for"]["message"] == "producer"


def test_rights_to_other_keys_are_not_enough(doctor: Doctor, user: Callable[[str], str]) -> None:
    url = user(acl_rules(Role.PRODUCER, "another"))
    code, findings = doctor("--only", "rights", "--redis-url", url)
    assert code == 1
    assert "xadd" in findings["rights", "producer"]["message"]


def test_a_gateways_own_keys_are_looked_at_too(
    doctor: Doctor, user: Callable[[str], str], queue: str
) -> None:
    rules = acl_rules(Role.GATEWAY, queue).replace("~inferq:{gateway}:*", "")
    code, findings = doctor("--only", "rights", "--role", "gateway", "--redis-url", user(rules))
    assert code == 1
    assert "~inferq:{gateway}:*" in findings["rights", "gateway"]["message"]


@pytest.mark.parametrize("role", list(Role))
def test_each_command_of_a_role_is_asked_for(
    doctor: Doctor, user: Callable[[str], str], queue: str, role: Role
) -> None:
    """A right that nobody asks for could be missing without a word."""
    implied = ("auth", "hello", "select", "ping", "multi", "exec", "cluster|slots", "get")
    given = " ".join(f"+{name}" for name in implied)
    keys = acl_rules(role, queue).partition(" -@all")[0]
    url = user(f"{keys} -@all {given}")
    code, findings = doctor("--only", "rights", "--role", role.value, "--redis-url", url)
    assert code == 1
    missing = " ".join(name for name in COMMANDS[role] if name not in implied)
    assert findings["rights", role.value]["message"] == f"this user lacks {missing}"


def test_sentinels_that_are_away_are_told_without_their_password(doctor: Doctor) -> None:
    url = "redis+sentinel://:sesam@127.0.0.1:1/svc?sentinel_password=hush"
    code, findings = doctor("--only", "redis", "--timeout", "20", "--redis-url", url)
    assert code == 1
    message = findings["redis", "connection"]["message"]
    assert message.endswith(
        "no Sentinel names a primary of 'svc': they cannot be reached, refuse us, or do not know it"
    )
    assert "sesam" not in str(findings)
    assert "hush" not in str(findings)
