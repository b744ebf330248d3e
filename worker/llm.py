"""Offline generation: a model in this process, no queue."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from tqdm.auto import tqdm

from inferq.protocol.errors import InvalidRequestError, MissingExtraError
from inferq.protocol.messages import (
    ChatMessage,
    ChatPrompt,
    FinishReason,
    Prompt,
    TextPrompt,
    TokenLogprob,
    TokenPrompt,
)
from inferq.protocol.params import SamplingParams
from inferq.worker.engine.config import EngineConfig
from inferq.worker.engine.engine import TokenOutput
from inferq.worker.engine.output import OutputText
from inferq.worker.engine.request import prepare_request
from inferq.worker.engine.sequence import EngineRequest
from inferq.worker.engine.stats import EngineStats
from inferq.worker.engine.tokenizer import Tokenizer
from inferq.worker.model.host_threads import share_cores
from inferq.worker.model.hub import find_model_folder
from inferq.worker.model.model_store import resolve_model
from inferq.worker.outputs import CompletionOutput, RequestOutput, describe_logprobs

#: One prompt as `LLM.generate` takes it.
PromptInput = str | Sequence[int] | Mapping[str, Any]
#: One conversation as `LLM.chat` takes it.
Conversation = Sequence[Mapping[str, str]]


@dataclass(slots=True)
class _Request:
    """One prompt under way."""

    output: RequestOutput
    text: OutputText
    wants_logprobs: bool
    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)


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
        share_cores()
        try:
            from inferq.worker.factory import load_engine  # imports torch
        except ModuleNotFoundError as error:
            raise MissingExtraError("worker", error.name or "torch") from None
        folder = find_model_folder(resolve_model(model))
        config = EngineConfig(model=str(folder), **options)
        self._engine = load_engine(config)
        self._tokenizer = Tokenizer.load(folder)
        self._seed = config.seed
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
    ) -> list[RequestOutput]:
        """Continue each prompt; return the outputs in the order of the prompts.

        A prompt is a string, a list of token ids, `{"prompt": …}` or `{"prompt_token_ids": …}`.
        `sampling_params` is one for all or one each. Raises `InvalidRequestError` before anything
        is computed if any of them cannot be served.
        """
        parsed = [_parse_prompt(prompt) for prompt in _as_list(prompts)]
        return self._run(parsed, sampling_params, use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer each conversation (a list of `{"role": …, "content": …}`), as `generate` does."""
        one = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Any = [messages] if one else messages
        parsed = [
            ChatPrompt(tuple(_parse_message(message) for message in conversation))
            for conversation in conversations
        ]
        return self._run(parsed, sampling_params, use_tqdm=use_tqdm)

    def _run(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        params = _params_for(prompts, sampling_params)
        with self._lock:
            pairs = zip(prompts, params, strict=True)
            requests = [self._prepare(prompt, each) for prompt, each in pairs]
            for _, engine_request in requests:
                self._engine.add_request(engine_request)
            running = {request.output.request_id: request for request, _ in requests}
            try:
                self._step_until_done(running, use_tqdm=use_tqdm)
            finally:
                for request_id in running:
                    self._engine.abort(request_id)
        return [request.output for request, _ in requests]

    def _prepare(self, prompt: Prompt, params: SamplingParams) -> tuple[_Request, EngineRequest]:
        number = next(self._ids)
        if params.seed is None:
            # The request's number on top of the engine's seed: equal prompts still differ.
            params = dataclasses.replace(params, seed=self._seed + number)
        prepared = prepare_request(
            prompt,
            params,
            self._tokenizer,
            max_model_len=self._engine.max_model_len,
            vocab_size=self._engine.vocab_size,
        )
        request_id = str(number)
        request = _Request(
            output=RequestOutput(
                request_id=request_id,
                prompt=prompt.text if isinstance(prompt, TextPrompt) else None,
                prompt_token_ids=list(prepared.prompt_token_ids),
            ),
            text=OutputText(self._tokenizer, prepared.params),
            wants_logprobs=params.logprobs is not None,
        )
        return request, EngineRequest(
            request_id=request_id,
            prompt_token_ids=prepared.prompt_token_ids,
            params=prepared.params,
            arrival=time.monotonic(),
        )

    def _step_until_done(self, running: dict[str, _Request], *, use_tqdm: bool) -> None:
        generated = 0
        started_at = time.monotonic()
        with tqdm(total=len(running), desc="prompts", disable=not use_tqdm) as progress:
            while running:
                for output in self._engine.step():
                    request = running.get(output.request_id)
                    if request is None:
                        continue
                    generated += len(output.token_ids)
                    if self._receive(request, output):
                        del running[output.request_id]
                        rate = generated / (time.monotonic() - started_at)
                        progress.set_postfix_str(f"{rate:.1f} tokens/s", refresh=False)
                        progress.update()

    def _receive(self, request: _Request, output: TokenOutput) -> bool:
        """Take a request's new tokens; return whether it has ended."""
        step = request.text.append(
            output.token_ids, ends_on_token=output.finish_reason is FinishReason.STOP
        )
        accepted = len(step.text_pieces)
        request.pieces.extend(step.text_pieces)
        request.token_ids.extend(output.token_ids[:accepted])
        if output.logprobs is not None:
            request.logprobs.extend(output.logprobs[:accepted])
        request.output.num_cached_tokens = output.num_cached_tokens
        request.output.error = output.error
        if step.stop is not None:
            if output.finish_reason is None:
                self._engine.abort(output.request_id)
            self._finish(request, FinishReason.STOP, step.stop)
            return True
        if output.finish_reason is not None:
            self._finish(request, output.finish_reason, output.stop_reason)
            return True
        return False

    def _finish(
        self, request: _Request, reason: FinishReason, stop_reason: str | int | None
    ) -> None:
        text = "".join(request.pieces) + request.text.finish()
        if request.text.stop is not None:  # it may complete in the last character released
            reason, stop_reason = FinishReason.STOP, request.text.stop
        completion = CompletionOutput(
            index=0,
            text=text,
            token_ids=request.token_ids,
            finish_reason=reason.value,
            stop_reason=stop_reason,
        )
        if request.wants_logprobs:
            completion.cumulative_logprob = sum(entry.logprob for entry in request.logprobs)
            completion.logprobs = describe_logprobs(
                self._tokenizer, request.token_ids, request.logprobs
            )
        request.output.outputs = [completion]
        request.output.finished = True


def _as_list(prompts: PromptInput | Sequence[PromptInput]) -> Sequence[PromptInput]:
    match prompts:
        case str() | bytes() | Mapping() | [int(), *_]:  # the last is one prompt of token ids
            return [cast("PromptInput", prompts)]
        case _:
            return cast("Sequence[PromptInput]", prompts)


def _parse_prompt(prompt: PromptInput) -> Prompt:
    if isinstance(prompt, Mapping):
        match dict(prompt):
            case {"prompt": text}:
                return TextPrompt(text)
            case {"prompt_token_ids": token_ids}:
                return TokenPrompt(tuple(token_ids))
            case _:
                raise InvalidRequestError(
                    "a prompt given as a map has the key prompt or prompt_token_ids",
                    field="prompt",
                )
    if isinstance(prompt, (list, tuple)):
        return TokenPrompt(tuple(prompt))
    return TextPrompt(prompt)  # type: ignore[arg-type]  # refuses what is no text


def _parse_message(message: Mapping[str, str]) -> ChatMessage:
    if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
        raise InvalidRequestError("a message has the keys role and content", field="messages")
    return ChatMessage(message["role"], message["content"])


def _params_for(
    prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * len(prompts)
    if len(params) != len(prompts):
        raise InvalidRequestError(
            f"{len(params)} given for {len(prompts)} prompts", field="sampling_params"
        )
    return params
