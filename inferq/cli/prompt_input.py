"""The prompt as the command line gives it: an argument, or standard input."""

from __future__ import annotations

import argparse
import sys

from inferq.producer import PromptInput
from inferq.protocol.errors import InvalidRequestError
from inferq.protocol.messages import MAX_PROMPT_BYTES, ChatMessage


def read_prompt(arguments: argparse.Namespace) -> PromptInput:
    """Return the prompt in the form asked for: text, token ids, or a chat of one or two turns."""
    text = _read_standard_input() if arguments.prompt == "-" else arguments.prompt
    if arguments.token_ids:
        if arguments.system is not None:
            raise InvalidRequestError("goes not together with token ids", field="system")
        return _token_ids(text)
    if arguments.system is not None:
        return [ChatMessage("system", arguments.system), ChatMessage("user", text)]
    if arguments.chat:
        return [ChatMessage("user", text)]
    return str(text)


def _read_standard_input() -> str:
    data = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 2)
    if len(data) > MAX_PROMPT_BYTES + 1:
        raise InvalidRequestError(
            f"standard input holds more than {MAX_PROMPT_BYTES} bytes",
            field="prompt",
            limit=MAX_PROMPT_BYTES,
        )
    try:
        return data.decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"standard input is not UTF-8 (byte {error.start})", field="prompt"
        ) from None


def _token_ids(text: str) -> list[int]:
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise InvalidRequestError(
            "must be whole numbers with commas or spaces between", field="prompt_token_ids"
        ) from None
