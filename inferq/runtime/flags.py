"""Command-line flags made of a settings model: one for each setting."""

from __future__ import annotations

import argparse
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from pydantic import SecretStr
from pydantic_core import PydanticUndefined

from inferq.runtime.command_parser import CommandParser
from inferq.runtime.settings import ProcessSettings


class FlagContainer(Protocol):
    """Takes flags: a parser, or a group in its help, whose type is private to argparse."""

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        """Add a flag."""


@dataclass(frozen=True, slots=True)
class Command:
    """Arguments and variables that give a process its settings; secrets are in the variables."""

    arguments: tuple[str, ...]
    variables: Mapping[str, str] = field(repr=False)


def settings_parser(
    prog: str, kind: type[ProcessSettings], *, description: str, epilog: str
) -> argparse.ArgumentParser:
    """Return the parser of a command whose flags are the settings of a model.

    A flag that is not given leaves no value.
    """
    parser = CommandParser(
        prog=prog,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    add_flags(parser, kind, kind.model_fields)
    return parser


def add_flags(container: FlagContainer, kind: type[ProcessSettings], names: Iterable[str]) -> None:
    """Add the flags of some settings of a model; their values stay text."""
    for name in names:
        setting = kind.model_fields[name]
        flags = [_flag_of(name), *kind.other_flags.get(name, ())]
        text = f"{setting.description}{_shown_default(setting.default)} [{kind.variable_of(name)}]"
        options: dict[str, Any] = {"dest": name, "help": text.replace("%", "%%")}
        if setting.annotation in (bool, bool | None):
            container.add_argument(*flags, action=argparse.BooleanOptionalAction, **options)
            continue
        if typing.get_origin(setting.annotation) is typing.Literal:
            options["choices"] = typing.get_args(setting.annotation)
        else:
            options["metavar"] = "VALUE"
        if name in kind.repeated:
            options["action"] = "append"
        container.add_argument(*flags, **options)


def to_command(kind: type[ProcessSettings], given: Mapping[str, Any]) -> Command:
    """Return how to give a process what `add_flags` read: the way back."""
    arguments: list[str] = []
    variables: dict[str, str] = {}
    for name, value in given.items():
        if kind.model_fields[name].annotation is SecretStr:
            variables[kind.variable_of(name)] = value
        elif isinstance(value, bool):
            arguments.append(_flag_of(name) if value else _flag_of(f"no_{name}"))
        else:
            values = value if isinstance(value, list) else [value]
            # one word each, so that a value may begin with a dash
            arguments += [f"{_flag_of(name)}={each}" for each in values]
    return Command(tuple(arguments), variables)


def _flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def _shown_default(default: Any) -> str:
    if default is PydanticUndefined or default is None or default == ():
        return ""
    # A default is no secret.
    plain = default.get_secret_value() if isinstance(default, SecretStr) else default
    return f" (default: {plain})"
