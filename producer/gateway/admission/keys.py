"""API keys: known by their digests, read from a file that may change."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final

import structlog
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator

from inferq.producer.gateway.admission.access import ANYONE, Access, KeyLimits
from inferq.producer.gateway.errors import HttpError
from inferq.protocol.errors import InvalidRequestError
from inferq.protocol.keys import Lane
from inferq.runtime.problems import describe

logger = structlog.get_logger("inferq.gateway")

#: Longest file of keys, in bytes, and most keys in it: each request compares with all.
MAX_FILE_BYTES: Final = 2**20
MAX_KEYS: Final = 4096
#: Seconds between two looks at the file.
WATCH_S: Final = 1.0

_Limit = Annotated[int, Field(ge=1, lt=2**31)]


class KeyEntry(BaseModel):
    """One key in the file; the key itself is not there."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    models: list[str] | None = Field(None, min_length=1)
    lanes: list[Lane] | None = Field(None, min_length=1)
    requests_per_minute: _Limit | None = None
    tokens_per_minute: _Limit | None = None
    max_concurrency: _Limit | None = None

    @field_validator("sha256", mode="before")
    @classmethod
    def _lower(cls, digest: object) -> object:
        return digest.lower() if isinstance(digest, str) else digest

    @property
    def access(self) -> Access:
        """What a caller with this key may do."""
        limits = KeyLimits(self.requests_per_minute, self.tokens_per_minute, self.max_concurrency)
        models = None if self.models is None else frozenset(self.models)
        lanes = None if self.lanes is None else frozenset(self.lanes)
        return Access(self.name, limits, models, lanes)


_ENTRIES: Final = TypeAdapter(Annotated[list[KeyEntry], Field(min_length=1, max_length=MAX_KEYS)])


class KeyRing:
    """The keys of a file; without a file anyone may call.

    Raises `InvalidRequestError` when the file is not good at the start; later a bad one is logged
    and the keys before it go on.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._keys: tuple[tuple[bytes, Access], ...] = ()
        self._seen: tuple[int, ...] | None = None
        if file is not None:
            self._seen = _state_of(file)
            self._keys = _read_keys(file)

    def authenticate(self, headers: Mapping[str, str]) -> Access:
        """Return what the caller may do; raise a 401 without a known key, in the right header."""
        if self._file is None:
            return ANYONE
        key = _bearer_token(headers)
        digest = hashlib.sha256(key).digest()
        found: Access | None = None
        for known, access in self._keys:  # all of them, so that time tells nothing
            if hmac.compare_digest(known, digest):
                found = access
        if found is None:
            raise _unauthorized("Incorrect API key provided.", "invalid_api_key")
        return found

    async def run(self) -> None:
        """Read the file again whenever it changes, until cancelled."""
        while self._file is not None:
            await asyncio.sleep(WATCH_S)
            await asyncio.to_thread(self.refresh)

    def refresh(self) -> None:
        """Read the file again if it is another than before."""
        if self._file is None:
            return
        state = _state_of(self._file)
        if state == self._seen:
            return
        self._seen = state
        try:
            self._keys = _read_keys(self._file)
        except InvalidRequestError as error:
            logger.error("API keys not read, the ones before stay", error=str(error))
        else:
            logger.info("API keys read", keys=len(self._keys))


def _state_of(file: Path) -> tuple[int, ...] | None:
    """Return what changes with the file, or with the link that leads to it."""
    try:
        status = file.stat()  # follows the links that a Kubernetes secret swaps
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _read_keys(file: Path) -> tuple[tuple[bytes, Access], ...]:
    try:
        with file.open("rb") as stream:
            content = stream.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise _bad_file(file, f"is longer than {MAX_FILE_BYTES} bytes")
        entries = _ENTRIES.validate_json(content)
    except OSError as error:
        raise _bad_file(file, f"cannot be read: {error.strerror}") from None
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, problem["loc"]))
        text = describe(problem)
        raise _bad_file(file, f"{place}: {text}" if place else text) from None
    for name, values in {
        "name": [entry.name for entry in entries],
        "sha256": [entry.sha256 for entry in entries],
    }.items():
        if len(set(values)) < len(values):
            twice = next(value for value in values if values.count(value) > 1)
            raise _bad_file(file, f"two keys have the {name} {twice}")
    return tuple((bytes.fromhex(entry.sha256), entry.access) for entry in entries)


def _bad_file(file: Path, problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"{file}: {problem}", field="api_keys_file")


def _bearer_token(headers: Mapping[str, str]) -> bytes:
    given = headers.get("authorization")
    if given is None:
        other = next((n for n in ("x-api-key", "api-key") if n in headers), None)
        hint = f" ({other} is not read)" if other else ""
        raise _unauthorized(
            f"No API key: send it in the header 'Authorization: Bearer KEY'{hint}.", None
        )
    scheme, _, token = given.partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise _unauthorized(
            "The API key must be in the form 'Authorization: Bearer KEY'.", "invalid_api_key"
        )
    return token.strip().encode("latin-1")


def _unauthorized(message: str, code: str | None) -> HttpError:
    return HttpError(401, message, code=code, headers={"WWW-Authenticate": "Bearer"})
