"""JSON objects, parsed strictly and within bounds, checked by a model with OpenAI's errors."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any, Final, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError

from inferq.producer.gateway.errors import BadRequest

#: Deepest nesting of arrays and objects.
MAX_DEPTH: Final = 64
#: Most values in one body: bounds what parsing makes of its bytes.
MAX_VALUES: Final = 2**21
#: Problems named in one error.
_SHOWN_PROBLEMS: Final = 3

#: A JSON string, also one that never ends; possessive, so that no input takes more than one pass.
_STRING: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
#: The escape of half a character outside the basic plane.
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")
_BRACKET: Final = re.compile(rb"[\[\]{}]")

M = TypeVar("M", bound=BaseModel)


def parse_object(body: bytes) -> dict[str, Any]:
    """Parse a JSON object of bounded size; raise a 400 that says what is wrong with it."""
    _check_structure(body)
    try:
        value = json.loads(
            body.decode(),
            object_pairs_hook=_unique,
            parse_constant=_refuse_constant,
            parse_float=_finite,
        )
        if _SURROGATE.search(body):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise BadRequest(f"The body is not valid UTF-8 (byte {error.start}).") from None
    except UnicodeEncodeError:
        raise BadRequest("The body holds half a character (a lone surrogate).") from None
    except json.JSONDecodeError as error:
        raise BadRequest(
            f"The body is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}."
        ) from None
    except ValueError:  # a number of thousands of digits
        raise BadRequest("The body holds a number that is too long.") from None
    except RecursionError:
        raise BadRequest(f"The body is nested deeper than {MAX_DEPTH} levels.") from None
    if not isinstance(value, dict):
        raise BadRequest("The body must be a JSON object.")
    return value


def validate(value: dict[str, Any], model: type[M]) -> M:
    """Check an object against a model; raise a 400 that names the first field that is wrong."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        _refuse(error)


def _check_structure(body: bytes) -> None:
    opened = body.count(b"[") + body.count(b"{")
    if opened <= MAX_DEPTH and body.count(b",") + opened < MAX_VALUES:
        return
    bare = _STRING.sub(b"", body)
    if bare.count(b",") + bare.count(b"[") + bare.count(b"{") >= MAX_VALUES:
        raise BadRequest(f"The body holds more than {MAX_VALUES} values.")
    depth = 0
    for bracket in _BRACKET.finditer(bare):
        depth += 1 if bracket[0] in b"[{" else -1
        if depth > MAX_DEPTH:
            raise BadRequest(f"The body is nested deeper than {MAX_DEPTH} levels.")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for name, item in pairs:
        if name in value:
            raise BadRequest(f"The body names {name[:80]!r} twice in one object.")
        value[name] = item
    return value


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise BadRequest(f"The body holds {digits[:80]}, which is too large a number.")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise BadRequest(f"The body holds {name}, which is not JSON.")


def _refuse(error: ValidationError) -> NoReturn:
    problems = error.errors(include_url=False, include_input=False, include_context=False)
    first = problems[0]
    texts = [_problem(each["type"], each["loc"], each["msg"]) for each in problems]
    more = len(texts) - _SHOWN_PROBLEMS
    message = "; ".join(texts[:_SHOWN_PROBLEMS]) + (f"; and {more} more" if more > 0 else "")
    code = {"extra_forbidden": "unknown_parameter", "missing": "missing_required_parameter"}
    raise BadRequest(message, param=field_path(first["loc"]) or None, code=code.get(first["type"]))


def _problem(kind: str, loc: Sequence[int | str], message: str) -> str:
    path = field_path(loc)
    if kind == "extra_forbidden":
        return f"Unknown parameter: {path!r}"
    if kind == "missing":
        return f"Missing required parameter: {path!r}"
    text = message.removeprefix("Value error, ")
    return f"{path}: {text}" if path else text


def field_path(loc: Sequence[int | str]) -> str:
    """Return a place in a body as people write it: `messages[0].content`."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += f".{part}" if path else part[:80]
    return path
