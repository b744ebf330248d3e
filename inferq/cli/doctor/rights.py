"""What the user of the server's URL may do, found without doing any of it.

Each command is queued in a transaction that a wrong command then aborts: the server checks rights
when it queues, and runs nothing.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

from redis.exceptions import NoPermissionError, ResponseError

from inferq.cli.doctor.findings import Area, Finding
from inferq.producer.server import RedisServer
from inferq.protocol.acl import COMMANDS, Role, acl_rules
from inferq.protocol.keys import GatewayKeys, QueueKeys, TaskKeys

_AREA: Final = Area("rights")
#: Stands for a key that nobody has.
_KEY: Final = "KEY"
#: Commands that say who connects, or begin and end what the others are queued in.
_IMPLIED: Final = frozenset({"auth", "hello", "select", "multi", "exec", "cluster|slots"})
_BY_ARGUMENTS: Final[Mapping[tuple[str, ...], str]] = MappingProxyType(
    {
        (): "ping time info client|info unwatch",
        ("x",): "client|setname",
        (_KEY,): "exists get persist hgetall xlen zcard llen lpop scard smembers del zpopmin "
        "xinfo|groups watch",
        (_KEY, "1"): "set pexpire expire hdel hexists hget hmget xdel zrem zscore sadd srem lpush "
        "rpush blpop lpos xpending xinfo|consumers",
        (_KEY, "1", "1"): "hincrby hincrbyfloat hset xack xrange xrevrange zadd zcount zrange "
        "zrangebyscore zremrangebyscore zremrangebyrank zrevrange lrange lrem "
        "xgroup|create xgroup|delconsumer",
        (_KEY, "MAXLEN", "1"): "xtrim",
        (_KEY, "*", "f", "v"): "xadd",
        ("STREAMS", _KEY, "0"): "xread",
        ("GROUP", "g", "c", "STREAMS", _KEY, ">"): "xreadgroup",
        (_KEY, "g", "c", "0", "0-1"): "xclaim",
        (_KEY, _KEY, "LEFT", "LEFT"): "lmove",
        (_KEY, _KEY, "LEFT", "LEFT", "0"): "blmove",
        ("return 1", "0"): "eval",
        ("0" * 40, "0"): "evalsha",
    }
)
#: How each command of the roles is called.
_ARGUMENTS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {name: args for args, names in _BY_ARGUMENTS.items() for name in names.split()}
)
#: Commands that a transaction does not take: asked for as they are, since they change nothing.
_OUTSIDE: Final = frozenset({"watch", "unwatch"})
_PREFIXES: Final[Mapping[Role, tuple[str, ...]]] = MappingProxyType(
    {Role.GATEWAY: (GatewayKeys.PREFIX,), Role.TASKS: (TaskKeys.PREFIX,)}
)


async def examine(
    server: RedisServer, keys: QueueKeys, asked: Iterable[Role], *, is_cluster: bool
) -> list[Finding]:
    """Say for which roles this user's rights are enough; those that are asked for must be among."""
    missing = await _missing_commands(server, keys.prefix)
    if is_cluster and not await _may(server, "cluster|slots", ()):
        missing.add("cluster|slots")
    lacks = {role: [name for name in COMMANDS[role] if name in missing] for role in Role}
    if not is_cluster:
        for role, prefixes in _PREFIXES.items():
            for prefix in prefixes:
                if not await _may(server, "get", (f"{prefix}doctor",)):
                    lacks[role].append(f"~{prefix}*")
    return list(_judge(keys.queue, lacks, tuple(asked)))


def _judge(
    queue: str, lacks: Mapping[Role, list[str]], asked: tuple[Role, ...]
) -> Iterator[Finding]:
    for role in asked:
        if lacks[role]:
            yield _AREA.failure(
                role.value,
                f"this user lacks {' '.join(lacks[role])}",
                f"ACL SETUSER NAME {acl_rules(role, queue)}",
            )
    enough = ", ".join(role.value for role in Role if not lacks[role])
    if enough:
        yield _AREA.ok("enough for", enough)
    elif not asked:
        yield from _judge(queue, lacks, (Role.PRODUCER,))


async def _missing_commands(server: RedisServer, prefix: str) -> set[str]:
    key = f"{prefix}doctor:{secrets.token_hex(8)}"
    wanted = dict.fromkeys(name for role in Role for name in COMMANDS[role])
    missing = set()
    for name in wanted:
        if name in _IMPLIED:
            continue
        args = tuple(key if each == _KEY else each for each in _ARGUMENTS[name])
        if not await _may(server, name, args):
            missing.add(name)
    return missing


async def _may(server: RedisServer, name: str, args: tuple[str, ...]) -> bool:
    call = _call_as_it_is if name in _OUTSIDE or name == "cluster|slots" else _queue_and_abort
    return await server.call(functools.partial(call, server, [*name.split("|"), *args]))


async def _queue_and_abort(server: RedisServer, command: list[str]) -> bool:
    pipeline: Any = server.commands.pipeline(transaction=True)
    pipeline.execute_command(*command)
    pipeline.execute_command("GET")  # lacks its key: the server drops the transaction
    return await _permits(pipeline.execute())


async def _call_as_it_is(server: RedisServer, command: list[str]) -> bool:
    commands: Any = server.commands
    return await _permits(commands.execute_command(*command))


async def _permits(reply: Any) -> bool:
    """Whether an answer, or an error, is one of somebody who may ask."""
    try:
        await reply
    except NoPermissionError:
        return False
    except ResponseError:
        pass
    return True
