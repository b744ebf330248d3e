"""Tiny models with random weights, made by transformers, and a driver for our decoder."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from inferq.protocol.params import SamplingParams
from inferq.worker.engine.config import EngineConfig
from inferq.worker.engine.engine import Engine
from inferq.worker.engine.requests.sequence import EngineRequest, Sequence, SequenceStatus
from inferq.worker.engine.scheduling.plan import (
    BlockCopy,
    ScheduledSequence,
    SequenceResult,
    StepPlan,
)
from inferq.worker.engine.scheduling.preemption import ForcedPreemption
from inferq.worker.model.loading.loader import load_weights
from inferq.worker.model.loading.model_loading import load_model, read_model_config
from inferq.worker.model.running.kv_cache import KVCacheShape
from inferq.worker.model.running.runner import DecoderRunner, load_runner
from inferq.worker.model.running.step_inputs import StepInputBuilder

TINY = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

MakeModel = Callable[..., Path]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny products gain nothing from threads, and lose much beside other processes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """Save a tiny random model, `family` of transformers with `TINY` and the given settings."""

    def make(family: str = "Llama", **settings: object) -> Path:
        torch.manual_seed(0)
        config = getattr(transformers, f"{family}Config")(**{**TINY, **settings})
        model = transformers.AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            # Larger than the default: logits must differ enough to show a mistake.
            torch.nn.init.normal_(parameter, std=0.2 if parameter.dim() > 1 else 0.5)
        folder = tmp_path_factory.mktemp("model")
        model.save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def reference_logits() -> Callable[..., Tensor]:
    """Give transformers' logits [T, vocabulary] of a whole text."""
    return _reference_logits


@pytest.fixture(scope="session")
def random_text() -> Callable[[int, int], list[int]]:
    """Give token ids of the tiny vocabulary, of a length and from a seed."""
    return lambda length, seed: random.Random(seed).choices(range(3, TINY["vocab_size"]), k=length)


def _reference_logits(
    folder: Path, token_ids: list[int], dtype: torch.dtype = torch.float32
) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = _reference_model(folder, dtype)(torch.tensor([token_ids])).logits[0]
    return logits


@lru_cache(maxsize=1)
def _reference_model(folder: Path, dtype: torch.dtype) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager"
    )


class Driver:
    """Runs texts through a model in any chunks, with scattered blocks, keeping all logits."""

    def __init__(
        self,
        folder: Path,
        block_size: int = 4,
        num_blocks: int = 160,
        max_positions: int = 128,
        dtype: torch.dtype = torch.float32,
        quantization: str | None = None,
        lora_adapters: dict[str, str] | None = None,
    ) -> None:
        self.config = read_model_config(folder)
        device = torch.device("cpu")
        self.decoder = load_model(
            folder,
            self.config,
            EngineConfig(model=str(folder), quantization=quantization, lora_adapters=lora_adapters),
            max_model_len=max_positions,
            dtype=dtype,
            device=device,
            load=load_weights,
        )
        self.kv_cache = KVCacheShape.of(self.config, block_size, dtype).allocate(num_blocks, device)
        # What nobody wrote must not be read.
        self.kv_cache.fill_(torch.nan)
        self.block_size = block_size
        self.blocks = list(range(num_blocks))
        random.Random(0).shuffle(self.blocks)
        self.inputs = StepInputBuilder(
            max_num_seqs=8,
            max_num_tokens=256,
            max_model_len=max_positions,
            block_size=block_size,
            vocab_size=self.config.vocab_size,
            device=device,
            adapters=tuple(lora_adapters or ()),
        )

    def sequence(self, token_ids: list[int], adapter: str = "") -> Sequence:
        """Give a sequence that knows all of its tokens and has computed none."""
        params = SamplingParams(temperature=0.0, seed=0)
        request = EngineRequest(
            request_id=str(len(self.blocks)),
            prompt_token_ids=tuple(token_ids),
            params=params,
            adapter=adapter,
        )
        return Sequence(request, self.block_size)

    @torch.inference_mode()
    def step(self, chunks: list[tuple[Sequence, int]]) -> list[Tensor]:
        """Compute so many tokens of each sequence; give the logits [tokens, vocabulary] of each."""
        for sequence, count in chunks:
            end = sequence.num_computed_tokens + count
            while len(sequence.block_table) * self.block_size < end:
                sequence.block_table.append(self.blocks.pop())
        chunks = sorted(chunks, key=lambda chunk: chunk[1] > 1)
        plan = StepPlan([ScheduledSequence(sequence, count) for sequence, count in chunks])
        inputs = self.inputs.build(plan)
        step = replace(inputs.tensors, rows=torch.arange(plan.num_tokens))
        logits = self.decoder.logits(self.decoder.hidden(step, self.kv_cache))
        parts = dict(zip([s for s, _ in chunks], logits.split([n for _, n in chunks]), strict=True))
        for sequence, count in chunks:
            sequence.num_computed_tokens += count
        return [parts[sequence] for sequence, _ in chunks]

    def logits_in_chunks(
        self, texts: list[list[int]], chunks: list[list[int]], adapters: tuple[str, ...] = ()
    ) -> list[Tensor]:
        """Run texts side by side, the i-th in steps of chunks[i] tokens, then one by one."""
        names = adapters or ("",) * len(texts)
        sequences = [self.sequence(*each) for each in zip(texts, names, strict=True)]
        collected: list[list[Tensor]] = [[] for _ in texts]
        pending = [list(sizes) for sizes in chunks]
        while any(s.num_computed_tokens < len(s.token_ids) for s in sequences):
            work = []
            for index, sequence in enumerate(sequences):
                left = len(sequence.token_ids) - sequence.num_computed_tokens
                if left:
                    size = pending[index].pop(0) if pending[index] else 1
                    work.append((index, min(size, left)))
            work.sort(key=lambda item: item[1] > 1)
            logits = self.step([(sequences[index], size) for index, size in work])
            for (index, _), part in zip(work, logits, strict=True):
                collected[index].append(part)
        return [torch.cat(parts) for parts in collected]


