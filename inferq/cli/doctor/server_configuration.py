"""How a Redis server is configured, as far as its user may see: memory, persistence, replicas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from inferq.cli.doctor import asking
from inferq.cli.doctor.findings import Area, Finding
from inferq.producer.server import RedisServer

#: Share of the memory limit from which on there is little room for a burst.
_NEAR_FULL: Final = 0.8
#: Bytes of a stream's node that waste the least with short result streams.
_NODE_BYTES: Final = 1024
_NODES: Final = "stream-node-max-bytes"
_MIN_REPLICAS: Final = "min-replicas-to-write"


async def examine(area: Area, server: RedisServer) -> list[Finding]:
    """Judge memory, persistence, stream nodes and replicas."""
    info = await asking.info(server)
    if info is None:
        return [
            area.skipped(
                "configuration", "this user may not call INFO: look with an administrator's URL"
            )
        ]
    names = ("save", "appendfsync", _NODES, _MIN_REPLICAS)
    settings = {name: await asking.setting(server, name) for name in names}
    return [
        _policy(area, info),
        *_memory(area, info),
        _persistence(area, info, settings),
        *_nodes(area, settings),
        *_replicas(area, info, settings),
    ]


def _policy(area: Area, info: Mapping[str, Any]) -> Finding:
    policy = info.get("maxmemory_policy", "unknown")
    if policy == "noeviction":
        return area.ok("maxmemory-policy", "noeviction")
    return area.failure(
        "maxmemory-policy",
        f"{policy}: when memory is full, the server drops jobs, results and books",
        "CONFIG SET maxmemory-policy noeviction, and the same in its configuration file; a full "
        "server then refuses new jobs (QueueFull) and loses none",
    )


def _memory(area: Area, info: Mapping[str, Any]) -> Iterator[Finding]:
    limit, used = int(info.get("maxmemory", 0)), int(info.get("used_memory", 0))
    mib = used / 2**20
    if not limit:
        yield area.warning(
            "maxmemory",
            f"no limit; {mib:.0f} MiB are used",
            "CONFIG SET maxmemory to about 70 % of what the server has: at a limit it refuses new "
            "jobs, without one the system ends it",
        )
    elif used > _NEAR_FULL * limit:
        yield area.warning(
            "maxmemory",
            f"{mib:.0f} of {limit / 2**20:.0f} MiB are used",
            "raise maxmemory, shorten the retention of results, or lower INFERQ_QUEUE_LIMIT",
        )
    else:
        yield area.ok("maxmemory", f"{mib:.0f} of {limit / 2**20:.0f} MiB are used")


def _persistence(
    area: Area, info: Mapping[str, Any], settings: Mapping[str, str | None]
) -> Finding:
    if info.get("aof_last_write_status", "ok") != "ok" or (
        settings["save"] and info.get("rdb_last_bgsave_status", "ok") != "ok"
    ):
        return area.failure(
            "persistence",
            "the last write to disk failed; the server will refuse writes",
            "free or repair the server's disk, and see its log",
        )
    if int(info.get("aof_enabled", 0)):
        if settings["appendfsync"] == "no":
            return area.warning(
                "persistence",
                "append-only file, written when the system likes: a crash loses half a minute",
                "CONFIG SET appendfsync everysec",
            )
        return area.ok("persistence", f"append-only file, {settings['appendfsync'] or 'on'}")
    saves = f"snapshots only (save {settings['save']})" if settings["save"] else "none"
    lost = "since the last snapshot" if settings["save"] else ""
    return area.warning(
        "persistence",
        f"{saves}: a restart of the server loses all jobs and results {lost}".rstrip(),
        "CONFIG SET appendonly yes, and the same in its configuration file",
    )


def _nodes(area: Area, settings: Mapping[str, str | None]) -> Iterator[Finding]:
    if (size := settings[_NODES]) is None:
        return
    if 0 < int(size) <= _NODE_BYTES:
        yield area.ok(_NODES, f"{size} bytes")
    else:
        yield area.warning(
            _NODES,
            f"{size} bytes: a short result takes about 4.4 KB",
            f"CONFIG SET {_NODES} {_NODE_BYTES}: then it takes about 1.3 KB",
        )


def _replicas(
    area: Area, info: Mapping[str, Any], settings: Mapping[str, str | None]
) -> Iterator[Finding]:
    connected, least = int(info.get("connected_slaves", 0)), int(settings[_MIN_REPLICAS] or 0)
    if connected < least:
        yield area.failure(
            "replicas",
            f"{connected} connected, {_MIN_REPLICAS} is {least}: the server takes no writes",
            f"bring the replicas back, or CONFIG SET {_MIN_REPLICAS} {connected}",
        )
    elif connected and not least:
        yield area.warning(
            "replicas",
            f"{connected} connected; a primary that is cut off from them goes on taking writes, "
            "which a fail-over then loses",
            f"CONFIG SET {_MIN_REPLICAS} 1 and min-replicas-max-lag 10",
        )
    else:
        yield area.ok("replicas", f"{connected} connected")
