"""The processes of a divided model: what they compute, and how they end."""

from __future__ import annotations

import gc
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from inferq.protocol.errors import ModelError
from inferq.protocol.params import SamplingParams
from inferq.worker.engine.config import EngineConfig
from inferq.worker.engine.engine import Engine
from inferq.worker.engine.requests.sequence import EngineRequest
from inferq.worker.factory import load_engine
from inferq.worker.model.ranks import parallel_group, rank_processes
from inferq.worker.model.ranks.rank_processes import RankLost

#: Processes that import torch take their time while others use the cores.
pytestmark = pytest.mark.timeout(300)

Make = Callable[..., Any]
#: Of one KV head, which all ranks repeat: any number of ranks that divides 12 will do.
TWELVE_HEADS = {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 1}


def engine_of(folder: Path, size: int, **handlers: Any) -> Engine:
    config = EngineConfig(
        model=str(folder),
        device="cpu",
        num_kv_blocks=32,
        max_model_len=64,
        tensor_parallel_size=size,
        max_prefill_delay_ms=0,
    )
    return load_engine(config, **handlers)


def add(engine: Engine, prompt: list[int], name: str = "r", **params: Any) -> None:
    engine.add_request(
        EngineRequest(
            request_id=name,
            prompt_token_ids=tuple(prompt),
            params=SamplingParams(seed=0, ignore_eos=True, **params),
            arrival=0.0,
        )
    )


def run(engine: Engine) -> None:
    while engine.has_work():
        engine.step()


def ranks_of(pid: int) -> list[int]:
    """Process ids of the ranks that a process has started, and has not let go."""
    gc.collect()  # engines of earlier tests end their ranks when they are collected
    lists = (Path("/proc") / str(pid) / "task").glob("*/children")
    pids = [int(child) for children in lists for child in children.read_text().split()]
    return [
        child for child in pids if b"rank_process" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]


