"""Where the master logs, and how a line looks."""

from __future__ import annotations

import sys
from collections.abc import Mapping, MutableMapping
from typing import Any

import structlog

from edl.text import plain


def log_at(level: str) -> None:
    """Log to stderr, from this level on."""
    structlog.configure(
        processors=[
            _plain,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S.%f", utc=False),
            structlog.dev.ConsoleRenderer(colors=False, pad_event_to=0),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def _plain(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
    """What users and models wrote in a message must not control the terminal that shows it."""
    return {**event, "event": plain(str(event["event"]))}
