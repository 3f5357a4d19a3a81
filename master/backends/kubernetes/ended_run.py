# SPDX-License-Identifier: Apache-2.0
"""A run that has ended: its workers' pods are deleted when their time to live is over; its status is kept.

Without the status, the next master would start the run again. The run keeps its values: the status shows
which changes are refused until they are reverted, or a new run is requested.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from edl.formatting import how_many
from edl.kubernetes import pods
from edl.master.backends.base import Tasks
from edl.master.backends.kubernetes.installed import Installed
from edl.master.backends.kubernetes.pod_control import PodDeletion
from edl.master.backends.kubernetes.status import Data, condition, read, write
from edl.master.core import events as ev
from edl.master.spec import Invalid, JobSpec

log = structlog.get_logger()


class EndedRun:
    """Keeps the status of an ended run and deletes its pods. `changed` is set if a new run is requested.

    Args:
        installed: the release, opened a moment ago.
        end_servers: the number of the run's parameter servers, and a function that makes them drop the run's
            rows and returns when all have; None if the run had no servers.
    """

    def __init__(
        self,
        installed: Installed,
        end_servers: tuple[int, Callable[[], Coroutine[Any, Any, None]]] | None = None,
    ):
        self._installed, self._found = installed, installed.found
        self._end_servers = end_servers
        self._kept: Data = dict(installed.status)
        self._tasks = Tasks()
        self._deletion = PodDeletion(installed.api, installed.place, self._tasks, _log)
        self._new_values, self._new_refusal = asyncio.Event(), asyncio.Event()
        self.changed = asyncio.Event()

    async def start(self) -> None:
        """Delete the pods of other runs, and start to watch the release."""
        for pod in self._installed.workers:
            if pods.of(pod)[0] != self._found.run_id:
                self._deletion.discard(pod)
        self._installed.on_job.append(self._job_changed)
        self._tasks.start(self._end_the_last(), lambda error: log.warning(f"pods are left running: {error}"))
        pause = self._installed.api.pace.status
        for part, work in {
            "watching pods": self._installed.pods.run,
            "watching the release": self._installed.job.run,
            "deleting ended pods": self._delete_in_time,
            "keeping the status": self._keep_status,
            "showing what is refused": self._show_refused,
            **({"ending parameter servers": self._free_servers} if self._end_servers is not None else {}),
        }.items():
            self._tasks.keep(part, work, _log, pause)

    async def close(self) -> None:
        await self._tasks.close()

    def _job_changed(self) -> None:
        if self._found.another_requested(self._installed.wanted()):
            self.changed.set()
        else:
            self._new_values.set()
            self._new_refusal.set()

    @property
    def _spec(self) -> JobSpec | None:
        """The run's values, with the present live values; None if they are unknown."""
        wanted, earlier = self._installed.wanted(), self._found.earlier
        if earlier is not None:
            return earlier.with_live_values(wanted)[0]
        return wanted if isinstance(wanted, JobSpec) else None

    @property
    def _refused(self) -> str:
        """Which changes of the values are refused, in words; empty if none is."""
        wanted, earlier = self._installed.wanted(), self._found.earlier
        if isinstance(wanted, Invalid):
            return f"the new values are refused: {wanted.why}"
        return earlier.refusal(wanted, ended=True) if earlier is not None else ""

    async def _show_refused(self) -> None:
        """Keep the condition in the status up to date with the values, and log each refusal."""
        place, api, name = self._installed.place, self._installed.api, self._installed.place.names.status
        while True:
            self._new_refusal.clear()
            said = condition(self._refused)
            if any(self._kept.get(key) != text for key, text in said.items()):
                if refused := said["refused"]:
                    log.warning(refused)
                await write(api, name, place, self._installed.metadata, said, {**self._kept, **said})
                self._kept = {**self._kept, **said}
            await self._new_refusal.wait()

    async def _keep_status(self) -> None:
        """Restore missing keys of the status, for example after it was deleted by hand."""
        place, api, name = self._installed.place, self._installed.api, self._installed.place.names.status
        while True:
            await asyncio.sleep(api.pace.relist)
            there = await read(api, place, name)
            if missing := {key: text for key, text in self._kept.items() if there.get(key) != text}:
                log.warning(f"configmap {name} lacks {', '.join(missing)}: writing them again")
                await write(api, name, place, self._installed.metadata, missing, self._kept)

    async def _free_servers(self) -> None:
        """Make the parameter servers drop the rows of the ended run, and report it in the status."""
        assert self._end_servers is not None
        count, end = self._end_servers
        await end()
        place, api, name = self._installed.place, self._installed.api, self._installed.place.names.status
        self._kept = {**self._kept, "servers": f"the rows of {how_many(count, 'parameter server')} are freed"}
        await write(
            api, name, place, self._installed.metadata, {"servers": self._kept["servers"]}, self._kept
        )

    async def _end_the_last(self) -> None:
        """Delete the pods of workers that have not exited within their grace period."""
        if self._spec is not None:
            grace = self._spec.config.elastic.grace_period_seconds
            await asyncio.sleep(max(self._found.ended_at + grace - time.time(), 0.0))
            for pod in self._installed.workers:
                if not pods.ended(pod):
                    await self._deletion.delete(pod)

    async def _delete_in_time(self) -> None:
        while True:
            self._new_values.clear()
            keep = self._spec.config.ttl_seconds_after_finished if self._spec is not None else -1
            left = self._found.ended_at + keep - time.time()
            try:
                async with asyncio.timeout(None if keep < 0 else max(left, 0.0)):
                    await self._new_values.wait()
            except TimeoutError:
                break
        log.info(f"the run ended {keep:g} s ago: deleting what is left of its workers")
        for pod in self._installed.workers:
            await self._deletion.delete(pod)


def _log(event: ev.Event) -> None:
    """Log the event, because there is no job to process it."""
    if isinstance(event, ev.Degraded) and event.why:
        log.warning(f"{event.part}: {event.why}")
