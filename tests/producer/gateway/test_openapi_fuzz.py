"""Whatever fits the OpenAPI schema, or nearly, gets an answer in the schema's shape: never a 500.

INFERQ_FUZZ_EXAMPLES sets how many requests each operation gets, INFERQ_FUZZ_SEED which.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import requests
import schemathesis
from hypothesis import strategies as st
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from inferq.producer.gateway.answers.answer_shapes import ANSWERS
from inferq.producer.gateway.app import create_app
from inferq.producer.gateway.routes.openapi import schema_of
from inferq.producer.gateway.settings import GatewaySettings

pytestmark = [
    pytest.mark.model,
    pytest.mark.timeout(600),
    # The gateway's threads draw random numbers meanwhile, for their retries.
    pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies"),
]

EXAMPLES = int(os.environ.get("INFERQ_FUZZ_EXAMPLES", "15"))
SEED = int(os.environ.get("INFERQ_FUZZ_SEED", "7"))
CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]
#: 503 is none of them: on a very busy machine even the queue's server may be late.
FORBIDDEN = {422, 500, 501, 502}
MODEL = "stand-in"
#: What a request needs, as it would be sent.
REQUIRED = {
    "prompt": "Hello",
    "messages": [{"role": "user", "content": "Hello"}],
    "tokens": [19556],
}


class Fuzzer:
    """Sends requests that hypothesis draws from an operation's schema, and checks the answers."""

    def __init__(self, **known: str) -> None:
        self.answers: Counter[tuple[str, int]] = Counter()
        self._known = known
        self._session = requests.Session()

    def close(self) -> None:
        self._session.close()

    def run(self, operation: Any, mode: schemathesis.GenerationMode) -> None:
        if mode is schemathesis.GenerationMode.NEGATIVE and not _takes_anything(operation):
            return
        strategy = operation.as_strategy(generation_mode=mode)

        @hypothesis.seed(SEED)
        @hypothesis.settings(
            max_examples=EXAMPLES,
            phases=[hypothesis.Phase.generate],
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(st.data())
        def send(data: st.DataObject) -> None:
            case = data.draw(strategy)
            self._steer(case, data)
            response = case.call(session=self._session, timeout=60)
            self.answers[operation.label, response.status_code] += 1
            assert response.status_code not in FORBIDDEN
            case.validate_response(response, checks=CHECKS)

        send()

    def _steer(self, case: Any, data: st.DataObject) -> None:
        """Make it likely that a request gets past the first checks."""
        body = case.body if isinstance(case.body, dict) else {}
        if REQUIRED.keys() & body.keys():
            case.body = _steered(body, data)
        elif "input_file_id" in body and data.draw(st.booleans()):
            body["input_file_id"] = self._known["file_id"]
        for name in sorted(case.path_parameters.keys() & self._known.keys()):
            is_spared = case.method == "DELETE" and name == "file_id"
            if not is_spared and data.draw(st.booleans()):
                case.path_parameters[name] = self._known[name]


def _steered(body: dict[str, Any], data: st.DataObject) -> dict[str, Any]:
    """Return a body as it is, or with few fields of those that may be left out."""
    how = data.draw(st.sampled_from(("as drawn", "few", "few, with usual", "none, with usual")))
    if how == "as drawn":
        return body
    others = [] if how.startswith("none") else sorted(set(body) - {*REQUIRED, "model"})
    kept = data.draw(st.sets(st.sampled_from(others), max_size=2)) if others else set()
    usual = REQUIRED if how.endswith("usual") else {}
    few = {
        name: usual.get(name, value) for name, value in body.items() if name in kept | {*REQUIRED}
    }
    return {**few, "model": MODEL}


@pytest.fixture
def fuzzed_gateway(
    start_stand_in: Callable[..., Any], start_gateway: Callable[..., Any], tmp_path: Path
) -> Any:
    """A gateway before a worker that answers shortly, whatever is asked."""
    start_stand_in(step_s=0.0005, max_model_len=128).say("Paris, I think.")
    return start_gateway(max_outputs=8, batch_storage=str(tmp_path / "files"))


@pytest.fixture
def fuzzer(fuzzed_gateway: Any) -> Iterator[Fuzzer]:
    body = {"model": MODEL, "prompt": "Hello", "max_tokens": 3}
    answer = requests.post(f"{fuzzed_gateway.url}/v1/completions", json=body, timeout=60)
    sent = {"data": {"purpose": "batch"}, "files": {"file": ("in.jsonl", b"{}\n")}}
    file = requests.post(f"{fuzzed_gateway.url}/v1/files", timeout=60, **sent).json()
    body = {
        "input_file_id": file["id"],
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }
    batch = requests.post(f"{fuzzed_gateway.url}/v1/batches", json=body, timeout=60).json()
    made = Fuzzer(
        stream_id=answer.headers["X-Inferq-Job-Id"], file_id=file["id"], batch_id=batch["id"]
    )
    yield made
    made.close()


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode), ids=lambda mode: mode.value)
def test_every_request_gets_an_answer_in_the_schema_s_shape(
    fuzzed_gateway: Any, fuzzer: Fuzzer, mode: schemathesis.GenerationMode
) -> None:
    schema = schemathesis.openapi.from_url(f"{fuzzed_gateway.url}/openapi.json")
    for found in schema.get_all_operations():
        fuzzer.run(found.ok(), mode)
    if mode is schemathesis.GenerationMode.POSITIVE:
        answered = {label for label, status in fuzzer.answers if status == 200}
        assert {"POST /v1/completions", "POST /v1/chat/completions"} <= answered
        assert {"GET /v1/streams/{stream_id}", "DELETE /v1/streams/{stream_id}"} <= answered
        assert {"POST /v1/files", "GET /v1/files/{file_id}/content"} <= answered
        assert {"POST /v1/batches", "POST /v1/batches/{batch_id}/cancel"} <= answered


def test_the_schema_says_the_shape_of_every_answer() -> None:
    schema = schema_of(create_app(GatewaySettings()))
    operations = {(method, path) for path, found in schema["paths"].items() for method in found}
    assert operations == set(ANSWERS)


def _takes_anything(operation: Any) -> bool:
    return bool(operation.definition.raw.keys() & {"parameters", "requestBody"})
