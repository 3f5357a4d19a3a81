# SPDX-License-Identifier: Apache-2.0
"""A worker's log (standard error): its level, and the layout of its lines.

Lines have date and time in UTC, as the master's (edl/log.py), because both logs are read side by side.

The job's values set the level (`logLevel`), also while it runs. It applies to edl's own lines, to what the
model's code logs with Python's `logging`, and to libraries that use it. With debug, TensorFlow and Horovod
log more, too, if the level is known before they are imported. A worker's last words are always written.
"""

from __future__ import annotations

import json
import logging
import os
from datetime import UTC, datetime

log = logging.getLogger("edl.worker")

OF_LIBRARIES = {"TF_CPP_MIN_LOG_LEVEL": "0", "HOROVOD_LOG_LEVEL": "info"}  # their own variables, for debug


class Line(logging.Formatter):
    """All lines have their time; those of other libraries have their level and the logger's name, too."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        at = datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        return f"{at} {text}" if record.name == log.name else f"{at} {record.levelname} {record.name}: {text}"


def follow(config_json: str) -> None:
    """Set the level of the log to `logLevel` of the job's values."""
    level = str(json.loads(config_json).get("logLevel", "info"))
    root = logging.getLogger()
    if not any(isinstance(handler.formatter, Line) for handler in root.handlers):
        handler = logging.StreamHandler()
        handler.setFormatter(Line())
        root.addHandler(handler)
    if level == "debug":
        os.environ.update(OF_LIBRARIES)
    if root.level != (number := getattr(logging, level.upper())):
        root.setLevel(number)
        log.debug(f"the log level is {level}")
