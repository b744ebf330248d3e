"""`inferq batch run` with a queue and a worker only: answers, errors, kills, what it refuses."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from stand_in_worker import StandInWorker, load_tokenizer

from inferq.cli import batch_run
from inferq.producer.batches import surveys

pytestmark = pytest.mark.model

Start = Callable[..., subprocess.Popen[bytes]]
RunHere = Callable[..., tuple[int, str, str]]

MODEL = "stand-in"
TIMEOUT_S = 100


@pytest.fixture
def worker(valkey_url: str, queue: str, smollm2: Path) -> Iterator[Any]:
    """A worker of the queue; its engine is a stand-in that says what the test wants."""
    made = StandInWorker(valkey_url, queue, load_tokenizer(smollm2)).start()
    made.say("Paris.")
    yield made
    made.stop()


def chat(custom_id: str, **body: Any) -> dict[str, Any]:
    """A line: a chat of one message."""
    messages = [{"role": "user", "content": f"Say {custom_id}."}]
    given = {"model": MODEL, "messages": messages, "max_tokens": 4, **body}
    url = "/v1/chat/completions"
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": given}


def write(path: Path, lines: list[Any]) -> Path:
    encoded = (line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)
    path.write_bytes(b"".join(line + b"\n" for line in encoded))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def ids(*files: Path) -> list[str]:
    return sorted(line["custom_id"] for file in files for line in read(file))


def wait_for(condition: Callable[[], object]) -> None:
    give_up = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.02)


@pytest.fixture
def run_batch_here(
    run_here: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> RunHere:
    """Run it to its end in this process, whose logging stays as it is: the worker's lines go."""
    monkeypatch.setattr(batch_run, "configure_logging", lambda *_: None)

    def run(*arguments: object) -> tuple[int, str, str]:
        code, output, errors = run_here("batch", "run", *map(str, arguments))
        lines = [line for line in output.splitlines() if not re.match(r"\d{4}-\d\d-\d\d ", line)]
        return code, "\n".join(lines), errors

    return run


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


@pytest.mark.usefixtures("worker")
def test_every_line_ends_in_the_output_or_the_file_of_errors(
    run_batch_here: RunHere, files: tuple[Path, Path], tmp_path: Path
) -> None:
    wrong = [b"{", {**chat("a"), "url": "/v1/embeddings"}, chat("1"), chat("b", n=0)]
    write(files[0], [*(chat(str(number)) for number in range(20)), *wrong])
    errors = tmp_path / "errors.jsonl"
    code, output, progress = run_batch_here(*files, "--errors", errors)
    assert code == 1, progress
    assert "20 of 24 lines answered" in output
    assert f"4 lines failed: {errors}" in output
    assert "of 24 done" in progress
    answers = read(files[1])
    assert sorted(int(each["custom_id"]) for each in answers) == list(range(20))
    for each in answers:
        body = each["response"]["body"]
        assert each["response"]["status_code"] == 200
        assert body["object"] == "chat.completion"
        assert body["choices"][0]["message"]["content"] == "Paris."
        assert each["error"] is None
    failed = read(errors)
    assert sorted(each["custom_id"] or "" for each in failed) == ["", "1", "a", "b"]
    (refused,) = (each for each in failed if each["custom_id"] == "b")
    assert refused["response"]["status_code"] == 400
    assert refused["response"]["body"]["error"]["param"] == "n"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("errors.jsonl", "in.jsonl", "out.jsonl")
    ]


@pytest.mark.usefixtures("worker")
def test_without_a_file_of_errors_all_lines_are_in_the_output(
    run_batch_here: RunHere, files: tuple[Path, Path]
) -> None:
    write(files[0], [chat("a"), chat("b", temperature=-1), {**chat("c"), "body": {}}])
    code, output, _ = run_batch_here(*files, "--model", MODEL, "--json")
    assert code == 1
    told = json.loads(output)
    assert (told["complete"], told["total"], told["completed"]) == (True, 3, 1)
    assert (told["failed"], told["resumed"]) == (2, 0)
    assert told["completion_tokens"] > 0
    assert ids(files[1]) == ["a", "b", "c"]


