"""Settings models that flags and environment fill; a wrong setting is named by both its names."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BeforeValidator, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from inferq.protocol.errors import InvalidRequestError
from inferq.runtime.problems import describe
from inferq.runtime.variables import ENV_PREFIX, is_service_link, joined, misspelt, refuse

S = TypeVar("S", bound="ProcessSettings")


def _not_empty(given: object) -> object:
    if given == "":
        raise ValueError("must not be empty: leave it out for none")
    return given


#: A file, by its path; an empty one would be the working directory.
FilePath = Annotated[Path, BeforeValidator(_not_empty)]


class ProcessSettings(BaseSettings):
    """The settings of one kind of process; read once, then immutable.

    The variable of a setting is the model's `env_prefix` and its name in capitals; that of one in
    `shared`, which means the same to several processes, begins with `INFERQ_` alone.
    """

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, frozen=True, extra="forbid", allow_inf_nan=False
    )
    shared: ClassVar[frozenset[str]] = frozenset()
    #: Variables that give the default of a setting.
    stand_ins: ClassVar[Mapping[str, str]] = {}
    #: Second names of flags, by setting.
    other_flags: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    #: Settings whose flags may be given several times.
    repeated: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def variable_of(cls, name: str) -> str:
        """Return the name of a setting's environment variable."""
        prefix = ENV_PREFIX if name in cls.shared else cls.model_config["env_prefix"]
        return prefix + name.upper()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Take what is given, then the environment; see pydantic-settings."""
        return init_settings, _Variables(settings_cls)


class _Variables(PydanticBaseSettingsSource):
    """The environment, by `variable_of`; values stay text, for the fields' validators."""

    def get_field_value(
        self,
        field: FieldInfo,  # noqa: ARG002
        field_name: str,
    ) -> tuple[Any, str, bool]:
        assert issubclass(self.settings_cls, ProcessSettings)
        name = self.settings_cls.variable_of(field_name)
        value = os.environ.get(name)
        is_ours = value is not None and not is_service_link(name, value)
        return value if is_ours else None, field_name, False

    def __call__(self) -> dict[str, Any]:
        fields = self.settings_cls.model_fields
        values = {name: self.get_field_value(field, name)[0] for name, field in fields.items()}
        return {name: value for name, value in values.items() if value is not None}


def load_settings(kind: type[S], given: Mapping[str, Any], further: Sequence[str] = ()) -> S:
    """Read settings: `given` wins over the environment, that over the defaults.

    `further` says what the caller found wrong. Raises `InvalidRequestError` that names every wrong
    setting and every misspelt variable.
    """
    names, wrong = _misspelt(kind, os.environ), list(further)
    try:
        settings = kind(**given)
    except ValidationError as error:
        wrong += _wrong_values(kind, given, error)
    if wrong:
        raise InvalidRequestError(joined([*map(": ".join, names), *wrong]), field="settings")
    refuse(names)
    return settings


def check_variable_names(kind: type[ProcessSettings], environment: Mapping[str, str]) -> None:
    """Refuse variables with our prefix that are no settings of this model nor of another part.

    Those with the prefix of another process, which may share the environment, are its to check.
    Raises `InvalidRequestError` that names them all.
    """
    refuse(_misspelt(kind, environment))


def _misspelt(kind: type[ProcessSettings], environment: Mapping[str, str]) -> list[tuple[str, str]]:
    own = frozenset(map(kind.variable_of, kind.model_fields))
    return misspelt(environment, prefix=kind.model_config["env_prefix"], own=own)


def read_pairs(given: object, form: str) -> object:
    """Return the map of one or several texts like `NAME=VALUE,NAME=VALUE`; others as they are.

    `form` is what the error says that a part should have been.
    """
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list):
        return given
    pairs: dict[str, str] = {}
    for text in ",".join(map(str, texts)).split(","):
        name, sign, value = text.strip().partition("=")
        if not sign:
            raise ValueError(f"{text.strip()!r} is not {form}")
        if name in pairs:
            raise ValueError(f"{name!r} is there twice")
        pairs[name] = value
    return pairs


def read_list(given: object) -> object:
    """Return the parts of one or several texts joined by commas; others as they are."""
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        return given
    return [part.strip() for text in texts for part in text.split(",") if part.strip()]


def _wrong_values(
    kind: type[ProcessSettings], given: Mapping[str, Any], error: ValidationError
) -> Iterator[str]:
    for problem in error.errors(include_url=False, include_input=False):
        text = describe(problem)
        match problem["loc"]:
            case ():  # of several settings, which the message names
                yield text
            case (name, int(index)) if problem["type"] != "value_error":
                yield f"{_source(kind, given, str(name))}: item {index + 1} {text}"
            case (name, *_):
                yield f"{_source(kind, given, str(name))}: {text}"


def _source(kind: type[ProcessSettings], given: Mapping[str, Any], name: str) -> str:
    """Return how whoever gave a setting knows it."""
    variable = kind.variable_of(name)
    if name in kind.stand_ins and name not in given and variable not in os.environ:
        return kind.stand_ins[name]
    return f"--{name.replace('_', '-')} ({variable})"
