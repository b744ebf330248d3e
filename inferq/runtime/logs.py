"""Logging of a process: structlog over the standard library, so that all lines have one form."""

from __future__ import annotations

import logging
import sys

import structlog


def configure_logging(level: str, form: str) -> None:
    """Send all log lines to stderr, as JSON or for people (`auto`: by whether it is a terminal).

    A message that is an object with `log_fields` is a line of these fields in JSON, else its text.
    """
    pretty = form == "pretty" or (form == "auto" and sys.stderr.isatty())
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
        if pretty
        else structlog.processors.JSONRenderer()
    )
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, _end_block] if pretty else [_spread_fields, *shared],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("inferq").setLevel(level.upper())


def _end_block(
    _logger: object, _method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """Let a message of several lines end with its own last one."""
    if hasattr(event["_record"].msg, "log_fields"):
        del event["logger"]
    return event


def _spread_fields(
    _logger: object, _method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """Replace the text of a message that has `log_fields` by these."""
    event.update(getattr(event["_record"].msg, "log_fields", {}))
    return event