@pytest.mark.usefixtures("worker")
def test_a_model_is_filled_in_where_a_line_names_none(
    run_batch_here: RunHere, files: tuple[Path, Path]
) -> None:
    line = chat("a")
    del line["body"]["model"]
    completion = {"prompt": "Hello", "max_tokens": 2}
    write(files[0], [line, {**chat("b"), "body": completion | {"messages": []}}])
    code, output, errors = run_batch_here(*files, "--model", MODEL)
    assert (code, output.splitlines()[0][:21]) == (1, "1 of 2 lines answered"), errors
    files[1].unlink()
    other = {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": completion}
    write(files[0], [other])
    assert run_batch_here(*files, "--model", MODEL)[0] == 0
    assert read(files[1])[0]["response"]["body"]["choices"][0]["text"] == "Paris."


def test_after_a_kill_the_same_command_goes_on_and_asks_nothing_twice(
    start: Start, run_batch_here: RunHere, files: tuple[Path, Path], worker: Any
) -> None:
    worker.slow_down(0.05)  # so that all of it takes long
    names = [str(number) for number in range(200)]
    write(files[0], [chat(name) for name in names])
    command = ("batch", "run", *map(str, files), "--window", "4")
    for asked, signum in ((10, signal.SIGKILL), (30, signal.SIGINT)):
        process = start(*command)
        wait_for(lambda asked=asked: len(worker.engine.requests) >= asked)  # type: ignore[misc]
        process.send_signal(signum)
        _, errors = process.communicate(timeout=TIMEOUT_S)
        assert not files[1].exists()
        if signum == signal.SIGINT:
            assert process.returncode == 130
            assert b"the same command goes on" in errors
        else:
            assert process.returncode == -signum
    worker.slow_down(0.001)
    code, output, errors_text = run_batch_here(*files, "--window", "50")
    assert code == 0, errors_text
    assert "200 of 200 lines answered" in output
    assert ids(files[1]) == sorted(names)
    assert len(worker.engine.requests) == 200
    assert not (files[1].parent / f".{files[1].name}.batch").exists()


def test_what_cannot_be_a_batch_is_refused_by_name(
    run_batch_here: RunHere,
    monkeypatch: pytest.MonkeyPatch,
    files: tuple[Path, Path],
    tmp_path: Path,
) -> None:
    def refused(*arguments: object) -> str:
        code, output, errors = run_batch_here(*arguments)
        assert (code, output) == (2, ""), errors
        return errors

    assert "No such file" in refused(*files)
    files[0].write_bytes(b"")
    assert "has no lines" in refused(*files)
    monkeypatch.setattr(surveys, "MAX_LINES", 3)
    write(files[0], [chat("a")] * 4)
    assert f"{files[0]}, line 4: The file has more than 3 lines." in refused(*files)
    write(files[0], [chat("a")])
    assert "errors: is the output" in refused(*files, "--errors", files[1])
    around = tmp_path / ".." / tmp_path.name / files[1].name
    assert "errors: is the output" in refused(*files, "--errors", around)
    assert "window" in refused(*files, "--window", "0")
    assert "No such file" in refused(files[0], tmp_path / "nowhere" / "out.jsonl")
    files[1].write_bytes(b"dear\n")
    assert f"{files[1]} exists" in refused(*files)
    assert files[1].read_bytes() == b"dear\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_a_second_run_and_another_input_are_refused_while_one_is_unfinished(
    start: Start, run_batch_here: RunHere, files: tuple[Path, Path], worker: Any
) -> None:
    worker.slow_down(30)
    write(files[0], [chat("a"), chat("b")])
    first = start("batch", "run", *map(str, files))
    wait_for(lambda: len(worker.engine.requests) == 2)
    code, _, errors = run_batch_here(*files)
    assert code == 2
    assert "another" in errors
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=TIMEOUT_S)
    assert first.returncode == 130
    write(files[0], [chat("a"), chat("c")])
    code, _, errors = run_batch_here(*files)
    assert code == 2
    assert f"{files[0]} has changed" in errors


def test_it_says_what_it_waits_for(start: Start, files: tuple[Path, Path]) -> None:
    write(files[0], [chat("a")])
    process = start("batch", "run", *map(str, files))
    assert process.stderr is not None
    said = b""
    while b"no worker serves queue" not in said:
        line = process.stderr.readline()
        assert line, said
        said += line
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130


def test_without_a_server_it_ends(run_batch_here: RunHere, files: tuple[Path, Path]) -> None:
    write(files[0], [chat("a")])
    code, _, errors = run_batch_here(*files, "--redis-url", "redis://127.0.0.1:1/0")
    assert code == 3
    assert "inferq: " in errors
