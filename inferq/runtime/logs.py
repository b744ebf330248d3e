"""Logging of a process: structlog over the standard library, so that all lines have one form."""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from types import TracebackType
from typing import Final

import structlog

logger = structlog.get_logger("inferq")

#: Errors in a chain of causes that are told of.
_MAX_CAUSES: Final = 8


def configure_logging(level: str, form: str, *, show_prompts: bool = False) -> None:
    """Send all log lines to stderr, as JSON or for people (`auto`: by whether it is a terminal).

    A message that is an object with `log_fields` is a line of these fields in JSON, else its text.
    Warnings, and errors that end the process or a thread of it, are log lines too. An error that is
    given as `fault` is one about a job: what it says may hold what was asked or answered, and is
    left out unless `show_prompts`.
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
        _show_fault if show_prompts else _place_fault,
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
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
    logging.captureWarnings(capture=True)
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_uncaught_in_thread


def whereabouts(error: BaseException) -> str:
    """Return the types and places of an error and its causes, without what they say."""
    parts: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(parts) < _MAX_CAUSES:
        frames = "".join(traceback.format_tb(cause.__traceback__))
        parts.insert(0, f"{frames}{type(cause).__module__}.{type(cause).__qualname__}")
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return "\n".join(parts)


def _show_fault(
    _logger: object, _method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    if isinstance(fault := event.pop("fault", None), BaseException):
        event["exception"] = "".join(traceback.format_exception(fault)).rstrip()
    return event


def _place_fault(
    _logger: object, _method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    if isinstance(fault := event.pop("fault", None), BaseException):
        event["exception"] = whereabouts(fault)
    return event


def _log_uncaught(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    logger.critical("the process fails", exc_info=(kind, error, trace))


def _log_uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
        name = None if args.thread is None else args.thread.name
        logger.critical(
            "a thread fails",
            thread=name,
            exc_info=(args.exc_type, args.exc_value, args.exc_traceback),
        )


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
