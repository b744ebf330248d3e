"""Settings models that flags and environment fill; a wrong setting is named by both its names."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, Final, TypeVar

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from inferq.protocol.errors import InvalidRequestError

ENV_PREFIX: Final = "INFERQ_"
#: What the variables of one process begin with, where others may not complain about them.
PROCESS_PREFIXES: Final = ("INFERQ_GATEWAY_", "INFERQ_TASKS_")
#: Names that Kubernetes gives the variables of a Service, and the values of those without a mark.
_LINK_NAME: Final = re.compile(
    r"_SERVICE_HOST$|_SERVICE_PORT(_\w+)?$|_PORT_\d+_(TCP|UDP|SCTP)(_\w+)?$"
)
_LINK_VALUE: Final = re.compile(r"(tcp|udp|sctp)://")

S = TypeVar("S", bound="ProcessSettings")


class ProcessSettings(BaseSettings):
    """The settings of one kind of process; read once, then immutable.

    The variable of a setting is the model's `env_prefix` and its name in capitals; that of one in
    `shared`, which means the same to several processes, begins with `INFERQ_` alone.
    """

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, frozen=True, extra="forbid", allow_inf_nan=False
    )
    shared: ClassVar[frozenset[str]] = frozenset()
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
        is_ours = value is not None and not _is_service_link(name, value)
        return value if is_ours else None, field_name, False

    def __call__(self) -> dict[str, Any]:
        fields = self.settings_cls.model_fields
        values = {name: self.get_field_value(field, name)[0] for name, field in fields.items()}
        return {name: value for name, value in values.items() if value is not None}


def load_settings(kind: type[S], given: Mapping[str, Any], others: Collection[str] = ()) -> S:
    """Read settings: `given` wins over the environment, that over the defaults.

    `others` are variables with the prefix that other parts read. Raises `InvalidRequestError` that
    names the setting, also for a misspelt variable.
    """
    check_variable_names(kind, os.environ, others)
    try:
        return kind(**given)
    except ValidationError as error:
        raise InvalidRequestError(_describe(kind, error), field="settings") from None


def check_variable_names(
    kind: type[ProcessSettings], environment: Mapping[str, str], others: Collection[str] = ()
) -> None:
    """Refuse variables with the model's prefix that are neither settings of it nor in `others`.

    Those of other processes, which may share the environment, are theirs to check.
    """
    prefix: str = kind.model_config["env_prefix"]
    foreign = tuple(other for other in PROCESS_PREFIXES if other != prefix)
    known = {*map(kind.variable_of, kind.model_fields), *others}
    for name, value in sorted(environment.items()):
        is_ours = name.startswith(prefix) and not name.startswith(foreign)
        if is_ours and name not in known and not _is_service_link(name, value):
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise InvalidRequestError(f"no such setting{hint}", field=name)


def _is_service_link(name: str, value: str) -> bool:
    """Whether Kubernetes made it: a Service `inferq-gateway` makes INFERQ_GATEWAY_PORT."""
    return bool(_LINK_NAME.search(name) or _LINK_VALUE.match(value))


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


def _describe(kind: type[ProcessSettings], error: ValidationError) -> str:
    lines = []
    for problem in error.errors(include_url=False, include_input=False):
        message = problem["msg"].removeprefix("Value error, ")
        if not problem["loc"]:  # of several settings, which the message names
            lines.append(message)
            continue
        name = str(problem["loc"][0])
        flag = name.replace("_", "-")
        lines.append(f"--{flag} ({kind.variable_of(name)}): {message}")
    return "; ".join(lines)
