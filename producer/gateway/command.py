"""The command line of a gateway: one flag per setting, made from the settings model itself."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any, Final

import structlog

from inferq.producer.gateway.server import GatewayServer
from inferq.producer.gateway.settings import GatewaySettings
from inferq.protocol.errors import InvalidRequestError
from inferq.runtime.banner import log_start
from inferq.runtime.flags import settings_parser
from inferq.runtime.logs import configure_logging
from inferq.runtime.settings import load_settings

logger = structlog.get_logger("inferq.gateway")

#: The one key of `inferq serve`, which makes a file of it.
API_KEY_VARIABLE: Final = "INFERQ_API_KEY"

EPILOG: Final = """\
Every flag can be given as an environment variable too: its name stands in brackets.

Examples:
  inferq gateway
  inferq gateway --redis-url redis://queue:6379/0 --queues chat,code --host 0.0.0.0
  inferq gateway --api-keys-file keys.json    # `inferq gateway-key NAME` makes a key

SIGTERM (or Ctrl-C): /readyz fails; after --shutdown-delay-s streams are closed, for their clients
to resume at another gateway, and requests in flight get --shutdown-timeout-s. A second signal ends
at once. Jobs go on in any case.

Exit codes: 0 ended in order; 2 bad settings, keys or address.
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of `inferq gateway`."""
    return settings_parser(
        "inferq gateway",
        GatewaySettings,
        description="Serve OpenAI's API over HTTP: put requests into queues, stream their tokens.",
        epilog=EPILOG,
    )


def read_settings(given: Mapping[str, Any]) -> GatewaySettings:
    """Read the settings; raise `InvalidRequestError` that names the one that is wrong."""
    settings = load_settings(GatewaySettings, given)
    if API_KEY_VARIABLE in os.environ and settings.api_keys_file is None:
        raise InvalidRequestError(
            "is for `inferq serve` alone, and this gateway would serve everybody: give it a file "
            "of keys (--api-keys-file), or unset it",
            field=API_KEY_VARIABLE,
        )
    return settings


def main(argv: Sequence[str]) -> int:
    """Run a gateway until it is told to stop; return the exit code.

    Raises `InvalidRequestError` for a setting, which the command line gives its message and code.
    """
    settings = read_settings(vars(build_parser().parse_args(argv)))
    configure_logging(settings.log_level, settings.log_format, show_prompts=settings.log_prompts)
    log_start("gateway", settings, queues=list(settings.queues))
    asyncio.run(_serve(settings))
    return os.EX_OK


async def _serve(settings: GatewaySettings) -> None:
    stop, hurry = asyncio.Event(), asyncio.Event()

    def on_signal(name: str) -> None:
        if stop.is_set():
            hurry.set()
        logger.info("signal received", signal=name, at_once=hurry.is_set())
        stop.set()

    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, on_signal, signum.name)
    await GatewayServer(settings).run(stop, hurry)
