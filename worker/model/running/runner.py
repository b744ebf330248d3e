"""Runs an engine's plans on a loaded model."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from inferq.protocol.errors import ModelError
from inferq.protocol.messages import TokenLogprob
from inferq.worker.engine.config import EngineConfig
from inferq.worker.engine.requests.sequence import Sequence
from inferq.worker.engine.runner_errors import NonFiniteLogitsError
from inferq.worker.engine.sampling.logits_editor import LogitsEditor, PendingEdits
from inferq.worker.engine.sampling.logprobs import ROWS_AT_ONCE, token_logprobs
from inferq.worker.engine.sampling.sampler import Sampler, Sampling
from inferq.worker.engine.scheduling.plan import RunnerSpeeds, SequenceResult, StepHandle, StepPlan
from inferq.worker.model.architecture.causal_model import CausalModel, ModelShape
from inferq.worker.model.architecture.config import ModelConfig
from inferq.worker.model.architecture.linear import check_quantization
from inferq.worker.model.architecture.serving_limits import served_dtype, served_length
from inferq.worker.model.architecture.transformer import Decoder
from inferq.worker.model.architecture.vocabulary import ModelVocabulary, tokenizer_vocab_size
from inferq.worker.model.loading.hub import find_model_folder
from inferq.worker.model.loading.ineffective_options import ineffective_options
from inferq.worker.model.loading.loader import WeightLoader, load_weights
from inferq.worker.model.loading.model_loading import load_model, read_model_config
from inferq.worker.model.ranks.parallel_decoder import ParallelDecoder
from inferq.worker.model.ranks.parallel_loading import load_divided
from inferq.worker.model.running.asked import PromptRows
from inferq.worker.model.running.block_moves import BlockMover
from inferq.worker.model.running.cuda_graphs import (
    CudaGraphs,
    DecodeGraphs,
    GraphBackend,
    graph_sizes,
    uses_graphs,
)
from inferq.worker.model.running.device_rows import DeviceRows
from inferq.worker.model.running.kv_cache import (
    KVCacheShape,
    cpu_budget,
    pool_size,
    settle_kv_cache_dtype,
    swap_pool_size,
)
from inferq.worker.model.running.recorded_decodes import RecordedDecodes, uses_recordings
from inferq.worker.model.running.step_inputs import (
    DecodeInputs,
    StepInputBuilder,
    StepInputs,
    StepSamples,
)
from inferq.worker.model.running.step_results import step_results
from inferq.worker.model.sizing.memory import free_memory
from inferq.worker.model.sizing.profiling import cuda_budget, prefill_speed
from inferq.worker.model.sizing.start_table import StartTable

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step whose work the device has been given."""

    plan: StepPlan
    step: StepSamples | None
    sampling: Sampling | None = None
    prompt_logprobs: dict[int, tuple[TokenLogprob, ...]] = field(default_factory=dict)
    check: Callable[[], None] | None = None
    """Raises if what came back from the device cannot be trusted."""

    def results(self) -> list[SequenceResult]:
        """Wait for the sampled tokens; return one result for each scheduled sequence."""
        if self.step is None:
            return []
        try:
            samples = None if self.sampling is None else self.sampling.finish()
        finally:
            if self.check is not None:
                self.check()
        return step_results(self.plan, self.step, samples, self.prompt_logprobs)


@dataclass(frozen=True, slots=True)
class ThreadStep:
    """A step that a thread computes."""

    future: Future[list[SequenceResult]]

    def results(self) -> list[SequenceResult]:
        """Wait for the thread."""
        return self.future.result()


