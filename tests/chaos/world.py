"""The processes of a soak: a server that keeps its data, workers behind proxies, a tiny model."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from proxy import FaultyProxy

from inferq.embedded import EmbeddedServer

LEASE_S = 3.0
#: Kills that a job survives: more than chance brings about an innocent one.
MAX_CRASHES = 6


def make_model(folder: Path, tokenizer_of: Path) -> Path:
    """Save a random Llama of two layers, with the tokenizer of another model."""
    import shutil

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.5,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (tokenizer_of / name).is_file():
            shutil.copy(tokenizer_of / name, folder / name)
    return folder


@dataclass
class Worker:
    """One worker process, which may be killed, stopped, drained and started again."""

    place: int
    proxy: FaultyProxy
    queue: str
    model: Path
    log: Path
    generation: int = 0
    process: subprocess.Popen[bytes] | None = None
    is_paused: bool = False

    @property
    def name(self) -> str:
        return f"w{self.place}-{self.generation}"

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        self.generation += 1
        settings = {
            "model": self.model,
            "redis_url": self.proxy.url,
            "queue": self.queue,
            "worker_name": self.name,
            "lease_s": LEASE_S,
            "drain_timeout_s": 2,
            "report_interval_s": 1,
            "max_crashes": MAX_CRASHES,
            "max_model_len": 256,
            "num_kv_blocks": 96,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 256,
            "preemption_mode": "recompute",
        }
        arguments = [
            part
            for key, value in settings.items()
            for part in (f"--{key.replace('_', '-')}", str(value))
        ]
        with self.log.open("ab") as stream:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "inferq", "worker", *arguments],
                stderr=stream,
                stdout=stream,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self.is_paused = False

    def kill(self) -> None:
        """End the worker and its engine without warning."""
        if self.process is not None:
            for pid in (*self._children(), self.process.pid):
                _signal(pid, signal.SIGKILL)
            self.process.wait()

    def pause(self) -> None:
        self.is_paused = True
        for pid in (self.process.pid, *self._children()) if self.process else ():
            _signal(pid, signal.SIGSTOP)

    def resume(self) -> None:
        self.is_paused = False
        for pid in (self.process.pid, *self._children()) if self.process else ():
            _signal(pid, signal.SIGCONT)

    def terminate(self) -> None:
        if self.process is not None:
            _signal(self.process.pid, signal.SIGTERM)

    def _children(self) -> list[int]:
        assert self.process is not None
        lists = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        return [int(pid) for each in lists for pid in each.read_text().split()]


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it ended by itself


def cut_append_only_file(server: EmbeddedServer, directory: Path, chance: random.Random) -> int:
    """Kill the server, take the end off its append-only file, and start it; return the bytes."""
    server.kill()
    [file] = (directory / "appendonlydir").glob("*.incr.aof")
    size = file.stat().st_size
    taken = min(size // 2, chance.randrange(1, 4000))
    os.truncate(file, size - taken)
    server.restart()
    return taken
