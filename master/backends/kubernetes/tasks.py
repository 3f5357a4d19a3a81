"""What runs beside the master's loop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import structlog

log = structlog.get_logger()


class Tasks:
    """Tasks that nobody awaits: kept until they end, and what breaks them is told."""

    def __init__(self) -> None:
        self._all: set[asyncio.Task[None]] = set()

    def keep(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._all.add(task)
        task.add_done_callback(self._done)

    async def close(self) -> None:
        """Cancel those that have not ended, and wait until they have."""
        for task in self._all:
            task.cancel()
        await asyncio.gather(*self._all, return_exceptions=True)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._all.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task of the Kubernetes backend failed", exc_info=error)
