"""One line of a batch to a checked request, or why it is none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from inferq.producer.batches.line_reader import MAX_LINE_BYTES, InputLine
from inferq.producer.batches.outcomes import Answered, Outcome, Unanswered
from inferq.producer.batches.records import ENDPOINTS, Terms
from inferq.producer.gateway.errors import BadRequest, HttpError, to_http_error
from inferq.producer.gateway.requests.chat import ask_chat
from inferq.producer.gateway.requests.completion import ask_completion
from inferq.producer.gateway.requests.delivery import requested_lane
from inferq.producer.gateway.requests.parsing import parse_object, validate
from inferq.producer.gateway.requests.schemas import ChatBody, CompletionBody, GenerationBody
from inferq.producer.gateway.requests.submission import Asked
from inferq.protocol.errors import InvalidRequestError

#: Longest `custom_id`, in bytes.
MAX_CUSTOM_ID_BYTES: Final = 512

_FIELDS: Final = ("custom_id", "method", "url", "body")
_CHAT: Final = ENDPOINTS[0]


class LineRefused(Exception):
    """A line that asks for nothing that can be done; `outcome` is what it ends in."""

    def __init__(self, custom_id: str | None, outcome: Outcome) -> None:
        super().__init__(custom_id)
        self.custom_id = custom_id
        self.outcome = outcome


@dataclass(frozen=True, slots=True)
class Envelope:
    """What a line says around its body."""

    custom_id: str
    url: str
    body: dict[str, Any]

    @property
    def model(self) -> str | None:
        """The model that the body names, if it is a text."""
        model = self.body.get("model")
        return model if isinstance(model, str) else None


@dataclass(frozen=True, slots=True)
class LineRequest:
    """A line that can be submitted."""

    custom_id: str
    asked: Asked


def read_envelope(line: InputLine) -> Envelope:
    """Read a line up to its body; raise `LineRefused`."""
    if line.data is None:
        raise _refused(
            None, "line_too_long", f"Line {line.number} is longer than {MAX_LINE_BYTES} bytes."
        )
    try:
        value = parse_object(line.data)
    except BadRequest as error:
        message = error.message.replace("The body", f"Line {line.number}", 1)
        raise _refused(None, "invalid_json_line", message) from None
    custom_id = _custom_id(value, line.number)
    unknown = sorted(set(value) - set(_FIELDS))
    if unknown:
        raise _refused(custom_id, "unknown_parameter", f"Unknown parameter: {unknown[0][:80]!r}.")
    if value.get("method") != "POST":
        raise _refused(custom_id, "invalid_method", "method must be POST.")
    url, body = value.get("url"), value.get("body")
    if url not in ENDPOINTS:
        raise _refused(custom_id, "invalid_url", f"url must be one of {', '.join(ENDPOINTS)}.")
    if not isinstance(body, dict):
        raise _refused(custom_id, "invalid_body", "body must be an object.")
    return Envelope(custom_id, url, body)


class LineChecks:
    """Checks lines by what is fixed for all of a batch.

    `repeated` are numbers of lines whose `custom_id` an earlier one has.
    """

    def __init__(
        self, *, endpoint: str, model: str | None, terms: Terms, repeated: frozenset[int]
    ) -> None:
        self._endpoint = endpoint
        self._model = model
        self._terms = terms
        self._repeated = repeated

    def read(self, line: InputLine) -> LineRequest:
        """Return what a line asks for; raise `LineRefused`."""
        envelope = read_envelope(line)
        if line.number in self._repeated:
            raise _refused(
                envelope.custom_id, "duplicate_custom_id", "An earlier line has this custom_id."
            )
        if envelope.url != self._endpoint:
            raise _refused(
                envelope.custom_id, "mismatched_url", f"The batch's endpoint is {self._endpoint}."
            )
        try:
            return LineRequest(envelope.custom_id, self._ask(envelope))
        except (HttpError, InvalidRequestError) as error:
            answer = Answered.refused(to_http_error(error))
            raise LineRefused(envelope.custom_id, answer) from None

    def _ask(self, envelope: Envelope) -> Asked:
        given = self._with_model(envelope)
        if self._endpoint == _CHAT:
            chat = validate(given, ChatBody)
            asked = ask_chat(chat, self._check(chat), self._terms)
        else:
            completion = validate(given, CompletionBody)
            asked = ask_completion(completion, self._check(completion), self._terms)
        asked.token_bound(max_outputs=self._terms.max_outputs, max_model_len=0)
        return asked

    def _check(self, body: GenerationBody) -> str:
        """Return the body's model, if it asks for nothing that a batch cannot do."""
        if body.stream:
            raise InvalidRequestError("is not supported in a batch", field="stream")
        if body.cancel_on_disconnect:
            raise InvalidRequestError("goes not with a batch", field="cancel_on_disconnect")
        lane = requested_lane(body)
        if lane not in (None, self._terms.lane):
            field = "service_tier" if body.priority is None else "priority"
            raise InvalidRequestError(
                f"asks for the {lane} lane, and a batch goes by {self._terms.lane}", field=field
            )
        if body.model is None or body.model != self._model:
            raise BadRequest(
                f"The batch's model is {self._model!r}; a batch has one model.",
                param="model",
                code="mismatched_model",
            )
        return body.model

    def _with_model(self, envelope: Envelope) -> dict[str, Any]:
        body = envelope.body
        if body.get("model") is None:
            if self._terms.default_model is None:
                raise BadRequest(
                    "Missing required parameter: 'model'",
                    param="model",
                    code="missing_required_parameter",
                )
            body = {**body, "model": self._terms.default_model}
        return body


def _custom_id(value: Mapping[str, Any], number: int) -> str:
    given = value.get("custom_id")
    if given is None or given == "":
        raise _refused(None, "missing_custom_id", f"Line {number} has no custom_id.")
    if not isinstance(given, str):
        raise _refused(None, "invalid_custom_id", f"custom_id of line {number} must be a string.")
    if len(given.encode()) > MAX_CUSTOM_ID_BYTES:
        raise _refused(
            given[:MAX_CUSTOM_ID_BYTES],
            "invalid_custom_id",
            f"custom_id of line {number} is longer than {MAX_CUSTOM_ID_BYTES} bytes.",
        )
    return given


def _refused(custom_id: str | None, code: str, message: str) -> LineRefused:
    return LineRefused(custom_id, Unanswered(code, message))
