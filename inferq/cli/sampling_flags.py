"""One flag for each sampling parameter, made from `SamplingParams` itself."""

from __future__ import annotations

import argparse
import dataclasses
from types import MappingProxyType
from typing import Any, Final

from inferq.protocol.params import SamplingParams

_HELP: Final = MappingProxyType(
    {
        "temperature": "0 always takes the most likely token; higher is more varied",
        "top_k": "keep only the K most likely tokens; 0 keeps all",
        "top_p": "keep the smallest set of tokens whose probability reaches P, in (0, 1]",
        "min_p": "drop tokens less likely than P times the most likely, in [0, 1]",
        "seed": "same seed, same tokens (default: drawn at random)",
        "max_tokens": "most tokens to generate",
        "min_tokens": "let nothing end the text before this many tokens",
        "stop": "end the text before this string; may be given several times",
        "stop_token_ids": "end the text at this token id; may be given several times",
        "include_stop_str_in_output": "keep the stop string in the text",
        "ignore_eos": "go on past the model's own end token",
        "logprobs": "return the N most likely tokens of each position (seen with --json)",
        "skip_special_tokens": "leave special tokens out of the text",
    }
)
_FLOATS: Final = frozenset({"temperature", "top_p", "min_p"})
_LISTS: Final = frozenset({"stop", "stop_token_ids"})


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for every field of `SamplingParams`; what is not given stays out of the result."""
    group = parser.add_argument_group("sampling")
    for field in dataclasses.fields(SamplingParams):
        if field.name not in _HELP:
            continue
        flag = "--" + field.name.replace("_", "-")
        text = _HELP[field.name]
        options: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS}
        if isinstance(field.default, bool):
            group.add_argument(
                flag, action=argparse.BooleanOptionalAction, help=_shown(text, field), **options
            )
        elif field.name in _LISTS:
            kind: type = int if field.name == "stop_token_ids" else str
            metavar = "ID" if kind is int else "TEXT"
            group.add_argument(
                flag, action="append", type=kind, metavar=metavar, help=text, **options
            )
        else:
            kind = float if field.name in _FLOATS else int
            metavar = "P" if field.name.endswith("_p") else "N"
            group.add_argument(
                flag, type=kind, metavar=metavar, help=_shown(text, field), **options
            )


def sampling_params(arguments: argparse.Namespace) -> SamplingParams:
    """Return the parameters given by flags; raise `InvalidRequestError` if out of range."""
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    return SamplingParams(**{k: v for k, v in vars(arguments).items() if k in names})


def _shown(text: str, field: dataclasses.Field[Any]) -> str:
    return text if field.default is None else f"{text} (default: {field.default})"