class DecoderRunner:
    """A decoder, its KV cache and its sampler, on one device; for one thread.

    A GPU works beside the host by itself; on the CPU, launched steps are computed by a thread.
    """

    def __init__(
        self,
        decoder: CausalModel,
        kv_cache: Tensor,
        swap_space: Tensor,
        config: EngineConfig,
        *,
        folder: Path,
        max_model_len: int,
        vocab_size: int,
        launches_ahead: bool = False,
        graphs: GraphBackend | None = None,
        mover: BlockMover | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        self.config = decoder.config
        #: Where the model was read from; its tokenizer lies there too.
        self.folder = folder
        self.num_blocks = kv_cache.shape[0]
        #: Blocks of host memory for sequences that are swapped out.
        self.num_swap_blocks = swap_space.shape[0]
        self.max_model_len = max_model_len
        #: Tokens that exist: rows of the head beyond the tokenizer's ids are padding.
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(i for i in decoder.config.eos_token_ids if i < vocab_size)
        self._decoder = decoder
        self._kv_cache = kv_cache
        self._block_size = config.block_size
        self._max_num_tokens = config.max_num_batched_tokens
        self._mover = mover or BlockMover(kv_cache, swap_space)
        self._check = check
        #: Whether steps should be launched before the one ahead of them is collected.
        self.launches_ahead = launches_ahead
        self._thread = None
        if launches_ahead and kv_cache.device.type == "cpu":
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="decoder")
        #: The tokens that the latest step sampled, on the device.
        self._sampled = torch.zeros(
            graph_sizes(config.max_num_seqs)[-1], dtype=torch.int64, device=kv_cache.device
        )
        self._graphs = None
        if graphs is not None:
            max_blocks = -(-max_model_len // config.block_size)
            self._graphs = DecodeGraphs(
                decoder,
                kv_cache,
                DeviceRows(config.max_num_seqs, max_blocks, kv_cache.device),
                self._sampled,
                graphs,
                sizes=graph_sizes(config.max_num_seqs),
                max_model_len=max_model_len,
                vocab_size=vocab_size,
                has_adapters=bool(config.lora_adapters),
            )
        self._recorded = None
        if isinstance(decoder, Decoder) and uses_recordings(config, decoder):
            max_blocks = -(-max_model_len // config.block_size)
            self._recorded = RecordedDecodes(decoder, kv_cache, max_blocks)
        self._sampler = Sampler(vocab_size)
        self._editor = LogitsEditor(ModelVocabulary(folder), vocab_size, self.eos_token_ids)
        self._inputs = StepInputBuilder(
            max_num_seqs=config.max_num_seqs,
            max_num_tokens=max(config.max_num_batched_tokens, config.max_num_seqs),
            max_model_len=max_model_len,
            block_size=config.block_size,
            vocab_size=vocab_size,
            device=kv_cache.device,
            adapters=tuple(config.lora_adapters or ()),
        )

    def execute(self, plan: StepPlan) -> list[SequenceResult]:
        """Move blocks, compute the plan's tokens and sample.

        Raises `FailedRequestsError` for requests that cannot go on; the blocks are moved then.
        """
        return self._begin(plan, self._build(plan)).results()

    def launch(self, plan: StepPlan) -> StepHandle:
        """Begin what `execute` does; errors come now or with the results.

        Sequences of which `Engine` must know the results first may be read until then.
        """
        step = self._build(plan)
        if self._thread is None:
            return self._begin(plan, step)
        return ThreadStep(self._thread.submit(lambda: self._begin(plan, step).results()))

    def _build(self, plan: StepPlan) -> StepInputs | DecodeInputs | None:
        if not plan.scheduled:
            self._inputs.forget()
            return None
        count = len(plan.scheduled)
        if (
            self._graphs is not None
            and plan.num_tokens == count
            and (size := self._graphs.size_for(count)) is not None
            and all(item.samples for item in plan.scheduled)
        ):
            return self._inputs.build_decodes(plan, size)
        return self._inputs.build(plan)

    @torch.inference_mode()
    def _begin(self, plan: StepPlan, step: StepInputs | DecodeInputs | None) -> LaunchedStep:
        self._mover.start(plan)
        if step is None:
            self._mover.finish(plan)
            return LaunchedStep(plan, None)
        edits = self._start_edits(step)
        self._mover.finish(plan)
        if isinstance(step, DecodeInputs):
            return LaunchedStep(plan, step, self._replay(step, edits))
        return self._compute(plan, step, edits)

    def _replay(self, step: DecodeInputs, edits: PendingEdits | None) -> Sampling:
        assert self._graphs is not None, "decode inputs are made for graphs"
        sampling, logits = self._graphs.run(step)
        return sampling if step.is_plain else self._sample(step, logits, edits)

    def _compute(
        self, plan: StepPlan, step: StepInputs, edits: PendingEdits | None
    ) -> LaunchedStep:
        if step.unknown is not None:
            known = self._sampled[step.unknown.sources]
            step.tensors.token_ids.index_copy_(0, step.unknown.rows, known)
        hidden = None if self._recorded is None else self._recorded.hidden(step.tensors)
        if hidden is None:
            hidden = self._decoder.hidden(step.tensors, self._kv_cache)
        sampling = None
        if step.sampled:
            logits = self._decoder.logits(hidden[: len(step.sampled)])
            sampling = self._sample(step, logits, edits)
        prompt_logprobs: dict[int, tuple[TokenLogprob, ...]] = {}
        if step.asks is not None and step.asks.prompt is not None:
            rows = hidden[len(step.sampled) :]
            prompt_logprobs = self._prompt_logprobs(plan, step.asks.prompt, rows)
        return LaunchedStep(plan, step, sampling, prompt_logprobs, self._check)

    @property
    def device(self) -> torch.device:
        """Where the model is computed."""
        return self._kv_cache.device

    def prefill_speed(self) -> float:
        """Measure how many tokens of a prompt are computed per second; before the first step."""
        return prefill_speed(self._decoder, self._kv_cache, self._block_size, self._max_num_tokens)

    def measure(self) -> RunnerSpeeds:
        """Measure what preemption costs by either means; before the first step only."""
        return RunnerSpeeds(
            prefill_tokens_per_s=self.prefill_speed(),
            swap_bytes_per_s=self._mover.bytes_per_s(),
            block_bytes=self._kv_cache[0].numel() * self._kv_cache.element_size(),
        )

    def _start_edits(self, step: StepSamples) -> PendingEdits | None:
        editing: list[tuple[int, Sequence]] = []
        if step.asks is not None:
            self._editor.expect(step.asks.prefilling)
            editing = step.asks.editing
        if not editing and not step.too_early:
            return None
        return self._editor.start(editing, step.too_early)

    def _sample(self, step: StepSamples, logits: Tensor, pending: PendingEdits | None) -> Sampling:
        edits = None if pending is None else pending.finish()
        sampling = self._sampler.start(logits, step.sampling, edits)
        self._sampled[: sampling.tokens.numel()] = sampling.tokens
        return sampling

    def _prompt_logprobs(
        self, plan: StepPlan, prompt: PromptRows, hidden: Tensor
    ) -> dict[int, tuple[TokenLogprob, ...]]:
        """Report prompt positions, by index into the plan; the head runs for a few at once."""
        reports: list[TokenLogprob] = []
        for first in range(0, len(prompt.rows), ROWS_AT_ONCE):
            part = slice(first, first + ROWS_AT_ONCE)
            logits = self._decoder.logits(hidden[part])[:, : self.vocab_size].float()
            rows = torch.arange(len(logits), device=logits.device)
            tokens = torch.from_numpy(prompt.next_tokens[part]).to(logits.device)
            reports += token_logprobs(logits, rows, tokens, prompt.counts[part])
        places = iter(reports)
        found = {index: tuple(islice(places, size)) for index, size in prompt.owners}
        if broken := [
            plan.scheduled[index].sequence.request_id
            for index, each in found.items()
            if any(math.isnan(report.logprob) for report in each)
        ]:
            raise NonFiniteLogitsError(tuple(broken))
        return found


def load_runner(
    config: EngineConfig,
    load: WeightLoader = load_weights,
    on_rank_lost: Callable[[], None] | None = None,
) -> DecoderRunner:
    """Load `config.model` and size its KV cache; raise `ModelError` for what cannot be served.

    `load` fills the weights: by default from the folder's files. `on_rank_lost` is called on a
    thread when another rank of a divided model is gone; steps raise `RankLost` from then on.
    """
    folder = find_model_folder(config.model, config.revision)
    model = read_model_config(folder)
    max_model_len = served_length(model, config.max_model_len)
    device = _device(config.device)
    check_quantization(config.quantization, device)
    dtype = served_dtype(config.dtype, model, device)
    stored = isinstance(model, ModelConfig) and model.quantization is not None
    config = settle_kv_cache_dtype(
        config, dtype, device, is_quantized=stored or config.quantization is not None
    )
    if config.tensor_parallel_size == 1:
        decoder = load_model(
            folder,
            model,
            config,
            max_model_len=max_model_len,
            dtype=dtype,
            device=device,
            load=load,
        )
        return _sized_runner(config, decoder, model, folder)
    divided = load_divided(
        folder,
        model,
        config,
        max_model_len=max_model_len,
        dtype=dtype,
        device=device,
        load=load,
        on_rank_lost=on_rank_lost,
    )
    try:
        return _sized_runner(config, divided, divided.share, folder)
    except BaseException:
        divided.stop("the KV cache could not be made")
        raise


def _sized_runner(
    config: EngineConfig, decoder: CausalModel, layers: ModelShape, folder: Path
) -> DecoderRunner:
    """Return a runner with as many blocks as memory holds; `layers` are those of this process."""
    device, max_model_len = decoder.device, decoder.max_positions
    shape = KVCacheShape.of(layers, config.block_size, getattr(torch, config.kv_cache_dtype))
    budget, free = _budget(config, decoder, shape, max_model_len)
    num_blocks = pool_size(config, shape, max_model_len, budget, free)
    num_swap_blocks = swap_pool_size(config, shape, device)
    for sentence in ineffective_options(config, device, num_swap_blocks):
        _log.warning(sentence)
    kv_cache = shape.allocate(num_blocks, device)
    swap_space = shape.allocate_on_host(num_swap_blocks, device)
    divided = decoder if isinstance(decoder, ParallelDecoder) else None
    if divided is not None:
        divided.allocate(num_blocks, num_swap_blocks)
    ranks = config.tensor_parallel_size
    _log.info(StartTable(decoder, folder, ranks, shape, num_blocks, num_swap_blocks))
    vocab_size = decoder.config.vocab_size
    return DecoderRunner(
        decoder,
        kv_cache,
        swap_space,
        config,
        folder=folder,
        max_model_len=max_model_len,
        vocab_size=min(vocab_size, tokenizer_vocab_size(folder) or vocab_size),
        launches_ahead=_launches_ahead(config, device),
        graphs=CudaGraphs(device) if uses_graphs(config, decoder) else None,
        mover=None if divided is None else divided.mover(kv_cache, swap_space),
        check=None if divided is None else divided.check,
    )


def _budget(
    config: EngineConfig, decoder: CausalModel, shape: KVCacheShape, max_model_len: int
) -> tuple[int, int]:
    """Return the bytes for the KV cache, and those that are free, of the rank that has least."""
    device = decoder.device
    if device.type == "cpu":
        free = free_memory(device) // config.tensor_parallel_size
        return cpu_budget(config, shape, max_model_len), free
    if not isinstance(decoder, ParallelDecoder):
        return cuda_budget(config, decoder, shape), free_memory(device)
    budget, others = decoder.measured(lambda: cuda_budget(config, decoder, shape))
    budgets, free_bytes = zip((budget, free_memory(device)), *others, strict=True)
    return min(budgets), min(free_bytes)


def _launches_ahead(config: EngineConfig, device: torch.device) -> bool:
    if config.async_scheduling is not None:
        return config.async_scheduling
    return device.type == "cuda"


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ModelError(f"{name} was asked for, but torch finds no CUDA device", field="device")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ModelError(
            f"{name} was asked for, but there are {torch.cuda.device_count()}", field="device"
        )
    if device.index is not None:
        torch.cuda.set_device(device)  # kernels and graphs go to the current device
    return device
