"""One flag for each sampling parameter, made from `SamplingParams` itself."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from inferq.protocol.errors import InvalidRequestError
from inferq.protocol.params import SamplingParams
from inferq.protocol.structured import MAX_FORM_BYTES, StructuredOutputs

_HELP: Final = MappingProxyType(
    {
        "n": "outputs to print",
        "best_of": "generate N outputs and print the likeliest",
        "beam_width": "search with N beams instead of sampling",
        "length_penalty": "of beams: above 0 prefers long ones, below 0 short ones",
        "early_stopping": "of beams: stop with enough finished ones (true), when better ones are "
        "unlikely (false) or impossible (never)",
        "seed": "same seed, same tokens (default: drawn at random)",
        "allowed_token_ids": "choose from these token ids only; may be given several times",
        "structured_outputs": "the form of the output as a JSON object, as in the flags below",
        "bad_words": "never generate this text; may be given several times",
        "logit_bias": "add to the logits of token ids, such as '{\"42\": -100}'",
        "repetition_penalty": "above 1 makes tokens in prompt or output less likely",
        "presence_penalty": "subtract from the logits of tokens in the output, in [-2, 2]",
        "frequency_penalty": "subtract as often as the token is in the output, in [-2, 2]",
        "temperature": "0 always takes the most likely token; higher is more varied",
        "top_k": "keep only the K most likely tokens; 0 keeps all",
        "top_p": "keep the smallest set of tokens whose probability reaches P, in (0, 1]",
        "min_p": "drop tokens less likely than P times the most likely, in [0, 1]",
        "max_tokens": "most tokens to generate",
        "min_tokens": "let nothing end the text before this many tokens",
        "stop": "end the text before this string; may be given several times",
        "stop_token_ids": "end the text at this token id; may be given several times",
        "include_stop_str_in_output": "keep the stop string in the text",
        "ignore_eos": "go on past the model's own end token",
        "logprobs": "return the N most likely tokens of each position, -1 for all (seen with "
        "--json)",
        "prompt_logprobs": "the same for the tokens of the prompt",
        "truncate_prompt_tokens": "keep only the last N tokens of the prompt, -1 for what fits",
        "detokenize": "return text, not only token ids",
        "skip_special_tokens": "leave special tokens out of the text",
        "spaces_between_special_tokens": "keep the space that some tokenizers put between two",
    }
)
_FORM_HELP: Final = MappingProxyType(
    {
        "json_schema": "a JSON object that fits this schema (a file, or the schema itself)",
        "json_object": "any JSON object",
        "regex": "text that this regular expression matches",
        "choice": "this text; given several times, one of them",
        "grammar": "text of this grammar in Lark's syntax (a file, or the grammar itself)",
    }
)
_FLOATS: Final = frozenset(
    {
        "temperature",
        "top_p",
        "min_p",
        "length_penalty",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    }
)
_TEXT_LISTS: Final = frozenset({"stop", "bad_words"})
_ID_LISTS: Final = frozenset({"stop_token_ids", "allowed_token_ids"})
_JSON: Final = frozenset({"logit_bias", "structured_outputs"})


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for every field of `SamplingParams`; what is not given stays out of the result."""
    group = parser.add_argument_group("sampling")
    for field in dataclasses.fields(SamplingParams):
        text = _shown(_HELP[field.name], field)
        options = _options(field)
        group.add_argument(
            _flag(field.name),
            dest=field.name,
            default=argparse.SUPPRESS,
            help=text.replace("%", "%%"),
            **options,
        )
    forms = parser.add_argument_group("form of the output").add_mutually_exclusive_group()
    for name, text in _FORM_HELP.items():
        forms.add_argument(_flag(name), dest=f"form_{name}", help=text, **_form_options(name))


def sampling_params(arguments: argparse.Namespace) -> SamplingParams:
    """Return the parameters given by flags; raise `InvalidRequestError` if out of range."""
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    given = {name: value for name, value in vars(arguments).items() if name in names}
    for name in _JSON & set(given):
        given[name] = _from_json(name, given[name])
    form = _form(arguments)
    if form is not None:
        if "structured_outputs" in given:
            raise InvalidRequestError("is given twice", field="structured_outputs")
        given["structured_outputs"] = form
    return SamplingParams(**given)


def _options(field: dataclasses.Field[Any]) -> dict[str, Any]:
    name = field.name
    if name == "early_stopping":
        return {"type": _early_stopping, "metavar": "true|false|never"}
    if isinstance(field.default, bool):
        return {"action": argparse.BooleanOptionalAction}
    if name in _TEXT_LISTS:
        return {"action": "append", "metavar": "TEXT"}
    if name in _ID_LISTS:
        return {"action": "append", "type": int, "metavar": "ID"}
    if name in _JSON:
        return {"metavar": "JSON"}
    if name in _FLOATS:
        return {"type": float, "metavar": "P" if name.endswith("_p") else "X"}
    return {"type": int, "metavar": "N"}


def _form_options(name: str) -> dict[str, Any]:
    if name == "json_object":
        return {"action": "store_true"}
    if name == "choice":
        return {"action": "append", "metavar": "TEXT"}
    return {"metavar": "FILE|TEXT" if name != "regex" else "REGEX"}


def _form(arguments: argparse.Namespace) -> StructuredOutputs | None:
    if arguments.form_json_schema is not None:
        return StructuredOutputs(json=_schema(arguments.form_json_schema))
    if arguments.form_json_object:
        return StructuredOutputs(json_object=True)
    if arguments.form_regex is not None:
        return StructuredOutputs(regex=arguments.form_regex)
    if arguments.form_choice is not None:
        return StructuredOutputs(choice=arguments.form_choice)
    if arguments.form_grammar is not None:
        return StructuredOutputs(grammar=_file_or_text("grammar", arguments.form_grammar))
    return None


def _schema(value: str) -> str:
    text = _read_file("json_schema", value)
    if text is not None:
        return text
    try:
        json.loads(value)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(
            f"there is no such file, and the text is no JSON: {error}", field="json_schema"
        ) from None
    return value


def _file_or_text(name: str, value: str) -> str:
    text = _read_file(name, value)
    return value if text is None else text


def _read_file(name: str, value: str) -> str | None:
    """Return the content of the file `value`; None where there is no such file."""
    path = Path(value)
    try:
        if not path.is_file():
            return None
        size = path.stat().st_size
    except (OSError, ValueError):  # too long for a path, or with what no path may hold
        return None
    if size > MAX_FORM_BYTES:
        raise InvalidRequestError(
            f"{value} is longer than {MAX_FORM_BYTES} bytes", field=name, limit=MAX_FORM_BYTES
        )
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"cannot read {value}: {error}", field=name) from None


def _from_json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise InvalidRequestError(f"is not JSON: {error}", field=name) from None


def _early_stopping(text: str) -> bool | str:
    values: dict[str, bool | str] = {"true": True, "false": False, "never": "never"}
    if text not in values:
        raise argparse.ArgumentTypeError("must be true, false or never")
    return values[text]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _shown(text: str, field: dataclasses.Field[Any]) -> str:
    is_plain = isinstance(field.default, (int, float))
    return f"{text} (default: {field.default})" if is_plain else text
