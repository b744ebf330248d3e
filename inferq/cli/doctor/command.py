"""`inferq doctor`: the command, its flags, and how findings are printed."""

from __future__ import annotations

import argparse
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Final

from inferq.cli import exit_codes
from inferq.cli.doctor.findings import AREAS, DEVICES, GROUPS, Finding, Status
from inferq.cli.flags import Commands, add_command, add_json_flag, add_server_flags
from inferq.cli.printing import print_json
from inferq.protocol.acl import Role

_EXAMPLES: Final = """\
Examples:
  inferq doctor
  inferq doctor --model ./Qwen3-8B --role worker --role producer
  inferq doctor --only redis --only queue --json

Looks only: nothing is changed, no job is made, no password is shown. Exit code 0 if nothing fails
(there may be warnings), else 1.
"""
_MARKS: Final = {
    Status.OK: "ok     ",
    Status.WARNING: "warning",
    Status.FAILURE: "FAILURE",
    Status.SKIPPED: "skipped",
}
_TIMEOUT_S: Final = 5.0


def add_commands(commands: Commands) -> None:
    """Add the command."""
    parser = add_command(commands, "doctor", "say what is wrong, and what to do", _EXAMPLES)
    parser.add_argument(
        "--only",
        action="append",
        choices=(*AREAS, *GROUPS),
        metavar="AREA",
        help=f"look at this only, several times: {', '.join(AREAS)}; "
        + "; ".join(f"{name} is {' and '.join(areas)}" for name, areas in GROUPS.items()),
    )
    parser.add_argument(
        "--role",
        action="append",
        default=[],
        choices=[role.value for role in Role],
        metavar="ROLE",
        help="fail unless the user of --redis-url has the rights of this role, several times: "
        + ", ".join(role.value for role in Role),
    )
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="folder, packaged model or hub id to look at (default: $INFERQ_MODEL)",
    )
    parser.add_argument(
        "--device",
        choices=DEVICES,
        help="where the model is to run (default: $INFERQ_DEVICE, else auto)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=_TIMEOUT_S,
        metavar="SECONDS",
        help="longest wait for an answer of the server (default: %(default)g)",
    )
    add_json_flag(parser)
    add_server_flags(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Look at everything that was asked for, print it, and return the exit code."""
    from inferq.cli.doctor import examination  # it loads what the other commands do not need

    findings = examination.examine(arguments)
    if arguments.json:
        for finding in findings:
            print_json(finding)
    else:
        _print(findings)
    failed = any(finding.status is Status.FAILURE for finding in findings)
    return exit_codes.FAILED if failed else exit_codes.OK


def _print(findings: Sequence[Finding]) -> None:
    width = max(len(finding.check) for finding in findings)
    for area, group in itertools.groupby(findings, lambda finding: finding.area):
        print(area)
        for finding in group:
            mark, check = _MARKS[finding.status], finding.check.ljust(width)
            print(f"  {mark}  {check}  {finding.message}")
            if finding.advice is not None:
                print(f"  {' ' * len(mark)}  {' ' * width}  -> {finding.advice}")
    counts = Counter(finding.status for finding in findings)
    print(", ".join(f"{counts[status]} {status.value}" for status in Status if counts[status]))
