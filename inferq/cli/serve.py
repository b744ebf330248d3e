"""`inferq serve MODEL`: server, worker and gateway on this machine, up and down together."""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from typing import Final

from inferq import healthcheck
from inferq.cli import exit_codes
from inferq.cli.extras import load_extra
from inferq.cli.processes import INFERQ, LOOK_S, ManagedProcess, Signals
from inferq.cli.serve_flags import ServePlan, read_plan
from inferq.embedded import EmbeddedServer
from inferq.producer import Client
from inferq.protocol.errors import ServerLost
from inferq.version import __version__

#: Seconds that worker and gateway may take to end beyond what their settings grant them.
END_MARGIN_S: Final = 10.0
#: Seconds between two looks at whether all is ready.
READY_LOOK_S: Final = 0.2
#: Addresses that stand for all, and where this machine then reaches itself.
_WILDCARDS: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104
#: Exit codes of a part that say more than that it ended: bad settings or model, no Redis.
_TELLING: Final = (exit_codes.BAD_INPUT, exit_codes.SERVER_LOST)


def main(argv: Sequence[str]) -> int:
    """Serve until told to stop, or until a part ends; return the exit code.

    Raises `InvalidRequestError` for a setting, `ModelError` for a packaged model that cannot be
    imported, and `ServerLost` when the server cannot be started or reached.
    """
    plan = read_plan(argv)
    _import_packaged(plan.worker.model)
    signals = Signals()
    with signals.counted(), ExitStack() as stack:
        url = plan.worker.redis_url.get_secret_value()
        server = None
        if plan.is_embedded:
            server = stack.enter_context(EmbeddedServer(password=secrets.token_urlsafe(24)))
            url = server.url
        partitions = plan.gateway.partitions
        client = stack.enter_context(Client(url, plan.worker.queue, partitions=partitions))
        client.ping()
        serving = Serving(plan, url, client, server, signals)
        return serving.run(stack)


