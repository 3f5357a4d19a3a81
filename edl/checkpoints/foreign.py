# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that a different system has written (`edl.integrations`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edl import integrations


def foreign_files(where: str) -> tuple[str, Sequence[Any]] | None:
    """Find the files of a different system's newest checkpoint at a path or an address.

    Returns:
        The system's name in `edl.integrations`, and its files; None if `where` holds none.

    Raises:
        CheckpointError: files are missing, or the directory cannot be read.
    """
    for system, find in integrations.installed(integrations.CHECKPOINTS).items():
        if files := find(where):
            return system, files
    return None