@pytest.fixture(scope="session")
def driver_of() -> Callable[..., Driver]:
    """Load a folder into a `Driver`."""
    return Driver


class Loop:
    """Drives a runner as an engine would: blocks from one list, every sequence in every step."""

    def __init__(self, runner: DecoderRunner, block_size: int = 16, seed: int = 0) -> None:
        self.runner = runner
        self.block_size = block_size
        self.free = list(range(runner.num_blocks))
        random.Random(seed).shuffle(self.free)
        self.results: dict[Sequence, list[SequenceResult]] = {}
        self.copies: list[BlockCopy] = []

    def add(
        self, token_ids: list[int], name: str = "", *, adapter: str = "", **params: Any
    ) -> Sequence:
        """Give a new sequence, to be run by `run` or `step`."""
        request = EngineRequest(
            request_id=name or str(len(self.results)),
            prompt_token_ids=tuple(token_ids),
            adapter=adapter,
            params=SamplingParams(**{"seed": 7, "ignore_eos": True, **params}),
        )
        sequence = Sequence(request, self.block_size)
        self.results[sequence] = []
        return sequence

    def step(
        self, sequences: list[Sequence], chunk: int = 10**6, children: tuple[int, ...] = ()
    ) -> list[SequenceResult]:
        """Compute at most `chunk` tokens of each sequence, and append what is sampled."""
        plan = self.plan(sequences, chunk, children)
        items = plan.scheduled
        results = self.runner.execute(plan)
        for item, result in zip(items, results, strict=True):
            assert item.samples == bool(result.samples or result.candidates)
            item.sequence.num_computed_tokens += item.num_tokens
            self.results[item.sequence].append(result)
            if len(result.samples) == 1:
                item.sequence.token_ids.append(result.samples[0].token_id)
        by_sequence = {item.sequence: result for item, result in zip(items, results, strict=True)}
        return [by_sequence[sequence] for sequence in sequences]

    def plan(
        self, sequences: list[Sequence], chunk: int = 10**6, children: tuple[int, ...] = ()
    ) -> StepPlan:
        """Plan at most `chunk` tokens of each sequence, with the blocks that they take."""
        items = [
            ScheduledSequence(
                s,
                min(chunk, len(s.token_ids) - s.num_computed_tokens),
                children,
                2 * (s.params.beam_width or 0),
            )
            for s in sequences
        ]
        items.sort(key=lambda item: item.num_tokens > 1)
        for item in items:
            self._cover(item.sequence, item.sequence.num_computed_tokens + item.num_tokens)
        plan = StepPlan(items, block_copies=self.copies)
        self.copies = []
        return plan

    def run(self, sequences: list[Sequence], chunk: int = 10**6, stop: int | None = None) -> None:
        """Step until all have `max_tokens`, or end with the token `stop`."""
        left = sequences
        while left := [s for s in left if not self._is_done(s, stop)]:
            self.step(left, chunk)
        for sequence in sequences:
            self.drop(sequence)
            sequence.status = SequenceStatus.FINISHED

    def drop(self, sequence: Sequence) -> None:
        """Take a sequence's blocks; it is computed again when it runs next."""
        self.free += sequence.block_table
        sequence.block_table = []
        sequence.num_computed_tokens = 0

    def fork(self, parent: Sequence, child_index: int) -> Sequence:
        """Give a sequence that shares the parent's full blocks, and has a copy of the last one."""
        child = self.add(parent.token_ids[: parent.num_prompt_tokens], parent.request_id)
        child.params, child.child_index = parent.params, child_index
        child.token_ids = parent.token_ids.copy()
        child.num_computed_tokens = parent.num_computed_tokens
        child.block_table = parent.block_table.copy()
        return child

    def copy_on_write(self, sequence: Sequence) -> None:
        """Give the sequence a last block of its own, copied in the next step."""
        block = self.free.pop()
        self.copies.append(BlockCopy(sequence.block_table[-1], block))
        sequence.block_table[-1] = block

    def _cover(self, sequence: Sequence, num_tokens: int) -> None:
        while len(sequence.block_table) * self.block_size < num_tokens:
            sequence.block_table.append(self.free.pop())

    @staticmethod
    def _is_done(sequence: Sequence, stop: int | None) -> bool:
        output = sequence.output_token_ids
        return len(output) == sequence.params.max_tokens or (bool(output) and output[-1] == stop)