class Serving:
    """The parts of one `inferq serve`, from their start to their end."""

    def __init__(
        self,
        plan: ServePlan,
        url: str,
        client: Client,
        server: EmbeddedServer | None,
        signals: Signals,
    ) -> None:
        self._plan = plan
        self._url = url
        self._client = client
        self._server = server
        self._signals = signals
        self._started_at = time.monotonic()
        self._is_ready = False

    def run(self, stack: ExitStack) -> int:
        """Start worker and gateway, wait for a reason to end, and take them down."""
        environment = {"INFERQ_REDIS_URL": self._url, "INFERQ_API_KEY": None}
        keys, folder = stack.enter_context(_keys_file(self._plan.api_key))
        gateway = ManagedProcess(
            "gateway",
            [*INFERQ, "gateway", *self._plan.gateway_command.arguments, *keys],
            environment=environment,
            leftover=folder,
        )
        stack.callback(gateway.kill)
        worker = ManagedProcess(
            "worker",
            [*INFERQ, "worker", *self._plan.worker_command.arguments],
            environment=environment,
        )
        stack.callback(worker.kill)
        tasks = self._start_tasks(environment, stack)
        _say(f"inferq {__version__}: the worker loads {self._plan.worker.model}")
        code = self._watch([gateway, worker, *tasks])
        # the gateway first: what it still has to answer needs the worker
        grace_s = self._plan.gateway.shutdown_delay_s + self._plan.gateway.shutdown_timeout_s
        are_gentle = [
            gateway.end(grace_s + END_MARGIN_S, self._signals),
            *(each.end(self._tasks_grace_s + END_MARGIN_S, self._signals) for each in tasks),
            worker.end(self._plan.worker.drain_timeout_s + END_MARGIN_S, self._signals),
        ]
        # a worker that could not hand its jobs over says so by its exit code
        is_clean = all(are_gentle) and worker.exit_code != exit_codes.FAILED
        return code if is_clean else code or exit_codes.FAILED

    def _start_tasks(
        self, environment: Mapping[str, str | None], stack: ExitStack
    ) -> list[ManagedProcess]:
        """Start what runs batches, if the gateway takes them."""
        command = self._plan.tasks_command
        if command is None:
            return []
        tasks = ManagedProcess(
            "tasks", [*INFERQ, "tasks", *command.arguments], environment=environment
        )
        stack.callback(tasks.kill)
        return [tasks]

    @property
    def _tasks_grace_s(self) -> float:
        return 0.0 if self._plan.tasks is None else self._plan.tasks.shutdown_timeout_s

    def _watch(self, parts: Sequence[ManagedProcess]) -> int:
        """Return when a signal came (0) or a part ended (the exit code that this makes)."""
        looked_at = 0.0
        while not self._signals.count:
            for part in parts:
                if (code := part.exit_code) is not None:
                    _complain(f"the {part.name} process {how_it_ended(code)}")
                    return code if code in _TELLING and not self._is_ready else exit_codes.FAILED
            if self._server is not None and not self._server.is_running:
                _complain("the Valkey server ended")
                return exit_codes.FAILED
            if not self._is_ready and time.monotonic() - looked_at > READY_LOOK_S:
                looked_at = time.monotonic()
                self._look_whether_ready()
            time.sleep(LOOK_S)
        return exit_codes.OK

    def _look_whether_ready(self) -> None:
        name = self._plan.worker.worker_name
        if not self._gateway_answers():
            return
        try:
            workers = self._client.workers()
        except ServerLost:
            return  # the parts know how long they wait for it
        if any(worker.name == name and worker.is_alive for worker in workers):
            self._is_ready = True
            self._introduce()

    def _introduce(self) -> None:
        seconds = time.monotonic() - self._started_at
        model, address = self._plan.worker.model_name, self._address
        queue = f"{self._plan.worker.queue} on "
        queue += "the server given" if self._server is None else f"127.0.0.1:{self._server.port}"
        reach = "  (on every address)" if self._plan.gateway.host in _WILDCARDS else ""
        header = "" if self._plan.api_key is None else ' -H "Authorization: Bearer $INFERQ_API_KEY"'
        body = json.dumps({"model": model, "prompt": "The capital of France is", "max_tokens": 16})
        _say(f"""
{model} is ready after {seconds:.1f} s

  API     {address}/v1{reach}
  page    {address}/
  status  {address}/status
  schema  {address}/docs
  queue   {queue}

  curl {address}/v1/completions -H 'Content-Type: application/json'{header} \\
    -d {_quoted(body)}

Ctrl-C takes it down.
""")

    def _gateway_answers(self) -> bool:
        try:
            status = healthcheck.ask(self._host, self._plan.gateway.port, "/health", timeout_s=1)
        except (OSError, HTTPException):
            return False
        return status == HTTPStatus.OK

    @property
    def _host(self) -> str:
        """Where this machine reaches the gateway."""
        return _WILDCARDS.get(self._plan.gateway.host, self._plan.gateway.host)

    @property
    def _address(self) -> str:
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._plan.gateway.port}"


def _import_packaged(model: str) -> None:
    # a folder or a hub id is the worker's business; the importer takes long to load
    if "/" in model or Path(model).exists():
        return
    store = load_extra("inferq.worker.model.loading.model_store", extra="gguf")
    if model in store.PACKAGED_MODELS:
        store.import_model(model, progress=True)


@contextlib.contextmanager
def _keys_file(api_key: str | None) -> Iterator[tuple[list[str], Path | None]]:
    """Yield the gateway's flags for one key, and the folder that holds its digest meanwhile."""
    if api_key is None:
        yield [], None
        return
    entry: Mapping[str, str] = {
        "name": "serve",
        "sha256": hashlib.sha256(api_key.encode()).hexdigest(),
    }
    with tempfile.TemporaryDirectory(prefix="inferq-serve-") as folder:
        file = Path(folder) / "keys.json"
        file.write_text(json.dumps([entry]))
        yield [f"--api-keys-file={file}"], Path(folder)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _say(text: str) -> None:
    # a terminal that is gone must not keep us from taking the parts down
    with contextlib.suppress(OSError):
        print(text, flush=True)


def how_it_ended(code: int) -> str:
    """Say what an exit code means; a process that a signal killed says nothing itself."""
    if code >= 0:
        return f"ended with exit code {code}; its lines say why"
    names = {each.value: each.name for each in signal.Signals}
    hint = " (by someone, or by Linux when memory ran out)" if -code == signal.SIGKILL else ""
    return f"was killed by {names.get(-code, f'signal {-code}')}{hint}"


def _complain(text: str) -> None:
    with contextlib.suppress(OSError):
        print(f"inferq serve: {text}", file=sys.stderr, flush=True)
