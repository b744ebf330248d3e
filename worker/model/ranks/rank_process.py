"""One rank beside rank 0: its share of the model, in a process that follows commands.

It ends at once when the pipe to rank 0 closes, and by any exception: rank 0 watches it.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, Self

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from inferq.protocol.errors import InferqError
from inferq.worker.engine.config import EngineConfig
from inferq.worker.model.architecture.config import ModelConfig
from inferq.worker.model.loading.loader import load_weights
from inferq.worker.model.loading.model_loading import load_decoder
from inferq.worker.model.ranks.parallel import Share
from inferq.worker.model.ranks.parallel_group import COLLECTIVE_TIMEOUT_S, LOOPBACK, RankGroup
from inferq.worker.model.ranks.parallel_steps import Command, StepSizes, decode, decode_moves
from inferq.worker.model.ranks.rank_logs import write_records
from inferq.worker.model.running.block_moves import BlockMover
from inferq.worker.model.running.kv_cache import KVCacheShape
from inferq.worker.model.sizing.memory import free_memory
from inferq.worker.model.sizing.profiling import MemoryMeter

#: Exit status when rank 0 went away, and when the share could not be loaded.
EXIT_ORPHANED: Final = 70
EXIT_NOT_LOADED: Final = 71
#: Seconds that the end of rank 0 may come after the errors that it causes.
_ORPHAN_TIMEOUT_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOptions:
    """What a rank is told at its start."""

    rank: int
    size: int
    #: Where rank 0's store listens, on this machine.
    port: int
    #: "cpu" or "cuda".
    device: str
    #: Of torch, on the CPU.
    threads: int
    #: Arguments of `EngineConfig`, in which `model`, `max_model_len` and the dtypes are settled.
    config: dict[str, Any]

    @classmethod
    def read(cls, data: bytes) -> Self:
        """Read what rank 0 sends first."""
        return cls(**json.loads(data))


class RankWorker:
    """A share of a model, and its KV cache."""

    def __init__(self, options: RankOptions) -> None:
        self._options = options
        self._config = config = EngineConfig(**options.config)
        self._device = torch.device("cpu")
        if options.device == "cuda":
            self._device = torch.device("cuda", options.rank)
            torch.cuda.set_device(self._device)
        else:
            torch.set_num_threads(options.threads)
        folder, dtype = Path(config.model), getattr(torch, config.dtype)
        model = ModelConfig.read(folder)
        self._group = RankGroup(options.rank, options.size, self._device)
        self._decoder = load_decoder(
            folder,
            model,
            config,
            max_model_len=config.max_model_len or model.max_position_embeddings,
            dtype=dtype,
            device=self._device,
            load=load_weights,
            group=self._group,
        )
        self._hidden_size, self._dtype = model.hidden_size, dtype
        share = Share(model, options.rank, options.size)
        cache_dtype = getattr(torch, config.kv_cache_dtype)
        self._shape = KVCacheShape.of(share.config, config.block_size, cache_dtype)
        self._allocate(1, 0)
        self._meter: MemoryMeter | None = None

    @torch.inference_mode()
    def follow(self, command: Command, numbers: Sequence[int]) -> list[int] | None:
        """Do what rank 0 does at the same time; return the answer to commands that have one."""
        match command:
            case Command.CONNECT:
                self._group.connect(
                    TCPStore(
                        LOOPBACK,
                        self._options.port,
                        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
                    )
                )
            case Command.MEASURE:
                self._meter = MemoryMeter(self._device)
            case Command.MEASURED:
                assert self._meter is not None, "measuring was begun"
                self._meter.end_step()
                budget = self._meter.budget(self._config, graphs=0)
                return [budget, free_memory(self._device)]
            case Command.ALLOCATE:
                self._allocate(*numbers)
                return []
            case Command.MOVE:
                plan = decode_moves(numbers)
                self._mover.start(plan)
                self._mover.finish(plan)
            case Command.STEP:
                self._step(StepSizes.read(numbers))
            case Command.LOGITS:
                self._decoder.logits(self._hidden_rows(*numbers))
        return None

    def _step(self, sizes: StepSizes) -> None:
        step = sizes.receive(self._group.broadcast, self._shape.block_size, self._device)
        self._decoder.hidden(step, self._kv_cache)

    def _hidden_rows(self, count: int) -> Tensor:
        rows = torch.empty(count, self._hidden_size, dtype=self._dtype, device=self._device)
        self._group.broadcast(rows)
        return rows

    def _allocate(self, num_blocks: int, num_swap_blocks: int) -> None:
        self._kv_cache = self._shape.allocate(num_blocks, self._device)
        host_blocks = self._shape.allocate_on_host(num_swap_blocks, self._device)
        self._mover = BlockMover(self._kv_cache, host_blocks)


def main(connection: Connection) -> int:
    """Load the share that rank 0 names, then follow its commands; return the exit status."""
    write_records()
    try:
        options = RankOptions.read(connection.recv_bytes())
    except (EOFError, OSError):
        return EXIT_ORPHANED
    commands: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, commands), name="inbox", daemon=True).start()
    try:
        worker = RankWorker(options)
        _answer(connection, {"numbers": []})
        while True:
            numbers = worker.follow(*decode(commands.get()))
            if numbers is not None:
                _answer(connection, {"numbers": numbers})
    except RuntimeError:
        # Where rank 0 is gone, or ends us because of another rank, that has been told already.
        time.sleep(_ORPHAN_TIMEOUT_S)
        raise
    except InferqError as error:
        field = str(getattr(error, "field", "model"))
        failure = str(error).removeprefix(f"{field}: ")
        _answer(connection, {"failed": failure, "field": field})
        return EXIT_NOT_LOADED


def _read(connection: Connection, commands: queue.SimpleQueue[bytes]) -> None:
    """Hand on commands; when rank 0 is gone, end the process, in the middle of a step too."""
    try:
        while True:
            commands.put(connection.recv_bytes())
    except (EOFError, OSError):
        os._exit(EXIT_ORPHANED)


def _answer(connection: Connection, answer: dict[str, Any]) -> None:
    try:
        connection.send_bytes(json.dumps(answer).encode())
    except OSError:
        os._exit(EXIT_ORPHANED)


if __name__ == "__main__":
    sys.exit(main(Connection(int(sys.argv[1]))))