@pytest.fixture(scope="session")
def loop_of() -> Callable[..., Loop]:
    """Load a folder into a runner, and give a `Loop` over it."""

    def make(folder: Path, **options: Any) -> Loop:
        options = {"num_kv_blocks": 64, "device": "cpu", **options}
        config = EngineConfig(model=str(folder), **options)
        return Loop(load_runner(config), config.block_size)

    return make


class Disturbance:
    """Preempts a random running sequence before every few steps, by either means."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def __call__(self, running: tuple[Sequence, ...]) -> Iterator[ForcedPreemption]:
        if running and self._rng.random() < 0.15:
            yield ForcedPreemption(self._rng.choice(running), by_swap=self._rng.random() < 0.5)


@pytest.fixture(scope="session")
def engine_over() -> Callable[..., Engine]:
    """Make an engine over a runner, by default the configuration's own; `rng` disturbs it."""

    def make(
        config: EngineConfig, runner: DecoderRunner | None = None, rng: random.Random | None = None
    ) -> Engine:
        runner = runner or load_runner(config)
        return Engine(
            config,
            runner,
            num_blocks=runner.num_blocks,
            max_model_len=runner.max_model_len,
            eos_token_ids=runner.eos_token_ids,
            vocab_size=runner.vocab_size,
            num_swap_blocks=runner.num_swap_blocks,
            preemption_hook=None if rng is None else Disturbance(rng),
            launches_ahead=runner.launches_ahead,
        )

    return make


@pytest.fixture(scope="session")
def run_history() -> Callable[..., dict[tuple[str, int], list[int]]]:
    """Step an engine until all requests are done; give the tokens of each output.

    With `rng` they come one after the other, before a step with probability `haste`.
    """

    def run(
        engine: Engine,
        requests: list[EngineRequest],
        rng: random.Random | None = None,
        *,
        haste: float = 0.4,
    ) -> dict[tuple[str, int], list[int]]:
        outputs: dict[tuple[str, int], list[int]] = {}
        waiting = list(requests)
        while waiting or engine.has_work():
            if rng is None:
                count = len(waiting)
            else:
                count = int(rng.random() < haste or not engine.has_work())
            for request in waiting[:count]:
                engine.add_request(request)
            del waiting[:count]
            for output in engine.step():
                assert output.error is None, output.error
                outputs.setdefault((output.request_id, output.index), []).extend(output.token_ids)
            engine.check_integrity()
        return outputs

    return run
