"""The Redis server: reachable, of an age, configured so that no job is lost, near and in time."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Final

from inferq.cli.doctor import asking, server_configuration
from inferq.cli.doctor.findings import Area, Finding
from inferq.producer.server import RedisServer
from inferq.protocol.errors import InferqError, ServerLost
from inferq.protocol.servers import ServerUrl

_AREA: Final = Area("redis")
_LEAST: Final[Mapping[str, tuple[int, int]]] = {"redis": (6, 2), "valkey": (7, 2)}
_LOCAL: Final = ("127.", "localhost", "[::1]", "/")
_PINGS: Final = 100
#: Longest time for all of them together, in seconds.
_PINGS_S: Final = 3.0
#: Median and 99th percentile, in ms, above which every token is late.
_SLOW_MS: Final = (5.0, 50.0)
_SKEW_S: Final = 1.0


async def examine(url: ServerUrl, server: RedisServer) -> list[Finding]:
    """Look at the server of a queue; where it cannot be reached, that is the one finding."""
    try:
        await server.ping()
    except InferqError as error:
        return [_unreachable(error)]
    hello = await asking.hello(server)
    findings = [_AREA.ok("connection", f"{url.name} answers"), _transport(url)]
    findings += [_version(hello), _part(url, hello)]
    findings += await server_configuration.examine(_AREA, server)
    findings += [await _latency(server), await _clock(server)]
    return findings


def _unreachable(error: InferqError) -> Finding:
    text = str(error)
    if isinstance(error, ServerLost) and error.is_refusal:
        advice = (
            "use the Cluster's URL: redis+cluster://HOST:PORT"
            if "Cluster" in text
            else "check user, password and database in INFERQ_REDIS_URL (special characters as "
            "%XX), and on the server: ACL GETUSER NAME"
        )
    elif "certificate" in text.lower():
        advice = (
            "name the authority that signed it: rediss://…?ssl_ca_certs=FILE, and the host as the "
            "certificate does"
        )
    else:
        advice = (
            "is the server up, are host and port of INFERQ_REDIS_URL right, does a firewall or "
            "network policy stand between? TLS needs rediss://"
        )
    return _AREA.failure("connection", text, advice)


def _transport(url: ServerUrl) -> Finding:
    if url.plain.startswith("rediss") and "ssl_cert_reqs=none" in url.plain.lower():
        return _AREA.warning(
            "encryption",
            "TLS, and the certificate is not checked: anybody may be at the other end",
            "leave ssl_cert_reqs out, and name the authority by ssl_ca_certs=FILE",
        )
    if url.plain.startswith("rediss"):
        return _AREA.ok("encryption", "TLS, with a checked certificate")
    if url.name.partition("://")[2].startswith(_LOCAL):
        return _AREA.ok("encryption", "none; the server is on this machine")
    return _AREA.warning(
        "encryption",
        "none: passwords, prompts and answers cross the network as they are",
        "use rediss:// unless the network itself is private and encrypted",
    )


def _version(hello: Mapping[str, str]) -> Finding:
    product, version = hello.get("server", "redis"), hello.get("version", "")
    least = _LEAST.get(product, _LEAST["redis"])
    numbers = [int(part) for part in version.split(".")[:2] if part.isdigit()]
    if len(numbers) < 2:
        return _AREA.skipped("version", f"the server calls its version {version!r}")
    if tuple(numbers) < least:
        return _AREA.failure(
            "version",
            f"{product} {version} is too old",
            "update to Redis 6.2 or newer, or Valkey 7.2 or newer",
        )
    return _AREA.ok("version", f"{product} {version}")


def _part(url: ServerUrl, hello: Mapping[str, str]) -> Finding:
    mode, role = hello.get("mode", "standalone"), hello.get("role", "master")
    if mode == "sentinel":
        return _AREA.failure(
            "part", "this is a Sentinel", "use redis+sentinel://HOST:26379/SERVICE"
        )
    if mode == "cluster" and url.kind != "cluster":
        return _AREA.failure("part", "this is a node of a Cluster", "use redis+cluster://HOST:PORT")
    if role not in ("master", "primary"):
        return _AREA.failure(
            "part",
            f"this is a {role}, which takes no writes",
            "point INFERQ_REDIS_URL at the primary, or at its Sentinels: redis+sentinel://",
        )
    return _AREA.ok("part", f"{url.kind}, a primary")


async def _latency(server: RedisServer) -> Finding:
    times: list[float] = []
    started = time.perf_counter()
    while len(times) < _PINGS and time.perf_counter() - started < _PINGS_S:
        before = time.perf_counter()
        await server.ping()
        times.append((time.perf_counter() - before) * 1000)
    times.sort()
    p50, p99 = times[len(times) // 2], times[math.ceil(0.99 * len(times)) - 1]
    message = f"p50 {p50:.2f} ms, p99 {p99:.2f} ms over {len(times)} pings"
    if p50 > _SLOW_MS[0] or p99 > _SLOW_MS[1]:
        return _AREA.warning(
            "latency",
            message,
            "every token passes the server twice: bring it nearer, and look for slow commands "
            "(SLOWLOG GET), swapping or a forking save there",
        )
    return _AREA.ok("latency", message)


async def _clock(server: RedisServer) -> Finding:
    before = time.time()
    answer = await asking.permitted(server, server.commands.time)
    if answer is None:
        return _AREA.skipped("clock", "this user may not call TIME")
    seconds, microseconds = answer
    after = time.time()
    skew = seconds + microseconds / 1e6 - (before + after) / 2
    doubt = (after - before) / 2
    message = f"the server is {skew:+.3f} s off this machine's clock (± {doubt:.3f} s)"
    if abs(skew) - doubt > _SKEW_S:
        return _AREA.warning(
            "clock",
            message,
            "let both follow NTP: `not_before` and API keys' windows go by one clock, webhooks' "
            "signatures by the other",
        )
    return _AREA.ok("clock", message)
