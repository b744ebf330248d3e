"""Signatures after Standard Webhooks, and the secrets that make them."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from inferq.protocol.errors import InvalidRequestError

PREFIX: Final = "whsec_"
#: Bytes that a secret may have.
MIN_SECRET_BYTES: Final = 24
MAX_SECRET_BYTES: Final = 64
#: Longest file of secrets, in bytes.
MAX_FILE_BYTES: Final = 2**20

#: By name: the secrets that sign, of which a receiver needs to know one.
Secrets = Mapping[str, tuple[bytes, ...]]


def signed_headers(
    secrets: Sequence[bytes], delivery_id: str, timestamp: int, body: bytes
) -> dict[str, str]:
    """Return the headers that prove where a body comes from; `timestamp` is in seconds."""
    content = b".".join((delivery_id.encode(), str(timestamp).encode(), body))
    signatures = [
        "v1," + base64.b64encode(hmac.digest(secret, content, hashlib.sha256)).decode()
        for secret in secrets
    ]
    return {
        "webhook-id": delivery_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": " ".join(signatures),
    }


def read_secret(text: str) -> bytes:
    """Return the key of a secret such as `whsec_…`; raise `ValueError`, which never shows it."""
    try:
        key = base64.b64decode(text.removeprefix(PREFIX), validate=True)
    except (binascii.Error, ValueError):
        raise ValueError(f"must be {PREFIX} and base64") from None
    if not MIN_SECRET_BYTES <= len(key) <= MAX_SECRET_BYTES:
        raise ValueError(
            f"has {len(key)} bytes, which are not {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES}"
        )
    return key


def read_secrets_file(path: Path) -> dict[str, tuple[bytes, ...]]:
    """Read a JSON map of names to a secret, or to a list of them while one is being replaced.

    Raises `InvalidRequestError`, which names the entry and never shows a secret.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
        entries: Any = json.loads(text) if len(text) <= MAX_FILE_BYTES else None
    except OSError as error:
        raise _bad_file(path, error.strerror or "cannot be read") from None
    except ValueError:
        entries = None
    if not isinstance(entries, dict):
        raise _bad_file(path, f"is not a JSON map of at most {MAX_FILE_BYTES} bytes")
    secrets: dict[str, tuple[bytes, ...]] = {}
    for name, given in entries.items():
        texts = given if isinstance(given, list) else [given]
        if not texts or not all(isinstance(each, str) for each in texts):
            raise _bad_file(path, f"{name!r} is neither a secret nor a list of secrets")
        try:
            secrets[name] = tuple(map(read_secret, texts))
        except ValueError as error:
            raise _bad_file(path, f"{name!r} {error}") from None
    return secrets


def _bad_file(path: Path, problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"{path}: {problem}", field="webhook_secrets_file")
