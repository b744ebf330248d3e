"""The first log line of a process: what it is, and the settings that were chosen for it."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from typing import Any, Final

import structlog
from pydantic import SecretStr

from inferq.protocol.servers import ServerUrl
from inferq.runtime.settings import ProcessSettings
from inferq.runtime.shared_settings import ServerSettings
from inferq.version import __version__

logger = structlog.get_logger("inferq")

#: User and password, slashes in them too, and what follows a question mark, of any URL.
_LOGIN: Final = re.compile(r"(?<=://)\S*@")
_QUERY: Final = re.compile(r"(?<=\?)\S+")
_MASK: Final = "***"


def log_start(process: str, settings: ServerSettings, **facts: object) -> None:
    """Say that a process starts: its version, its server, and what is not as by default."""
    logger.info(
        "starting",
        process=process,
        version=__version__,
        python=platform.python_version(),
        pid=os.getpid(),
        server=ServerUrl.parse(settings.redis_url.get_secret_value()).name,
        **facts,
        settings=chosen_settings(settings),
    )


def chosen_settings(settings: ProcessSettings) -> dict[str, Any]:
    """Return the settings that differ from their defaults, without what is secret in them."""
    return {
        name: masked(value)
        for name, value in settings
        if value != type(settings).model_fields[name].get_default(call_default_factory=True)
    }


def masked(value: Any) -> Any:
    """Return a setting as a log line may show it: plain values, with secrets masked."""
    if isinstance(value, SecretStr):
        return _MASK
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(name): masked(part) for name, part in value.items()}
    if isinstance(value, tuple | list | set | frozenset):
        return [masked(part) for part in value]
    text = str(value)
    if "://" not in text:
        return text
    return _QUERY.sub(_MASK, _LOGIN.sub(f"{_MASK}@", text))
