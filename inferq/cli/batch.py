"""`inferq batch`: the requests of a file answered through the queue, and batches of gateways."""

from __future__ import annotations

import argparse
from typing import Final

from inferq.cli.extras import load_extra
from inferq.cli.flags import Commands, add_command, add_json_flag, add_server_flags, whole_number

_RUN_EXAMPLES: Final = """\
IN has one request a line, as OpenAI's batches have them:
  {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {…}}

OUT gets one line for each, in no certain order. After Ctrl-C, or a kill, the same command goes on
where it was; what is answered already is not asked again. The exit code is 1 when lines failed.

Examples:
  inferq batch run questions.jsonl answers.jsonl
  inferq batch run questions.jsonl answers.jsonl --errors errors.jsonl --model llama --window 200
"""

_EXAMPLES: Final = """\
These are the batches that were begun at a gateway. Programs use its /v1/batches.

Examples:
  inferq batch list
  inferq batch status batch_0193…
  inferq batch cancel batch_0193…
"""

_EXTRA: Final = "gateway"


def add_commands(commands: Commands) -> None:
    """Add them to the parser's commands."""
    parser = commands.add_parser(
        "batch", help="answer a file of requests; look at batches", allow_abbrev=False
    )
    inner = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_run(inner)
    listing = add_command(inner, "list", "list the batches, the newest first", _EXAMPLES)
    listing.add_argument("--key", metavar="NAME", help="those of this API key (default: of none)")
    listing.add_argument(
        "--count",
        type=whole_number,
        default=20,
        metavar="N",
        help="most of them (default: %(default)s)",
    )
    _finish(listing, "batch_commands", "list_batches")
    for name, summary in (("status", "say where a batch stands"), ("cancel", "end a batch")):
        command = add_command(inner, name, summary, _EXAMPLES)
        command.add_argument("batch_id", metavar="ID", help="its id")
        _finish(command, "batch_commands", f"{name}_batch")


def _add_run(commands: Commands) -> None:
    parser = add_command(commands, "run", "answer the requests of a file", _RUN_EXAMPLES)
    parser.add_argument("input", metavar="IN.jsonl", help="the requests")
    parser.add_argument("output", metavar="OUT.jsonl", help="the answers; made, never replaced")
    parser.add_argument(
        "--errors", metavar="FILE", help="where lines that failed go (default: OUT too)"
    )
    parser.add_argument("--model", metavar="NAME", help="model of the requests that name none")
    parser.add_argument(
        "--window",
        type=whole_number,
        default=256,
        metavar="N",
        help="most requests in the queue at once (default: %(default)s)",
    )
    parser.add_argument(
        "--tool-format",
        choices=("hermes", "json"),
        default="hermes",
        help="how the model writes tool calls, as of the gateway (default: %(default)s)",
    )
    _finish(parser, "batch_run", "run_batch")


def _finish(parser: argparse.ArgumentParser, module: str, function: str) -> None:
    def run(arguments: argparse.Namespace) -> int:
        loaded = load_extra(f"inferq.cli.{module}", extra=_EXTRA)
        return int(getattr(loaded, function)(arguments))

    add_json_flag(parser)
    add_server_flags(parser)
    parser.set_defaults(run=run)
