# SPDX-License-Identifier: Apache-2.0
"""A process that may become its job's master: it stands by, acts, and stands by again once superseded.

    run ──▶ reads the Lease ──▶ stands by ──▶ acts ──▶ superseded, or ends
                  ▲                                        │
                  └──────────── with a new name ───────────┘

A standby has everything that it needs in memory. It listens, so that workers can report that they have lost
the acting master. `LeaderElection` decides when it acts; the caller defines what acting means.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import structlog

from edl.kubernetes.client import Api
from edl.master.backends.base import Tasks
from edl.master.backends.kubernetes import LeaderElection, Place, until_answered
from edl.master.rpc.standby import StandbyServer
from edl.net.listener import Listener

log = structlog.get_logger()
T = TypeVar("T")


class Candidate:
    """One process, over all its terms.

    Args:
        ask: asks the standby at host:port whether it vouches for the holder of that term.
        listener: creates a listener for the time in which this process stands by.
        listen: host:port for workers.
        prepare: reads the release before this process stands by.
        act: does the work of the acting master; called repeatedly while this process acts.
        clock: clock of the Lease; None: a clock that also advances while this process is stopped.
    """

    def __init__(
        self,
        api: Api,
        place: Place,
        ask: Callable[[str, int], Awaitable[bool]],
        listener: Callable[[], Listener],
        listen: str,
        prepare: Callable[[], Coroutine[Any, Any, None]],
        act: Callable[[], Coroutine[Any, Any, None]],
        clock: Callable[[], float] | None = None,
    ):
        self._api, self._place, self._ask, self._clock = api, place, ask, clock
        self._listener, self._listen, self._prepare, self._act = listener, listen, prepare, act
        self._leaving = asyncio.Event()
        self.stands_by = False
        self._witnesses: frozenset[int] = frozenset()
        self.election = self._new()

    def _new(self) -> LeaderElection:
        clock = {} if self._clock is None else {"clock": self._clock}
        return LeaderElection(self._api, self._place, self._ask, **clock)

    def leave(self) -> None:
        """End this process."""
        self._leaving.set()

    def take_witnesses(self) -> frozenset[int]:
        """Return and clear the workers that reached this master while it stood by; called once in a term."""
        witnesses, self._witnesses = self._witnesses, frozenset()
        return witnesses

    async def run(self) -> None:
        """Run terms until `leave`.

        Raises:
            EdlError: of `prepare` and `act`, or the account lacks a right.
        """
        while not self._leaving.is_set():
            self.election = self._new()
            await self._one_term(self.election)

    async def _one_term(self, election: LeaderElection) -> None:
        """Stand by and act, until this process must end or is superseded."""
        api, tasks = self._api, Tasks()
        api.vet = None

        def keep(part: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
            tasks.keep(part, work, lambda _: None, api.pace.status)

        try:
            await self.unless_leaving(until_answered(api.pace, election.open))
            if self._leaving.is_set():
                return
            keep("watching the Lease", election.watch)
            keep("watching masters", election.masters.run)
            await self.unless_leaving(self._come_to_act(election))
            if not election.term:
                return
            keep("renewing the Lease", election.renew)
            shows = election.masters.show_who_acts
            # An outage of the API server is no failure of this task.
            keep("showing the acting master", lambda: until_answered(api.pace, shows))
            while not self._leaving.is_set() and not election.lost.is_set():
                await self._act()
        finally:
            await tasks.close()
            await election.release()

    async def _come_to_act(self, election: LeaderElection) -> None:
        """Act at once if possible; otherwise stand by until this master must act."""
        pace = self._api.pace
        if await until_answered(pace, election.take):
            return
        await self._prepare()
        server = StandbyServer(self._listener(), election.wake, election.vouch)
        await server.start(self._listen)
        self.stands_by = True
        log.info(f"this master ({election.holder}) stands by")
        try:
            await until_answered(pace, lambda: election.stand_by(server.lost))
        finally:
            self.stands_by = False
            self._witnesses = server.witnesses
            await server.close(election.term)

    async def until(self, happens: asyncio.Event) -> None:
        """Wait until `happens` is set, this process must end, or it is superseded."""
        waits = [asyncio.create_task(e.wait()) for e in (happens, self._leaving, self.election.lost)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()

    async def unless_leaving(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Return the result of `work`; None if this process must end first."""
        task, leaving = asyncio.create_task(work), asyncio.create_task(self._leaving.wait())
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        if task.done():
            return task.result()
        task.cancel()
        return None
