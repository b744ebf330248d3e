"""What the bodies of requests may hold: OpenAI's fields, and those that vLLM's users send besides.

Types only: ranges are checked by `SamplingParams` and the protocol's messages, which name the field
and the limit. A field that is known but not supported is refused by name, unless it is null; a
field that nobody knows is refused too.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Annotated, Any, Final, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    WithJsonSchema,
)

from inferq.protocol.errors import InvalidRequestError

#: Why a known field is refused, where there is more to say than that it is not supported.
_REASONS: Final = MappingProxyType(
    {
        "suffix": "is not supported: the models here only go on where the prompt ends",
        "modalities": "is not supported: text only",
        "audio": "is not supported: text only",
        "functions": "is not supported; use tools and tool_choice",
        "function_call": "is not supported; use tools and tool_choice",
        "reasoning_effort": "is not supported; see chat_template_kwargs",
        "chat_template": "is not supported: the model's own template is used",
    }
)


def _refuse(value: object, info: ValidationInfo) -> None:
    if value is not None:
        raise ValueError(_REASONS.get(info.field_name or "", "is not supported"))


#: The type of a field that is known and not supported: it may be null.
Refused = Annotated[None, BeforeValidator(_refuse)]


def _check_not_stored(value: object) -> object:
    if value is True:
        raise ValueError("nothing is stored beyond the retention time; leave it out")
    return value


#: A JSON schema for fields whose values are checked by hand, since there are many or large ones.
_PROMPT_SCHEMA: Final[dict[str, Any]] = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        {"type": "array", "items": {"type": "integer"}, "minItems": 1},
        {
            "type": "array",
            "items": {"type": "array", "items": {"type": "integer"}, "minItems": 1},
            "minItems": 1,
        },
    ],
    "description": "Text, token ids, or a list of either.",
}
_MESSAGES_SCHEMA: Final[dict[str, Any]] = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
            "content": {
                "anyOf": [
                    {"type": "string"},
                    {"type": "null"},
                    {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "required": ["type", "text"],
                            "properties": {
                                "type": {"const": "text"},
                                "text": {"type": "string"},
                            },
                        },
                    },
                ]
            },
            "name": {"type": "string"},
            "tool_calls": {"type": "array", "items": {"type": "object"}},
            "tool_call_id": {"type": "string"},
            "reasoning_content": {"type": "string"},
        },
    },
}


class Body(BaseModel):
    """A request's body: every field is known, and of the right type."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


class StreamOptions(Body):
    """What a stream tells besides its tokens."""

    include_usage: bool = Field(default=False, description="A last chunk with the usage.")
    continuous_usage_stats: bool = Field(
        default=False, description="The usage so far in every chunk."
    )
    include_obfuscation: Literal[False] | None = Field(
        default=None, description="Only false: chunks are not padded."
    )


class WebhookBody(Body):
    """Whom to tell of a job's end."""

    url: str
    events: list[str] | None = Field(
        None, description="job.completed, job.failed, job.cancelled, job.expired; null: all."
    )


class GenerationBody(Body):
    """What completions and chat have in common."""

    model: str | None = Field(None, description="One of /v1/models.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    def streamed(self) -> StreamOptions:
        """Return what a stream tells; raise `InvalidRequestError` for options without one."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("goes with stream only", field="stream_options")
        return self.stream_options or StreamOptions()

    n: int | None = Field(None, description="Choices for each prompt.")
    seed: int | None = None
    stop: str | list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = Field(None, description="Biases by token id.")
    response_format: dict[str, Any] | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    use_beam_search: bool | None = Field(None, description="With n (or best_of) beams.")
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    return_token_ids: bool | None = None

    structured_outputs: dict[str, Any] | None = Field(
        None, description="Exactly one of json, json_object, regex, choice and grammar."
    )
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = Field(None, description="In Lark's syntax.")

    cache_salt: str | None = None
    priority: int | None = Field(None, description="Below 0: lane high; above 0: lane low.")
    service_tier: Literal["auto", "default", "priority", "flex"] | None = None
    cancel_on_disconnect: bool | None = None
    metadata: dict[str, str] | None = Field(None, description="Travels with the job.")
    webhook: WebhookBody | None = Field(
        None, description="A signed POST when a job has ended, where the gateway takes them."
    )

    user: str | None = Field(None, description="Taken, and not used.")
    safety_identifier: str | None = Field(None, description="Taken, and not used.")
    prompt_cache_key: str | None = Field(None, description="Taken, and not used.")
    prompt_cache_retention: str | None = Field(None, description="Taken, and not used.")
    store: Annotated[bool | None, BeforeValidator(_check_not_stored)] = Field(
        None, description="Only false."
    )


class CompletionBody(GenerationBody):
    """The body of `POST /v1/completions`."""

    prompt: Annotated[Any, WithJsonSchema(_PROMPT_SCHEMA)]
    max_tokens: int | None = Field(16, description="0 goes with echo only.")
    logprobs: int | None = None
    echo: bool | None = Field(None, description="Begin each choice with its prompt.")
    add_special_tokens: bool | None = None
    best_of: int | None = None

    suffix: Refused = None
    prompt_embeds: Refused = None


class ChatBody(GenerationBody):
    """The body of `POST /v1/chat/completions`."""

    messages: Annotated[Any, WithJsonSchema(_MESSAGES_SCHEMA)]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    best_of: Refused = None
    modalities: Refused = None
    audio: Refused = None
    prediction: Refused = None
    web_search_options: Refused = None
    reasoning_effort: Refused = None
    verbosity: Refused = None
    functions: Refused = None
    function_call: Refused = None
    chat_template: Refused = None
    documents: Refused = None


class TokenizeBody(Body):
    """The body of `POST /tokenize`: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[Any, WithJsonSchema(_MESSAGES_SCHEMA)] = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class DetokenizeBody(Body):
    """The body of `POST /detokenize`."""

    model: str | None = None
    tokens: list[int]
