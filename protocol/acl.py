"""The least rights on a Redis server that each part of inferq needs, as ACL rules.

A script runs with the rights of its caller, so that a rule names what the scripts call too.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from inferq.protocol.keys import BatchKeys, GatewayKeys, QueueKeys, TaskKeys


class Role(StrEnum):
    """Who connects."""

    #: The SDK, the command line: submits, reads, cancels, looks.
    PRODUCER = "producer"
    #: A gateway: what a producer does, the counts of its API keys, and records of batches.
    GATEWAY = "gateway"
    #: Workers, operators and maintenance: claims, publishes, sweeps, deals with dead letters.
    WORKER = "worker"
    #: Tasks processes: what workers do in maintenance, deliveries, batches, and RQ.
    TASKS = "tasks"


#: To connect, and to find a Cluster's node.
_CONNECT: Final = ("auth", "hello", "ping", "select", "client|setname", "cluster|slots")
_SCRIPTS: Final = ("eval", "evalsha", "time", "multi", "exec")
#: What submitting and ending jobs does, in scripts.
_JOBS: Final = (
    *("exists", "get", "set", "persist", "pexpire", "expire"),
    *("hdel", "hexists", "hget", "hgetall", "hincrby", "hmget", "hset"),
    *("xack", "xadd", "xdel", "xgroup|create", "xinfo|groups", "xlen"),
    *("xrange", "xread", "xrevrange"),
    *("zadd", "zcount", "zrem", "zscore"),
)
#: What the limits of API keys need besides.
_LIMITS: Final = ("zcard", "zremrangebyscore")
#: What the records of files and batches need besides.
_BATCHES: Final = ("del", "zrange", "zrank", "zrevrange", "zrevrank")
#: What claiming and looking after other workers does besides.
_CLAIMS: Final = (
    *("del", "xclaim", "xgroup|delconsumer", "xinfo|consumers", "xpending", "xreadgroup"),
    *("zcard", "zrange", "zrangebyscore"),
)
#: What deliveries and RQ do besides.
_TASKS: Final = (
    *("blmove", "blpop", "client|info", "hincrbyfloat", "info", "lmove", "lpush", "lpop", "lpos"),
    *("llen", "lrange", "lrem", "rpush", "sadd", "scard", "smembers", "srem"),
    *("unwatch", "watch", "xtrim", "zpopmin", "zremrangebyrank", "zremrangebyscore", "zrevrange"),
)

#: The commands of each role.
COMMANDS: Final[Mapping[Role, tuple[str, ...]]] = MappingProxyType(
    {
        Role.PRODUCER: (*_CONNECT, *_SCRIPTS, *_JOBS),
        Role.GATEWAY: (*_CONNECT, *_SCRIPTS, *_JOBS, *_LIMITS, *_BATCHES),
        Role.WORKER: (*_CONNECT, *_SCRIPTS, *_JOBS, *_CLAIMS),
        Role.TASKS: (*_CONNECT, *_SCRIPTS, *_JOBS, *_CLAIMS, *_TASKS),
    }
)


def acl_rules(role: Role, *queues: str) -> str:
    """Return the rules of a user for all partitions of `queues`, without its name and password.

    To be used as `ACL SETUSER name on >password RULES`. Raises `InvalidRequestError` for a name
    that no queue can have.
    """
    prefixes = [QueueKeys(queue).prefix.replace(".0}", ".*}") for queue in queues]
    if role is Role.GATEWAY:
        prefixes += [GatewayKeys.PREFIX, BatchKeys.PREFIX]
    if role is Role.TASKS:
        prefixes += [TaskKeys.PREFIX, BatchKeys.PREFIX]
    keys = " ".join(f"~{prefix}*" for prefix in prefixes)
    commands = " ".join(f"+{command}" for command in COMMANDS[role])
    return f"resetkeys {keys} resetchannels -@all {commands}"
