"""Servers of every kind that inferq runs on: a Cluster, Sentinels, TLS, users with few rights."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import redis

from inferq.embedded import EmbeddedServer
from inferq.protocol.errors import ServerLost
from inferq.protocol.keys import QueueKeys
from inferq.protocol.messages import Event, FinishReason, Terminal, Timings, Usage
from inferq.protocol.replies import ClaimedJob, PublishItem, PublishReply
from inferq.protocol.scripts import QueueScripts
from inferq.protocol.servers import ServerUrl

START_TIMEOUT_S = 30.0
#: Of the Sentinels themselves, another than their servers'.
SENTINEL_PASSWORD = "watch"


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        with suppress(redis.RedisError):
            if condition():
                return
        time.sleep(0.05)
    pytest.fail(f"{what} within {START_TIMEOUT_S:g} s")


@pytest.fixture(scope="session")
def redis_binary() -> str:
    binary = shutil.which("redis-server")
    if binary is None:
        if os.environ.get("CI"):
            pytest.fail("redis-server is not installed, and CI must have it")
        pytest.skip("redis-server is not installed")
    return binary


@dataclass
class Cluster:
    """Three nodes with the slots shared out among them."""

    nodes: list[EmbeddedServer]

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    def node_of(self, slot: int) -> int:
        return min(slot * 3 // 16384, 2)

    def call(self, node: int, *command: Any) -> Any:
        with redis.Redis(port=self.nodes[node].port) as client:
            return client.execute_command(*command)

    def move(self, slot: int, source: int, target: int) -> None:
        """Give a slot with its keys to another node, as an operator's resharding does."""
        source_id, target_id = (
            self.call(node, "CLUSTER", "MYID").decode() for node in (source, target)
        )
        self.call(target, "CLUSTER", "SETSLOT", slot, "IMPORTING", source_id)
        self.call(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", target_id)
        while keys := self.call(source, "CLUSTER", "GETKEYSINSLOT", slot, 100):
            self.call(
                source,
                *("MIGRATE", "127.0.0.1", self.nodes[target].port, "", 0, 5000, "KEYS", *keys),
            )
        for node in (target, source):
            self.call(node, "CLUSTER", "SETSLOT", slot, "NODE", target_id)


@pytest.fixture(scope="session")
def cluster(redis_binary: str) -> Iterator[Cluster]:
    with ExitStack() as stack:
        started = [_start_node(redis_binary, stack) for _ in range(3)]
        nodes, buses = [node for node, _ in started], [bus for _, bus in started]
        made = Cluster(nodes)
        for index, node in enumerate(nodes):
            slots = [slot for slot in range(16384) if made.node_of(slot) == index]
            made.call(index, "CLUSTER", "ADDSLOTSRANGE", slots[0], slots[-1])
            if index:
                made.call(0, "CLUSTER", "MEET", "127.0.0.1", node.port, buses[index])
        for index in range(3):
            wait_until(
                lambda index=index: b"cluster_state:ok" in made.call(index, "CLUSTER", "INFO"),
                "the cluster did not come up",
            )
        yield made


def _start_node(binary: str, stack: ExitStack) -> tuple[EmbeddedServer, int]:
    """Start a Cluster's node; return it with the port of its bus.

    The bus is 10,000 ports above by default, which not every free port can be followed by. A port
    that was free may be taken when the server comes to it: then again.
    """
    for _ in range(5):
        bus = free_port()
        settings = {
            "cluster-enabled": "yes",
            "cluster-node-timeout": "2000",
            "cluster-port": str(bus),
        }
        with suppress(ServerLost):
            node = EmbeddedServer(binary=binary, settings=settings)
            return stack.enter_context(node), bus
    pytest.fail("no node of a Cluster came up")


@pytest.fixture(scope="session")
def certificate(make_certificate: Callable[..., Path]) -> Path:
    """A folder with the certificate of this machine, cert.pem, and its key, key.pem."""
    return make_certificate("DNS:localhost", "IP:127.0.0.1")


@pytest.fixture
def tls_url(redis_binary: str, certificate: Path, free_port: int) -> Iterator[str]:
    """URL of a server with that certificate, which a client does not trust by itself."""
    settings = {
        "tls-port": str(free_port),
        "tls-cert-file": str(certificate / "cert.pem"),
        "tls-key-file": str(certificate / "key.pem"),
        "tls-auth-clients": "no",
    }
    with EmbeddedServer(binary=redis_binary, settings=settings):
        yield f"rediss://127.0.0.1:{free_port}/0"


@dataclass
class SentinelTrio:
    """A primary with two replicas, and three Sentinels that look after them."""

    ports: list[int]
    password: str
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{port}" for port in self.ports)
        login = f"sentinel_password={SENTINEL_PASSWORD}"
        return f"redis+sentinel://:{self.password}@{hosts}/primary/0?{login}"

    def primary_port(self) -> int:
        with redis.Redis(port=self.ports[0], password=SENTINEL_PASSWORD) as client:
            address = client.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", "primary")
            return int(address[1])

    def fail_over(self) -> None:
        before = self.primary_port()
        with redis.Redis(port=self.ports[0], password=SENTINEL_PASSWORD) as client:
            client.execute_command("SENTINEL", "FAILOVER", "primary")
        wait_until(lambda: self.primary_port() != before, "no fail-over")


@pytest.fixture
def sentinels(redis_binary: str, tmp_path: Path) -> Iterator[SentinelTrio]:
    password = "p@ss:word"
    with ExitStack() as stack:
        login = {"masterauth": password}
        primary = stack.enter_context(
            EmbeddedServer(binary=redis_binary, password=password, settings=login)
        )
        for _ in range(2):
            replica = stack.enter_context(
                EmbeddedServer(binary=redis_binary, password=password, settings=login)
            )
            with redis.Redis.from_url(replica.url) as client:
                client.replicaof("127.0.0.1", primary.port)
        trio = SentinelTrio([], "p%40ss%3Aword")
        for index in range(3):
            port = free_port()
            config = tmp_path / f"sentinel-{index}.conf"
            config.write_text(
                f"port {port}\nbind 127.0.0.1\ndir {tmp_path}\n"
                f"requirepass {SENTINEL_PASSWORD}\nsentinel sentinel-pass {SENTINEL_PASSWORD}\n"
                f"sentinel monitor primary 127.0.0.1 {primary.port} 2\n"
                f'sentinel auth-pass primary "{password}"\n'
                "sentinel down-after-milliseconds primary 1000\n"
                "sentinel failover-timeout primary 5000\n"
            )
            process = subprocess.Popen(
                [redis_binary, str(config), "--sentinel"], stdout=subprocess.DEVNULL
            )
            trio.ports.append(port)
            trio.processes.append(process)
            stack.callback(process.wait)
            stack.callback(process.kill)
        for port in trio.ports:
            wait_until(lambda port=port: _is_complete(port), "the Sentinels did not come up")
        yield trio


def _is_complete(port: int) -> bool:
    with redis.Redis(port=port, password=SENTINEL_PASSWORD) as client:
        state = client.sentinel_master("primary")
        return int(state["num-slaves"]) == 2 and int(state["num-other-sentinels"]) == 2


@pytest.fixture(name="free_port")
def free_port_fixture() -> int:
    return free_port()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class MiniWorker:
    """Serves jobs with numbers for tokens, through the real scripts, on any kind of server."""

    def __init__(self, url: str, keys: QueueKeys, name: str = "mini") -> None:
        self.name = name
        self.client = ServerUrl.parse(url).client(keys.prefix, socket_timeout=5.0)
        self.scripts = QueueScripts(self.client, keys)

    async def claim(self) -> list[ClaimedJob]:
        reply = await self.scripts.claim(
            self.name,
            free_tokens=10**9,
            idle=True,
            max_jobs=100,
            max_model_len=10**6,
            block_size=16,
            lease_ms=10_000,
            max_crashes=3,
            retention_ms=60_000,
        )
        return list(reply.claimed)

    async def token(self, job: ClaimedJob, offset: int) -> PublishReply:
        text = f"{offset} "
        event = Event(offset=offset, token_ids=(offset,), text=text, text_ends=(len(text),))
        return await self._publish(job, offset, (offset + 1, event.encode()))

    async def end(self, job: ClaimedJob, count: int) -> PublishReply:
        reason = FinishReason.LENGTH
        end = Terminal(reason, Usage(3, 0, count), Timings(0, 0, 0), attempts=1)
        event = Event(offset=count, finish_reason=reason, terminal=end)
        return await self._publish(job, count, (count, event.encode()), reason)

    async def _publish(
        self, job: ClaimedJob, first: int, event: Any, reason: FinishReason | None = None
    ) -> PublishReply:
        item = PublishItem(job.job_id, job.epoch, first, (event,), reason)
        [reply] = await self.scripts.publish(
            self.name, [item], lease_ms=10_000, retention_ms=60_000
        )
        return reply


@pytest.fixture
async def mini_worker(queue: str) -> AsyncIterator[Callable[..., MiniWorker]]:
    """Make mini workers; their connections are closed with the test."""
    async with AsyncExitStack() as stack:

        def make(url: str, partition: int = 0) -> MiniWorker:
            worker = MiniWorker(url, QueueKeys(queue, partition))
            stack.push_async_callback(worker.client.aclose)
            return worker

        yield make
