"""The commands about jobs: what they print, and how they exit."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import redis.asyncio

from inferq import Client
from inferq.embedded import EmbeddedServer
from inferq.protocol.errors import ErrorInfo
from inferq.protocol.keys import QueueKeys
from inferq.protocol.messages import (
    ChatMessage,
    ChatPrompt,
    Event,
    FinishReason,
    Job,
    Terminal,
    TextPrompt,
    TokenPrompt,
    Usage,
)
from inferq.protocol.params import SamplingParams
from inferq.protocol.replies import ClaimedJob, PublishItem
from inferq.protocol.scripts import QueueScripts
from inferq.protocol.structured import StructuredOutputs

Run = Callable[..., subprocess.CompletedProcess[bytes]]
RunHere = Callable[..., tuple[int, str, str]]
OFFSETS = {"lease_ms": 10_000, "retention_ms": 60_000}


class Answerer:
    """A worker on a thread of its own that answers every job `ab c`, or fails it."""

    def __init__(self, url: str, queue: str) -> None:
        self.jobs: list[Job] = []
        self.fails = False
        self._url = url
        self._queue = queue
        self._stopping = False
        self._thread = Thread(target=lambda: asyncio.run(self._main()), daemon=True)

    def start(self) -> Answerer:
        self._thread.start()
        return self

    def stop(self) -> None:
        self._stopping = True
        self._thread.join(10)

    async def _main(self) -> None:
        async with redis.asyncio.Redis.from_url(self._url) as client:
            scripts = QueueScripts(client, QueueKeys(self._queue))
            while not self._stopping:
                reply = await scripts.claim(
                    "w",
                    free_tokens=10**9,
                    idle=True,
                    max_jobs=10,
                    max_model_len=10**6,
                    block_size=16,
                    max_crashes=3,
                    **OFFSETS,
                )
                for claimed in reply.claimed:
                    await self._answer(scripts, claimed)
                await asyncio.sleep(0.01)

    async def _answer(self, scripts: QueueScripts, claimed: ClaimedJob) -> None:
        self.jobs.append(Job.decode(claimed.payload))
        reason = FinishReason.ERROR if self.fails else FinishReason.STOP
        info = ErrorInfo("internal_error", "it broke") if self.fails else None
        if self.jobs[-1].params.n > 1:
            await self._answer_twice(scripts, claimed)
            return
        events = (
            (2, Event(token_ids=(7, 8), text="ab", text_ends=(1, 2)).encode()),
            (3, Event(offset=2, token_ids=(9,), text=" c", text_ends=(2,)).encode()),
            (3, Event(offset=3, terminal=Terminal(reason, Usage(1, 0, 3), error=info)).encode()),
        )
        item = PublishItem(claimed.job_id, claimed.epoch, 0, events, reason)
        await scripts.publish("w", [item], **OFFSETS)

    async def _answer_twice(self, scripts: QueueScripts, claimed: ClaimedJob) -> None:
        end = {"finish_reason": FinishReason.STOP}
        terminal = Terminal(FinishReason.STOP, Usage(1, 0, 4))
        parts = [
            Event(0, 0, (1,), "a\nb", (3,)),
            Event(1, 0, (2,), "x", (1,)),
            Event(0, 1, (3,), "c", (1,), **end),
            Event(1, 1, (4,), "y\nz", (3,), **end, terminal=terminal),
        ]
        events = tuple((i + 1, event.encode()) for i, event in enumerate(parts))
        item = PublishItem(claimed.job_id, claimed.epoch, 0, events, FinishReason.STOP)
        await scripts.publish("w", [item], **OFFSETS)


@pytest.fixture
def answerer(valkey_url: str, queue: str) -> Iterator[Answerer]:
    worker = Answerer(valkey_url, queue).start()
    yield worker
    worker.stop()


def lines(output: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines()]


@pytest.mark.parametrize("flags", [(), ("--stream",)])
def test_submit_prints_the_answer(run: Run, answerer: Answerer, flags: tuple[str, ...]) -> None:
    done = run("submit", "Größe", "--max-tokens", "5", "--temperature", "0", *flags)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"ab c\n", b"")
    (job,) = answerer.jobs
    assert job.prompt == TextPrompt("Größe")
    assert (job.params.max_tokens, job.params.temperature) == (5, 0.0)


def test_every_option_reaches_the_job(run: Run, answerer: Answerer) -> None:
    done = run(
        "submit", "x", "--top-k", "4", "--top-p", "0.5", "--min-p", "0.1", "--seed", "3",
        "--min-tokens", "1", "--stop", "END", "--stop", "STOP", "--stop-token-ids", "5",
        "--include-stop-str-in-output", "--ignore-eos", "--logprobs", "2",
        "--no-skip-special-tokens", "--metadata", "user=me", "--metadata", "a=b=c",
        "--lane", "high", "--deadline", "60",
    )  # fmt: skip
    assert done.returncode == 0
    (job,) = answerer.jobs
    assert job.metadata == {"user": "me", "a": "b=c"}
    params = job.params
    assert (params.top_k, params.top_p, params.min_p, params.seed) == (4, 0.5, 0.1, 3)
    assert (params.min_tokens, params.stop, params.stop_token_ids) == (1, ("END", "STOP"), (5,))
    assert params.include_stop_str_in_output
    assert params.ignore_eos
    assert params.logprobs == 2
    assert not params.skip_special_tokens


def test_the_other_options_reach_the_job_too(run: Run, answerer: Answerer) -> None:
    done = run(
        "submit", "x", "--best-of", "3", "--bad-words", "no", "--bad-words", "nein",
        "--logit-bias", '{"5": -1.5, "7": 2}', "--allowed-token-ids", "5",
        "--allowed-token-ids", "7", "--repetition-penalty", "1.1", "--presence-penalty", "-0.5",
        "--frequency-penalty", "0.5", "--prompt-logprobs", "0", "--truncate-prompt-tokens", "-1",
        "--no-detokenize", "--no-spaces-between-special-tokens", "--cache-salt", "mine",
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"")
    (job,) = answerer.jobs
    assert job.cache_salt == "mine"
    expected = SamplingParams(
        best_of=3,
        bad_words=["no", "nein"],
        logit_bias={5: -1.5, 7: 2.0},
        allowed_token_ids=[5, 7],
        repetition_penalty=1.1,
        presence_penalty=-0.5,
        frequency_penalty=0.5,
        prompt_logprobs=0,
        truncate_prompt_tokens=-1,
        detokenize=False,
        spaces_between_special_tokens=False,
        seed=job.params.seed,
    )
    assert job.params == expected


def test_beams_can_be_asked(run_here: RunHere, answerer: Answerer) -> None:
    flags = ("--beam-width", "4", "--length-penalty", "2", "--early-stopping", "never")
    assert run_here("submit", "x", *flags)[0] == 0
    params = answerer.jobs[0].params
    assert (params.beam_width, params.length_penalty, params.early_stopping) == (4, 2.0, "never")


SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}}'


@pytest.mark.parametrize(
    ("arguments", "form"),
    [
        (("--json-schema", SCHEMA), StructuredOutputs(json=SCHEMA)),
        (("--json-schema", "schema.json"), StructuredOutputs(json=SCHEMA)),
        (("--json-object",), StructuredOutputs(json_object=True)),
        (("--regex", "[0-9]+"), StructuredOutputs(regex="[0-9]+")),
        (("--choice", "a", "--choice", "b"), StructuredOutputs(choice=["a", "b"])),
        (("--grammar", 'start: "a"\n' * 99), StructuredOutputs(grammar='start: "a"\n' * 99)),
        (("--structured-outputs", '{"regex": "x"}'), StructuredOutputs(regex="x")),
    ],
    ids=["schema", "schema-file", "object", "regex", "choice", "grammar", "any"],
)
def test_a_form_of_the_output_can_be_asked(
    run_here: RunHere,
    answerer: Answerer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    form: StructuredOutputs,
) -> None:
    (tmp_path / "schema.json").write_text(SCHEMA)
    monkeypatch.chdir(tmp_path)
    code, _, errors = run_here("submit", "x", *arguments)
    assert (code, errors) == (0, "")
    assert answerer.jobs[0].params.structured_outputs == form


def test_several_outputs_are_printed_by_lines_with_their_index(
    run_here: RunHere, answerer: Answerer
) -> None:
    _, streamed, _ = run_here("submit", "x", "--n", "2", "--stream")
    assert streamed == "[0] a\n[0] bc\n[1] xy\n[1] z\n"
    _, whole, _ = run_here("submit", "x", "--n", "2")
    assert whole == "[0] a\n[0] bc\n[1] xy\n[1] z\n"
    job_id = run_here("submit", "x", "--n", "2", "--no-wait")[1].strip()
    # here it is not known beforehand that there are several
    _, later, _ = run_here("result", job_id, "--stream")
    assert later == "a\nb\n[0] c\n[1] xy\n[1] z\n"


@pytest.mark.parametrize(
    ("arguments", "prompt"),
    [
        (("hi", "--chat"), ChatPrompt((ChatMessage("user", "hi"),))),
        (
            ("hi", "--chat", "--system", "be brief"),
            ChatPrompt((ChatMessage("system", "be brief"), ChatMessage("user", "hi"))),
        ),
        (
            ("hi", "--system", "be brief"),
            ChatPrompt((ChatMessage("system", "be brief"), ChatMessage("user", "hi"))),
        ),
        (("1, 2 3", "--token-ids"), TokenPrompt((1, 2, 3))),
    ],
)
def test_chats_and_token_ids_can_be_asked(
    run: Run, answerer: Answerer, arguments: tuple[str, ...], prompt: Any
) -> None:
    assert run("submit", *arguments).returncode == 0
    assert answerer.jobs[0].prompt == prompt


def test_json_prints_events_or_one_result(run: Run, answerer: Answerer) -> None:
    streamed = lines(run("submit", "x", "--stream", "--json").stdout)
    assert [e["text"] for e in streamed] == ["ab", " c", ""]
    assert [e["next_offset"] for e in streamed] == [2, 3, 3]
    assert streamed[-1]["finish_reason"] == "stop"
    assert streamed[-1]["usage"]["completion_tokens"] == 3
    (result,) = lines(run("submit", "x", "--json").stdout)
    assert result["outputs"][0]["text"] == "ab c"
    assert result["outputs"][0]["token_ids"] == [7, 8, 9]
    assert result["usage"]["prompt_tokens"] == 1


def test_no_wait_then_result_status_and_cancel(run: Run, answerer: Answerer) -> None:
    job_id = run("submit", "x", "--no-wait").stdout.decode().strip()
    assert run("result", job_id).stdout == b"ab c\n"
    assert run("result", job_id, "--from-offset", "2").stdout == b" c\n"
    status = run("status", job_id)
    assert b"state: done" in status.stdout
    assert lines(run("status", job_id, "--json").stdout)[0]["finish_reason"] == "stop"
    cancelled = run("cancel", job_id)
    assert (cancelled.returncode, cancelled.stdout) == (0, b"finished\n")
    (submitted,) = lines(run("submit", "y", "--no-wait", "--json").stdout)
    assert submitted["created"] is True


def test_the_same_idempotency_key_finds_the_first_job(run: Run) -> None:
    first = run("submit", "x", "--no-wait", "--idempotency-key", "k").stdout
    assert run("submit", "x", "--no-wait", "--idempotency-key", "k").stdout == first
    other = run("submit", "y", "--no-wait", "--idempotency-key", "k")
    assert other.returncode == 2
    assert b"idempotency_key" in other.stderr


def test_a_prompt_comes_from_standard_input(run: Run, answerer: Answerer) -> None:
    assert run("submit", "-", input="Größe\n".encode()).returncode == 0
    assert answerer.jobs[0].prompt == TextPrompt("Größe")


def test_a_failed_job_exits_with_1_after_its_text(run_here: RunHere, answerer: Answerer) -> None:
    answerer.fails = True
    for flags, shown in (("--stream",), "ab c\n"), ((), "ab c\n"), (("--json",), ""):
        code, output, errors = run_here("submit", "x", *flags)
        assert (code, output) == (1, shown)
        assert "it broke" in errors
        assert "Traceback" not in errors


def test_a_cancelled_job_and_an_expired_one_exit_with_1(run: Run) -> None:
    job_id = run("submit", "x", "--no-wait").stdout.decode().strip()
    assert run("cancel", job_id).stdout == b"cancelled\n"
    done = run("result", job_id)
    assert (done.returncode, b"was cancelled" in done.stderr) == (1, True)
    late = run("submit", "x", "--deadline", "0.1")
    assert (late.returncode, b"expired" in late.stderr) == (1, True)


def test_a_time_out_exits_with_4_and_the_job_goes_on(run: Run) -> None:
    done = run("submit", "x", "--timeout", "0.2")
    assert done.returncode == 4
    assert b"the job itself goes on" in done.stderr


@pytest.mark.parametrize("command", ["result", "status", "cancel"])
def test_an_unknown_job_exits_with_1(run: Run, command: str) -> None:
    done = run(command, "0" * 32 + "-0")
    assert done.returncode == 1
    assert b"Traceback" not in done.stderr
    assert b"is not known to the server" in done.stderr


def test_a_queue_without_a_worker_is_said(run: Run, queue: str) -> None:
    done = run("submit", "x", "--stream", "--timeout", "3")
    assert done.returncode == 4
    said = f"no worker serves queue '{queue}'; waiting"
    assert done.stderr.decode().count(said) == 1


async def test_a_worker_that_reports_is_not_missed(
    start: Callable[..., subprocess.Popen[bytes]], valkey_url: str, queue: str
) -> None:
    keys = QueueKeys(queue)
    async with redis.asyncio.Redis.from_url(valkey_url) as client:
        await QueueScripts(client, keys).register("w", {"model": "m"})
    process = start("submit", "x", "--timeout", "3")
    _, errors = await asyncio.to_thread(process.communicate, timeout=20)
    assert b"no worker" not in errors


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("submit", ""), b"prompt: is empty"),
        (("submit", "x", "--temperature", "-1"), b"temperature: -1.0 is not in [0, inf)"),
        (("submit", "x", "--top-p", "0"), b"top_p: 0.0 is not in (0, 1]"),
        (("submit", "x", "--max-tokens", "many"), b"--max-tokens"),
        (("submit", "x", "--logit-bias", "5"), b"logit_bias"),
        (("submit", "x", "--logit-bias", "{"), b"logit_bias: is not JSON"),
        (
            ("submit", "x", "--json-schema", "no-such-file"),
            b"json_schema: there is no such file, and the text is no JSON",
        ),
        (("submit", "x", "--json-object", "--regex", "x"), b"not allowed with"),
        (("submit", "x", "--regex", "x", "--structured-outputs", "{}"), b"is given twice"),
        (("submit", "x", "--n", "2", "--temperature", "0"), b"n: greedy sampling"),
        (("submit", "x", "--early-stopping", "soon"), b"--early-stopping"),
        (("submit", "x", "--cache-salt", ""), b"cache_salt"),
        (("submit", "x", "--lane", "urgent"), b"--lane"),
        (("submit", "x", "--deadline", "-1"), b"deadline_s"),
        (("submit", "x", "--not-before", "tomorrow"), b"not_before"),
        (("submit", "x", "--metadata", "novalue"), b"metadata"),
        (("submit", "1 x", "--token-ids"), b"prompt_token_ids"),
        (("submit", "1", "--token-ids", "--system", "x"), b"system"),
        (("submit", "x", "--temp", "1"), b"--temp"),
        (("submit", b"\xff\xfe"), b"prompt: is not valid Unicode"),
        (("submit", "x", "--queue", "a b"), b"queue"),
        (("submit", "x", "--redis-url", "http://u:secret@h"), b"url"),
        (("submit",), b"PROMPT"),
        (("result", "nonsense"), b"job_id"),
        (("result", "0" * 32 + "-0", "--from-offset", "-1"), b"from_offset"),
        (("frobnicate",), b"frobnicate"),
        ((), b"COMMAND"),
        (("model", "import", "no-such-model"), b"no-such-model"),
        (("demo", "--prompt", ""), b"prompt: is empty"),
        (("submit", "x", "--deadline-s", "5"), b"did you mean --deadline?"),
        (("submit", "x", "--deadline-s=5"), b"did you mean --deadline?"),
        (("batch", "run", "a", "b", "--bogus"), b"usage: inferq batch run"),
        (("batch", "run", "a", "b", "--window", "9" * 11), b"number in [1, 2147483647]"),
        (("webhooks", "log", "--count", "9" * 5000), b"number in [1, 2147483647]"),
    ],
)
def test_bad_input_exits_with_2_and_says_what(
    run_here: RunHere, arguments: tuple[str | bytes, ...], said: bytes
) -> None:
    code, _, errors = run_here(*arguments)
    assert code == 2
    assert said.decode() in errors
    assert "secret" not in errors


@pytest.mark.parametrize(
    ("note", "said"), [('{"v": "Größe"}'.encode(), '{"v": "Größe"}'), (b"\xff\x01", [255, 1])]
)
def test_the_note_of_a_job_is_text_where_it_can_be(
    run_here: RunHere, valkey_url: str, queue: str, note: bytes, said: str | list[int]
) -> None:
    with Client(valkey_url, queue=queue) as client:
        job = client.submit("x", note=note)
    server = ("--redis-url", valkey_url, "--queue", queue)
    code, output, _ = run_here("status", job.id, *server)
    assert (code, f"note: {said}" in output.splitlines()) == (0, True)
    _, output, _ = run_here("status", job.id, "--json", *server)
    assert json.loads(output)["note"] == said


def test_standard_input_that_is_not_utf8_or_too_long_is_refused(run: Run) -> None:
    latin = run("submit", "-", input="Größe".encode("latin-1"))
    assert (latin.returncode, b"prompt: standard input is not UTF-8" in latin.stderr) == (2, True)
    large = run("submit", "-", input=b"x" * 10_000_000)
    assert (large.returncode, b"4194304" in large.stderr) == (2, True)


def test_no_server_and_a_wrong_password_exit_with_3(run: Run, unused_tcp_port: int) -> None:
    gone = run("submit", "x", "--redis-url", f"redis://:secret@127.0.0.1:{unused_tcp_port}")
    with EmbeddedServer(password="right") as server:
        wrong = run("submit", "x", "--redis-url", f"redis://:secret@127.0.0.1:{server.port}")
        none = run("submit", "x", "--redis-url", f"redis://127.0.0.1:{server.port}")
    with EmbeddedServer() as server:
        no_database = run("submit", "x", "--redis-url", f"redis://127.0.0.1:{server.port}/99")
    for done, said in (
        (gone, b"cannot reach"),
        (wrong, b"refuses us"),
        (none, b"needs a password"),
        (no_database, b"no such database"),
    ):
        assert done.returncode == 3
        assert said in done.stderr
        assert b"secret" not in done.stderr
        assert b"Traceback" not in done.stderr


def test_ctrl_c_leaves_the_job_and_says_how_to_come_back(
    run: Run, start: Callable[..., subprocess.Popen[bytes]], wait_for_job: Callable[[], str]
) -> None:
    process = start("submit", "x", "--stream")
    job_id = wait_for_job()
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=10)
    assert process.returncode == 130
    assert f"inferq result {job_id}".encode() in said
    assert b"Traceback" not in said
    assert b"state: queued" in run("status", job_id).stdout


def test_a_closed_pipe_ends_it_quietly(answerer: Answerer, environment: dict[str, str]) -> None:
    command = f"'{sys.executable}' -P -m inferq submit x --stream --json; echo $? >&2"
    shell = f"({command}) | true"
    done = subprocess.run(
        ["bash", "-c", shell], capture_output=True, env=environment, timeout=30, check=False
    )
    assert done.stderr == b"141\n"


@pytest.mark.parametrize(
    "command",
    [(), ("submit",), ("result",), ("status",), ("cancel",), ("model", "import"), ("demo",)],
)
def test_help_has_examples_and_exit_codes(run_here: RunHere, command: tuple[str, ...]) -> None:
    code, output, _ = run_here(*command, "--help")
    assert code == 0
    text = " ".join(output.split())
    assert "Example" in text
    assert f"inferq {' '.join(command)}".strip() in text
    assert "Exit codes" in text


def test_every_sampling_parameter_has_a_flag_with_help(run_here: RunHere) -> None:
    _, output, _ = run_here("submit", "--help")
    for field in dataclasses.fields(SamplingParams):
        assert f"--{field.name.replace('_', '-')}" in output


def _is_reading(connection: dict[str, str]) -> bool:
    """Whether somebody waits for a job's events, and so knows its id."""
    return connection["cmd"].startswith("xread") and "b" in connection["flags"]


@pytest.fixture
def wait_for_job(valkey_url: str, queue: str) -> Callable[[], str]:
    """Wait until there is a job and its submitter reads; return the job's id."""

    def wait() -> str:
        async def main() -> str:
            async with redis.asyncio.Redis.from_url(valkey_url) as client, asyncio.timeout(10):
                found: Awaitable[Any]
                while not (found := await client.keys(f"inferq:{{{queue}.0}}:job:*")):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
                (key,) = found
                while not any(_is_reading(each) for each in await client.client_list()):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
                return str(key.decode().rpartition(":")[2])

        return asyncio.run(main())

    return wait
