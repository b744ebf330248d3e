"""`inferq gateway-key`: an API key for gateways, shown once, and its entry for their file."""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import secrets
from typing import Any, Final

from inferq.cli import exit_codes
from inferq.cli.flags import Commands, add_command, add_json_flag, whole_number
from inferq.protocol.errors import InvalidRequestError
from inferq.protocol.keys import Lane

#: What a key begins with, so that scanners for leaked secrets can know it.
PREFIX: Final = "sk-inferq-"
_KEY_BYTES: Final = 32
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")

_EXAMPLES: Final = """\
Examples:
  inferq gateway-key alice
  inferq gateway-key batch --lane low --requests-per-minute 60 --tokens-per-minute 100000
  inferq gateway-key alice --json | jq -r .key

The key is shown here and kept nowhere. Its entry goes into the JSON list of
`inferq gateway --api-keys-file FILE`; gateways read the file again when it changes.
"""


def add_commands(commands: Commands) -> None:
    """Add the command."""
    parser = add_command(commands, "gateway-key", "make an API key for gateways", _EXAMPLES)
    parser.add_argument("name", metavar="NAME", help="of the key, for logs and limits")
    parser.add_argument(
        "--model", action="append", metavar="NAME", help="a model that it may use (default: all)"
    )
    parser.add_argument(
        "--lane",
        action="append",
        choices=[lane.value for lane in Lane],
        help="a lane that it may use (default: all)",
    )
    parser.add_argument("--requests-per-minute", type=whole_number, metavar="N", help="at most")
    parser.add_argument(
        "--tokens-per-minute", type=whole_number, metavar="N", help="at most, prompts and outputs"
    )
    parser.add_argument(
        "--max-concurrency", type=whole_number, metavar="N", help="most jobs at once"
    )
    add_json_flag(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Make a key and print it with its entry."""
    if not _NAME.fullmatch(arguments.name):
        raise InvalidRequestError(
            "must be 1 to 64 letters, digits, '.', '_' or '-', the first a letter or digit",
            field="name",
            limit=64,
        )
    key = PREFIX + secrets.token_urlsafe(_KEY_BYTES)
    entry = make_entry(
        arguments.name,
        key,
        models=arguments.model,
        lanes=arguments.lane,
        requests_per_minute=arguments.requests_per_minute,
        tokens_per_minute=arguments.tokens_per_minute,
        max_concurrency=arguments.max_concurrency,
    )
    if arguments.json:
        print(json.dumps({"key": key, "entry": entry}))
    else:
        print(f"Key, shown only now:\n  {key}\n\nEntry for the file of keys:\n{_indented(entry)}")
    return exit_codes.OK


def make_entry(name: str, key: str, **limits: Any) -> dict[str, Any]:
    """Return what stands for a key in the gateways' file: its digest, and the limits given."""
    given = {field: value for field, value in limits.items() if value is not None}
    return {"name": name, "sha256": hashlib.sha256(key.encode()).hexdigest(), **given}


def _indented(entry: dict[str, Any]) -> str:
    return "\n".join(f"  {line}" for line in json.dumps(entry, indent=2).splitlines())
