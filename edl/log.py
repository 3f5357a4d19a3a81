# SPDX-License-Identifier: Apache-2.0
"""Logging of the processes that do not train: the master and the parameter servers.

Promise: each line begins with its full date and time in UTC (a job may run for a month, its pods in several
places). Text from other sources in a line cannot control the terminal that shows it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, MutableMapping
from typing import Any

import structlog

from edl.formatting import plain


def log_at(level: str) -> None:
    """Log messages of this level and above to stderr."""
    structlog.configure(
        processors=[
            _plain,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%Y-%m-%dT%H:%M:%S.%fZ", utc=True),
            structlog.dev.ConsoleRenderer(colors=False, pad_event_to=0),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def _plain(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
    return {**event, "event": plain(str(event["event"]))}