def wait_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() and not is_zombie(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_any_number_of_ranks_gives_the_same_tokens_and_ends_with_its_engine(
    make_model: Make, random_text: Make
) -> None:
    folder = make_model(**TWELVE_HEADS)
    found: dict[int, Any] = {}
    for size in (1, 2, 3, 4):
        engine = engine_of(folder, size)
        pids = ranks_of(os.getpid())
        assert len(pids) == size - 1
        for index in range(3):
            add(engine, random_text(9 + index, index), str(index), temperature=0.0, max_tokens=8)
        add(engine, random_text(20, 9), "echo", temperature=0.0, max_tokens=1, prompt_logprobs=0)
        tokens: dict[str, list[int]] = {}
        logprobs: list[float] = []
        while engine.has_work():
            for output in engine.step():
                assert output.error is None
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
                logprobs += [each.logprob for each in output.prompt_logprobs or () if each]
        found[size] = tokens, logprobs
        del engine
        gc.collect()
        wait_gone(pids)
    assert len(found[1][1]) == 19
    for size in (2, 3, 4):
        assert found[size][0] == found[1][0]
        assert found[size][1] == pytest.approx(found[1][1], abs=1e-4)


def test_three_ranks_with_awq_weights_give_the_tokens_of_one(
    make_model: Make, pack_awq: Make, random_text: Make, tmp_path: Path
) -> None:
    write_awq(make_model(**TWELVE_HEADS), pack_awq, tmp_path)
    found = []
    for size in (1, 3):
        engine = engine_of(tmp_path, size)
        for index in range(3):
            params = {"temperature": 0.0, "max_tokens": 8, "logprobs": 2}
            add(engine, random_text(9 + index, index), str(index), **params)
        found.append(choices(engine))
    one, three = found
    # Sums in another order may change a choice between two that are as good.
    clear = {
        name: list(itertools.takewhile(lambda choice: choice[1] > 0.01, chosen))
        for name, chosen in one.items()
    }
    assert sum(map(len, clear.values())) >= 12
    for name, chosen in clear.items():
        tokens = [token for token, _ in chosen]
        assert [token for token, _ in three[name]][: len(tokens)] == tokens


def choices(engine: Engine) -> dict[str, list[tuple[int, float]]]:
    """Return each request's tokens, with the logprobs by which each was the best."""
    found: dict[str, list[tuple[int, float]]] = {}
    while engine.has_work():
        for output in engine.step():
            tops = [chosen.top for chosen in output.logprobs or ()]
            gaps = [best - second for (_, best), (_, second) in tops]
            found.setdefault(output.request_id, []).extend(zip(output.token_ids, gaps, strict=True))
    return found


def write_awq(source: Path, pack_awq: Make, folder: Path) -> None:
    """Write a copy of a model with projections of four bits, in groups of 32."""
    tensors = load_file(source / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        packed = asdict(pack_awq(tensors.pop(name), 32))
        module = name.removesuffix(".weight")
        tensors |= {f"{module}.{kind}": part for kind, part in packed.items()}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": 32}
    (folder / "config.json").write_text(json.dumps(config))


def test_a_killed_rank_is_told_at_once_and_ends_the_others(
    make_model: Make, random_text: Make
) -> None:
    is_lost = threading.Event()
    engine = engine_of(make_model(), 4, on_rank_lost=is_lost.set)
    pids = ranks_of(os.getpid())
    assert len(pids) == 3
    add(engine, random_text(9, 1), max_tokens=50)
    engine.step()
    os.kill(pids[1], signal.SIGKILL)
    assert is_lost.wait(10)
    started = time.monotonic()
    with pytest.raises(RankLost, match=r"^rank \d ended with status -9"):
        run(engine)
    assert time.monotonic() - started < 10
    with pytest.raises(RankLost):
        engine.step()
    del engine
    gc.collect()
    wait_gone(pids)


def test_a_rank_that_does_not_come_is_not_waited_for_for_ever(
    make_model: Make, random_text: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel_group, "COLLECTIVE_TIMEOUT_S", 4.0)
    engine = engine_of(make_model(), 2)
    [pid] = ranks_of(os.getpid())
    add(engine, random_text(9, 1), max_tokens=50)
    engine.step()
    os.kill(pid, signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(RankLost, match=r"a step of several ranks failed: .*[Tt]imed out"):
        run(engine)
    assert time.monotonic() - started < 30
    wait_gone([pid])


def test_a_step_that_is_cut_off_ends_the_ranks(
    make_model: Make, random_text: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the middle of a step: who knows where the others are."""
    engine = engine_of(make_model(), 2)
    pids = ranks_of(os.getpid())
    add(engine, random_text(9, 1), max_tokens=50)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(parallel_group.RankGroup, "broadcast", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    with pytest.raises(RankLost, match="was cut off: KeyboardInterrupt"):
        engine.step()
    wait_gone(pids)


OWNER = """
import sys, time
from inferq.worker.engine.config import EngineConfig
from inferq.worker.factory import load_engine
if __name__ == "__main__":
    engine = load_engine(
        EngineConfig(
            model=sys.argv[1],
            device="cpu",
            num_kv_blocks=32,
            max_model_len=64,
            tensor_parallel_size=2,
            max_prefill_delay_ms=0,
        )
    )
    print("ready", flush=True)
    time.sleep(60)
"""


def test_ranks_end_with_the_process_that_started_them(make_model: Make) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(make_model())], stdout=subprocess.PIPE
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"ready\n"
        pids = ranks_of(owner.pid)
        assert len(pids) == 1
        owner.kill()
        wait_gone(pids)


FAILING = """
import sys
from multiprocessing.connection import Connection
from inferq.protocol.errors import ModelError
from inferq.worker.model.ranks import rank_process

class Failing(rank_process.RankWorker):
    def _allocate(self, num_blocks, num_swap_blocks):
        super()._allocate(num_blocks, num_swap_blocks)
        if num_blocks > 1:
            raise ModelError("no room for so many", field="num_kv_blocks")

rank_process.RankWorker = Failing
sys.exit(rank_process.main(Connection(int(sys.argv[1]))))
"""


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("raise SystemExit(5)", "^tensor_parallel_size: rank 1 ended with status 5 while"),
        (FAILING, "^num_kv_blocks: rank 1: no room for so many"),
    ],
    ids=["gone", "failed"],
)
def test_what_a_rank_cannot_load_is_told(
    make_model: Make, monkeypatch: pytest.MonkeyPatch, program: str, message: str
) -> None:
    monkeypatch.setattr(rank_processes, "_COMMAND", (sys.executable, "-c", program))
    with pytest.raises(ModelError, match=message):
        engine_of(make_model(), 2)


def test_a_model_that_transformers_computes_is_not_divided(make_model: Make) -> None:
    folder = make_model("StableLm")
    with pytest.raises(ModelError, match="StableLmForCausalLM is computed by transformers"):
        engine_of(folder, 2)
