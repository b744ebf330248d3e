"""Limits of API keys, counted in Redis for all gateways together."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import structlog

from inferq.producer.async_client import AsyncClient
from inferq.producer.gateway.admission.access import Access, KeyLimits
from inferq.producer.gateway.errors import RATE_LIMIT, BadRequest, HttpError, retry_after
from inferq.protocol.errors import InferqError
from inferq.protocol.keys import GatewayKeys
from inferq.protocol.script_call import call_script, read_script

logger = structlog.get_logger("inferq.gateway")

#: Seconds after which the slots of a gateway that died are free again.
LEASE_S: Final = 30.0
_SCRIPTS: Final = "inferq.producer.gateway.admission.lua"
#: Slots renewed in one call.
_RENEWED_AT_ONCE: Final = 500


class Admission:
    """One request that was let in; an async context manager that gives its slots back at the end.

    `headers` are those that tell the caller its limits. `used_tokens`, once known, replaces the
    bound that was charged; a request whose usage nobody learns stays charged for it.
    """

    def __init__(
        self,
        limiter: Limiter | None = None,
        grant: _Grant | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.headers: Mapping[str, str] = headers or {}
        self.used_tokens: int | None = None
        self._limiter = limiter
        self._grant = grant

    async def release(self) -> None:
        """Give the slots back and correct the charge; once, a second time does nothing."""
        grant, self._grant = self._grant, None
        if grant is not None and self._limiter is not None:
            await self._limiter.release(grant, self.used_tokens)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.release()


@dataclass(frozen=True, slots=True)
class _Grant:
    """What one request holds."""

    keys: GatewayKeys
    limits: KeyLimits
    tokens: int
    slots: tuple[str, ...]


@dataclass(slots=True)
class _Answer:
    """What `admit.lua` says."""

    is_admitted: bool
    short_of: str
    wait_ms: int
    requests_left: int
    requests_reset_ms: int
    tokens_left: int
    tokens_reset_ms: int

    def headers(self, limits: KeyLimits) -> dict[str, str]:
        """Return the headers that OpenAI sends, for what is limited."""
        shown: dict[str, str] = {}
        rows = (
            ("requests", limits.requests_per_minute, self.requests_left, self.requests_reset_ms),
            ("tokens", limits.tokens_per_minute, self.tokens_left, self.tokens_reset_ms),
        )
        for name, limit, left, reset_ms in rows:
            if limit is not None:
                shown[f"x-ratelimit-limit-{name}"] = str(limit)
                shown[f"x-ratelimit-remaining-{name}"] = str(left)
                shown[f"x-ratelimit-reset-{name}"] = format_wait(reset_ms)
        return shown


class Limiter:
    """Lets requests in as the limits of their keys allow; `run` keeps the slots of those let in.

    The counts are on the server of `client`, by whose connections they are reached.
    """

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._held: dict[_Grant, None] = {}
        self._releases: set[asyncio.Task[None]] = set()

    async def admit(
        self, access: Access, *, requests: int = 1, tokens: int = 0, streams: int = 1
    ) -> Admission:
        """Charge the caller's key, or raise a 429 that says when to come back.

        `tokens` bounds prompt and outputs together; `streams` is how many jobs run at once. A
        request for more jobs than the key may run at once is a 400. Raises `ServerLost`.
        """
        limits = access.limits
        if access.key_id is None or limits.are_none:
            return Admission()
        if limits.max_concurrency is not None and streams > limits.max_concurrency:
            raise BadRequest(
                f"The request makes {streams} jobs, and this API key may run "
                f"{limits.max_concurrency} at once."
            )
        name = secrets.token_hex(8)
        slots = tuple(f"{name}:{index}" for index in range(streams))
        grant = _Grant(GatewayKeys(access.key_id), limits, tokens, slots)
        answer = await self._admit(name, grant, requests)
        headers = answer.headers(limits)
        if not answer.is_admitted:
            raise _rate_limited(answer, limits, headers)
        if slots:
            self._held[grant] = None
        return Admission(self, grant, headers)

    async def release(self, grant: _Grant, used_tokens: int | None) -> None:
        """Give back what `admit` granted; see `Admission.release`."""
        self._held.pop(grant, None)
        if not grant.slots:
            return
        # a task of its own: whoever waits here may have been cancelled already
        task = asyncio.ensure_future(self._release(grant, used_tokens))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)
        await asyncio.shield(task)

    async def run(self) -> None:
        """Renew the leases of what is held, until cancelled."""
        while True:
            await asyncio.sleep(LEASE_S / 3)
            await self.renew()

    async def renew(self) -> None:
        """Renew the leases of what is held, once; what fails is tried again by the next round."""
        slots: dict[GatewayKeys, list[str]] = {}
        for grant in self._held:
            slots.setdefault(grant.keys, []).extend(grant.slots)
        for keys, names in slots.items():
            for start in range(0, len(names), _RENEWED_AT_ONCE):
                some = names[start : start + _RENEWED_AT_ONCE]
                try:
                    await self._call("renew", (keys.slots,), (_ms(LEASE_S), *some))
                except InferqError as error:
                    logger.warning("slots not renewed", key=keys.name, error=str(error))

    async def aclose(self) -> None:
        """Wait until everything is given back that is on its way."""
        if self._releases:
            await asyncio.wait(self._releases)

    async def _admit(self, name: str, grant: _Grant, requests: int) -> _Answer:
        limits = grant.limits
        reply = await self._call(
            "admit",
            (grant.keys.budget, grant.keys.slots),
            (
                name,
                limits.requests_per_minute or 0,
                limits.tokens_per_minute or 0,
                limits.max_concurrency or 0,
                requests,
                grant.tokens,
                len(grant.slots),
                _ms(LEASE_S),
            ),
        )
        admitted, short_of, *numbers = reply
        return _Answer(bool(admitted), short_of.decode(), *numbers)

    async def _release(self, grant: _Grant, used_tokens: int | None) -> None:
        back = 0 if used_tokens is None else grant.tokens - used_tokens
        limit = grant.limits.tokens_per_minute or 0
        keys = grant.keys
        try:
            await self._call("release", (keys.budget, keys.slots), (limit, back, *grant.slots))
        except InferqError as error:
            logger.warning("slots not released, their leases run out", error=str(error))

    async def _call(self, name: str, keys: Sequence[str], arguments: Sequence[str | int]) -> Any:
        return await self._client.run(
            lambda redis: call_script(redis, read_script(_SCRIPTS, name), keys, arguments),
            slot_key=keys[0],
        )


def format_wait(milliseconds: int) -> str:
    """Return a wait as OpenAI writes it: `20ms`, `1.5s`, `6m0s`."""
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    seconds = f"{rest / 1000:.3f}".rstrip("0").rstrip(".")
    return f"{minutes}m{seconds}s" if minutes else f"{seconds}s"


class RateLimited(HttpError):
    """429: a limit of the key is reached; `limit` is `requests`, `tokens` or `concurrency`."""

    def __init__(self, limit: str, message: str, headers: Mapping[str, str]) -> None:
        super().__init__(429, message, type=RATE_LIMIT, code="rate_limit_exceeded", headers=headers)
        self.limit = limit


def _rate_limited(answer: _Answer, limits: KeyLimits, headers: Mapping[str, str]) -> RateLimited:
    limit, unit = {
        "requests": (limits.requests_per_minute, "requests per minute"),
        "tokens": (limits.tokens_per_minute, "tokens per minute"),
        "concurrency": (limits.max_concurrency, "jobs at once"),
    }[answer.short_of]
    wait = (
        "" if answer.short_of == "concurrency" else f" Try again in {format_wait(answer.wait_ms)}."
    )
    return RateLimited(
        answer.short_of,
        f"Rate limit of this API key reached: {limit} {unit}.{wait}",
        {**headers, **retry_after(answer.wait_ms / 1000)},
    )


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
