"""Offline generation: a model in this process, no queue."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex, Unpack, cast

from tqdm.auto import tqdm

from inferq.protocol.errors import InvalidRequestError, MissingExtraError
from inferq.protocol.messages import (
    ChatMessage,
    FinishReason,
    Prompt,
    TextPrompt,
    TokenPrompt,
    check_cache_salt,
)
from inferq.protocol.output_log import JobLog, OutputLog
from inferq.protocol.param_checks import check_integer
from inferq.protocol.params import SamplingParams
from inferq.protocol.prompt_inputs import (
    ChatInput,
    ChatOptions,
    chat_prompt,
    check_list,
    token_prompt,
)
from inferq.worker.engine.config import EngineConfig
from inferq.worker.engine.requests.request import prepare_request
from inferq.worker.engine.requests.sequence import EngineRequest
from inferq.worker.engine.stats import EngineStats
from inferq.worker.engine.text.tokenizer import Tokenizer
from inferq.worker.jobs.generation import Generation, num_streams
from inferq.worker.jobs.outputs import (
    CompletionOutput,
    RequestOutput,
    describe_logprobs,
    describe_prompt_logprobs,
)
from inferq.worker.model.loading.hub import find_model_folder
from inferq.worker.model.loading.model_store import resolve_model
from inferq.worker.model.running.host_threads import share_cores
from inferq.worker.pipe.engine_output import EngineOutput

#: One prompt as `LLM.generate` takes it.
PromptInput = str | Sequence[int] | Mapping[str, Any]
#: One conversation as `LLM.chat` takes it.
Conversation = Sequence[ChatInput]


@dataclass(frozen=True, slots=True)
class _Input:
    """One prompt as it was given; `text` is None where it was given otherwise."""

    prompt: Prompt
    text: str | None = None
    cache_salt: str = ""
    adapter: str = ""


@dataclass(slots=True)
class _Request:
    """One prompt under way."""

    output: RequestOutput
    generation: Generation
    params: SamplingParams


class LLM:
    """A model loaded for offline generation.

    `options` are the fields of `EngineConfig`: `dtype`, `max_model_len`, `block_size`,
    `kv_cache_memory`, `gpu_memory_utilization`, `seed` and so on; an unknown one is an error.

    >>> llm = LLM("path/to/model")
    >>> outputs = llm.generate("Once upon a time", SamplingParams(max_tokens=32))
    >>> outputs[0].outputs[0].text

    Raises `ModelError` for a model that cannot be served, `InvalidRequestError` for an option out
    of range. Calls from several threads run one after the other.
    """

    def __init__(self, model: str, **options: Any) -> None:
        known = {f.name for f in dataclasses.fields(EngineConfig)}
        for name in options:
            if name not in known:
                raise InvalidRequestError(
                    f"is not an option of LLM; there are {', '.join(sorted(known))}", field=name
                )
        if not isinstance(model, str) or not model:
            raise InvalidRequestError(f"must be a folder or a hub id, not {model!r}", field="model")
        share_cores()
        try:
            from inferq.worker.factory import load_engine  # imports torch
        except ModuleNotFoundError as error:
            raise MissingExtraError("worker", error.name or "torch") from None
        config = EngineConfig(model=model, **options)
        folder = find_model_folder(resolve_model(model), config.revision)
        config = dataclasses.replace(config, model=str(folder), revision=None)
        self._engine = load_engine(config)
        self._tokenizer = Tokenizer.load(folder, config.generation_config)
        self._seed = config.seed
        self._adapters = tuple(config.lora_adapters or ())
        self._ids = itertools.count()
        self._lock = threading.Lock()

    def stats(self) -> EngineStats:
        """Return what the engine and its KV pool are doing, in numbers."""
        return self._engine.stats()

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer."""
        return self._tokenizer

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        adapter: str | Sequence[str | None] | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt; return the outputs in the order of the prompts.

        A prompt is a string, a list of token ids, `{"prompt": …}` or `{"prompt_token_ids": …}`,
        the maps with a `cache_salt` too: prompts with different ones share no cached blocks. An
        empty string is the model's begin-of-text token. `sampling_params` is one for all or one
        each, `priority` one each, lower is more urgent. `adapter` is the name of one of
        `lora_adapters` for all, or one each, None for the model itself. Raises
        `InvalidRequestError` before anything is computed if any of them cannot be served.
        """
        inputs = [self._parse_prompt(prompt) for prompt in _as_list(prompts)]
        inputs = self._with_adapters(inputs, adapter)
        return self._run(inputs, sampling_params, priority, use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        adapter: str | Sequence[str | None] | None = None,
        **options: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """Answer each conversation (a list of `{"role": …, "content": …}`), as `generate` does.

        `options` (`ChatOptions`: tools, names for the template, how the prompt ends) are for all.
        """
        check_list("messages", messages)
        one = bool(messages) and isinstance(messages[0], (Mapping, ChatMessage))
        conversations: Any = [messages] if one else messages
        inputs = [_Input(chat_prompt(conversation, **options)) for conversation in conversations]
        inputs = self._with_adapters(inputs, adapter)
        return self._run(inputs, sampling_params, None, use_tqdm=use_tqdm)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; return whether that was all that the KV pool held."""
        with self._lock:
            return self._engine.reset_prefix_cache()

    def _run(
        self,
        inputs: Sequence[_Input],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priorities: Sequence[int] | None,
        *,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        params = _params_for(inputs, sampling_params)
        ranks = _priorities_for(inputs, priorities)
        with self._lock:
            rows = zip(inputs, params, ranks, strict=True)
            requests = [self._prepare(*row) for row in rows]
            running: dict[str, _Request] = {}
            try:
                for request, engine_request in requests:
                    self._engine.add_request(engine_request)
                    running[engine_request.request_id] = request
                self._step_until_done(running, use_tqdm=use_tqdm)
            finally:
                for request_id in running:
                    self._engine.abort(request_id)
        return [request.output for request, _ in requests]

    def _prepare(
        self, given: _Input, params: SamplingParams, priority: int
    ) -> tuple[_Request, EngineRequest]:
        number = next(self._ids)
        if params.seed is None:
            # The request's number on top of the engine's seed: equal prompts still differ.
            params = dataclasses.replace(params, seed=self._seed + number)
        prepared = prepare_request(
            given.prompt,
            params,
            self._tokenizer,
            max_model_len=self._engine.max_model_len,
            vocab_size=self._engine.vocab_size,
        )
        request_id = str(number)
        request = _Request(
            output=RequestOutput(
                request_id=request_id,
                prompt=given.text,
                prompt_token_ids=list(prepared.prompt_token_ids),
            ),
            generation=Generation(
                self._tokenizer, prepared.params, JobLog(num_streams(prepared.params))
            ),
            params=prepared.params,
        )
        return request, EngineRequest(
            request_id=request_id,
            prompt_token_ids=prepared.prompt_token_ids,
            params=prepared.params,
            priority=priority,
            arrival=time.monotonic(),
            cache_salt=given.cache_salt,
            adapter=given.adapter,
        )

    def _step_until_done(self, running: dict[str, _Request], *, use_tqdm: bool) -> None:
        generated = 0
        started_at = time.monotonic()
        with tqdm(total=len(running), desc="prompts", disable=not use_tqdm) as progress:
            while running:
                for step in self._engine.step():
                    output = EngineOutput.of_step(step)
                    request = running.get(output.request_id)
                    if request is None:
                        continue
                    generated += len(output.token_ids)
                    if self._receive(request, output):
                        del running[output.request_id]
                        rate = generated / (time.monotonic() - started_at)
                        progress.set_postfix_str(f"{rate:.1f} tokens/s", refresh=False)
                        progress.update()

    def _receive(self, request: _Request, output: EngineOutput) -> bool:
        """Take new tokens of one of a request's outputs; return whether the request has ended."""
        generation = request.generation
        if output.index == 0:
            request.output.num_cached_tokens = output.num_cached_tokens
        if output.error is not None:
            request.output.error = output.error
            generation.end_early(FinishReason.ERROR)
            self._finish(request, generation.log)
            return True
        must_tell = generation.receive(output)
        if generation.is_finished:
            if not output.request_finished:
                self._engine.abort(output.request_id)
            self._finish(request, generation.result())
            return True
        if must_tell:
            self._engine.abort(output.request_id, output.index)
        return False

    def _finish(self, request: _Request, log: JobLog) -> None:
        request.output.outputs = [
            self._describe(index, output, request.params)
            for index, output in enumerate(log.outputs)
        ]
        if log.prompt_logprobs is not None:
            request.output.prompt_logprobs = describe_prompt_logprobs(
                self._tokenizer, request.output.prompt_token_ids, log.prompt_logprobs
            )
        request.output.finished = True

    def _describe(self, index: int, output: OutputLog, params: SamplingParams) -> CompletionOutput:
        logprobs = [entry for entry in output.logprobs if entry is not None]
        return CompletionOutput(
            index=index,
            text=output.text,
            token_ids=output.token_ids,
            cumulative_logprob=output.cumulative_logprob,
            logprobs=None
            if params.logprobs is None
            else describe_logprobs(self._tokenizer, output.token_ids, logprobs),
            finish_reason=(output.finish_reason or FinishReason.ERROR).value,
            stop_reason=output.stop_reason,
        )

    def _with_adapters(
        self, inputs: Sequence[_Input], adapters: str | Sequence[str | None] | None
    ) -> list[_Input]:
        if adapters is None or isinstance(adapters, str):
            adapters = [adapters] * len(inputs)
        check_list("adapter", adapters)
        if len(adapters) != len(inputs):
            raise InvalidRequestError(
                f"{len(adapters)} given for {len(inputs)} prompts", field="adapter"
            )
        for name in adapters:
            if name is not None and name not in self._adapters:
                raise InvalidRequestError(
                    f"{name!r} is not loaded; {', '.join(self._adapters) or 'no adapter'} is",
                    field="adapter",
                )
        pairs = zip(inputs, adapters, strict=True)
        return [dataclasses.replace(given, adapter=name or "") for given, name in pairs]

    def _parse_prompt(self, prompt: PromptInput) -> _Input:
        if isinstance(prompt, Mapping):
            return self._parse_map(dict(prompt))
        if isinstance(prompt, (list, tuple)):
            return _Input(token_prompt(prompt))
        return self._parse_text(prompt)

    def _parse_map(self, prompt: dict[str, Any]) -> _Input:
        salt = prompt.pop("cache_salt", None)
        check_cache_salt(salt)
        match prompt:
            case {"prompt": text, **rest} if not rest:
                parsed = self._parse_text(text)
            case {"prompt_token_ids": token_ids, **rest} if not rest:
                check_list("prompt_token_ids", token_ids)
                parsed = _Input(token_prompt(token_ids))
            case _:
                raise InvalidRequestError(
                    "a prompt given as a map has the key prompt or prompt_token_ids, and perhaps "
                    f"cache_salt, not {', '.join(map(str, prompt)) or 'none of them'}",
                    field="prompt",
                )
        return dataclasses.replace(parsed, cache_salt=salt or "")

    def _parse_text(self, text: Any) -> _Input:
        if not isinstance(text, str):
            raise InvalidRequestError(
                f"must be text, token ids or a map, not {type(text).__name__}", field="prompt"
            )
        if text == "":
            return _Input(TokenPrompt(tuple(self._tokenizer.encode(""))), text="")
        return _Input(TextPrompt(text), text=text)


def _as_list(prompts: PromptInput | Sequence[PromptInput]) -> Sequence[PromptInput]:
    match prompts:
        case str() | bytes() | Mapping():
            return [cast("PromptInput", prompts)]
        case [first, *_] if isinstance(first, SupportsIndex):  # one prompt of token ids
            return [cast("PromptInput", prompts)]
        case _:
            check_list("prompts", prompts)
            return cast("Sequence[PromptInput]", prompts)


def _params_for(
    prompts: Sequence[_Input], params: SamplingParams | Sequence[SamplingParams] | None
) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * len(prompts)
    check_list("sampling_params", params)
    for each in params:
        if not isinstance(each, SamplingParams):
            raise InvalidRequestError(
                f"must be SamplingParams, not {type(each).__name__}", field="sampling_params"
            )
    if len(params) != len(prompts):
        raise InvalidRequestError(
            f"{len(params)} given for {len(prompts)} prompts", field="sampling_params"
        )
    return params


def _priorities_for(inputs: Sequence[_Input], priorities: Sequence[int] | None) -> Sequence[int]:
    if priorities is None:
        return [0] * len(inputs)
    check_list("priority", priorities)
    if len(priorities) != len(inputs):
        raise InvalidRequestError(
            f"{len(priorities)} given for {len(inputs)} prompts", field="priority"
        )
    for priority in priorities:
        check_integer("priority", priority, -(2**31), 2**31 - 1)
    return priorities
