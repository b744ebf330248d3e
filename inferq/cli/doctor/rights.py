"""What the user of the server's URL may do, found without doing any of it.

Each command is queued in a transaction that an unknown command then aborts: the server checks
rights when it queues, and runs nothing.
"""

from __future__ import annotations

import functools
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

from redis.exceptions import NoPermissionError, ResponseError

from inferq.cli.doctor.findings import Area, Finding
from inferq.producer.server import RedisServer
from inferq.protocol.acl import COMMANDS, Role, acl_rules
from inferq.protocol.errors import InferqError
from inferq.protocol.keys import QueueKeys

_AREA: Final = Area("rights")
#: Stands for a key that nobody has.
_KEY: Final = "KEY"
_SLOTS: Final = "cluster|slots"
#: Commands that say who connects, or begin and end what the others are queued in.
_IMPLIED: Final = frozenset({"auth", "hello", "select", "multi", "exec", _SLOTS})
#: How a command may be called, tried until the server does not count the arguments wrong.
_FORMS: Final = ((_KEY,), (_KEY, "1"), (_KEY, "1", "1"), ())
#: Commands whose keys stand elsewhere, or that have other words besides.
_OWN_FORMS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        _SLOTS: (),
        "blmove": (_KEY, _KEY, "LEFT", "LEFT", "0"),
        "client|info": (),
        "client|setname": ("x",),
        "eval": ("return 1", "0"),
        "evalsha": ("0" * 40, "0"),
        "info": (),
        "lmove": (_KEY, _KEY, "LEFT", "LEFT"),
        "ping": (),
        "time": (),
        "unwatch": (),
        "xadd": (_KEY, "*", "f", "v"),
        "xclaim": (_KEY, "g", "c", "0", "0-1"),
        "xread": ("STREAMS", _KEY, "0"),
        "xreadgroup": ("GROUP", "g", "c", "STREAMS", _KEY, ">"),
    }
)
_ARITY: Final = "wrong number of arguments"
#: Commands that a transaction does not take: asked for as they are, since they change nothing.
_OUTSIDE: Final = frozenset({"watch", "unwatch", _SLOTS})


async def examine(
    server: RedisServer, keys: QueueKeys, asked: Iterable[Role], *, is_cluster: bool
) -> list[Finding]:
    """Say for which roles this user's rights are enough; those that are asked for must be among."""
    missing = await _missing_commands(server, keys.prefix)
    if is_cluster and not await _may(server, _SLOTS, keys.prefix):
        missing.add(_SLOTS)
    lacks = {role: [name for name in COMMANDS[role] if name in missing] for role in Role}
    if not is_cluster:  # where they may be another node's
        for role in Role:
            for prefix in _other_prefixes(role, keys.queue):
                if not await _may(server, "get", f"{prefix}doctor"):
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


def _other_prefixes(role: Role, queue: str) -> list[str]:
    """Return what a role's keys begin with beside those of the queue."""
    _, *others = re.findall(r"~(\S+)\*", acl_rules(role, queue))
    return others


async def _missing_commands(server: RedisServer, prefix: str) -> set[str]:
    key = f"{prefix}doctor:{secrets.token_hex(8)}"
    wanted = {name for role in Role for name in COMMANDS[role]} - _IMPLIED
    return {name for name in sorted(wanted) if not await _may(server, name, key)}


async def _may(server: RedisServer, name: str, key: str) -> bool:
    """Whether this user may give a command, with `key` where it takes one."""
    call = _call_as_it_is if name in _OUTSIDE else _queue_and_abort
    for form in (_OWN_FORMS[name],) if name in _OWN_FORMS else _FORMS:
        words = [*name.split("|"), *(key if each == _KEY else each for each in form)]
        try:
            await server.call(functools.partial(call, server, words))
        except InferqError as error:
            if isinstance(error.__cause__, NoPermissionError):
                return False
            if not isinstance(error.__cause__, ResponseError):
                raise
            if _ARITY in str(error):
                continue
        return True
    return True


async def _queue_and_abort(server: RedisServer, words: list[str]) -> None:
    pipeline: Any = server.commands.pipeline(transaction=True)
    pipeline.execute_command(*words)
    pipeline.execute_command("GET_NOTHING")  # no such command: the server drops the transaction
    await pipeline.execute()


async def _call_as_it_is(server: RedisServer, words: list[str]) -> None:
    commands: Any = server.commands
    await commands.execute_command(*words)
