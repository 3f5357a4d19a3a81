# SPDX-License-Identifier: Apache-2.0
"""Two masters while the API server is frozen: it takes requests, and answers none of them."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from edl.kubernetes.client import Api
from edl.kubernetes.timing import Timing
from edl.master.backends.kubernetes.leader_election import LeaderElection
from edl.master.backends.kubernetes.masters import Whereabouts
from edl.master.backends.kubernetes.release import Place

PACE = Timing().times(0.2)  # the acting master may speak for 0.6 s after a renewal


class FrozenApi:
    """The requests of one master; `answers` says whether they are answered, for all masters together."""

    api_up = True  # as watches leave it, which are silent
    vet = None

    def __init__(self, lease: dict[str, Any], answers: asyncio.Event):
        self.pace, self._lease, self._answers = PACE, lease, answers

    async def get(self, path: str, **query: str) -> dict[str, Any]:
        await self._answers.wait()
        return copy.deepcopy(self._lease)

    async def patch(self, path: str, body: dict[str, Any], urgency: int) -> dict[str, Any]:
        await self._answers.wait()
        self._lease["spec"] |= body["spec"]
        self._lease["metadata"]["resourceVersion"] = str(int(self._lease["metadata"]["resourceVersion"]) + 1)
        return copy.deepcopy(self._lease)

    def doubt(self) -> None: ...


class BothMasters:
    """The pods of two masters, as one of them knows them."""

    def __init__(self, other: str):
        self.others, self.standbys = [{"metadata": {"name": other}}], (f"{other}:8500",)

    def whereabouts(self, name: str) -> Whereabouts:
        return Whereabouts.HERE

    async def read(self) -> None: ...


def election(name: str, other: str, api: Any, ask: Callable[[str, int], Awaitable[bool]]) -> LeaderElection:
    of_the_job: Api = api
    made = LeaderElection(
        of_the_job, Place("n", "edl", "edl", "edl-master:8500", pod=name), ask, time.monotonic
    )
    made.masters = BothMasters(other)  # type: ignore[assignment]
    return made


@asynccontextmanager
async def two_masters() -> AsyncIterator[tuple[LeaderElection, LeaderElection, asyncio.Event]]:
    """Yield the one that acts and renews its Lease, the one that stands by, and whether the API answers."""
    lease = {"metadata": {"name": "edl-master", "uid": "1", "resourceVersion": "1"}, "spec": {}}
    answers = asyncio.Event()
    answers.set()

    async def ask(address: str, term: int) -> bool:
        return await standby.vouch(term)

    acting = election("a", "b", FrozenApi(lease, answers), ask)
    standby = election("b", "a", FrozenApi(lease, answers), ask)
    await acting.open()
    assert await acting.take()
    await standby.open()
    renewing = asyncio.create_task(acting.renew())
    try:
        yield acting, standby, answers
    finally:
        renewing.cancel()


async def silences(acting: LeaderElection, seconds: float) -> list[float]:
    """Let the acting master speak all the time; return how long it had to be silent, each time."""
    waits, until = [0.0], time.monotonic() + seconds
    while (began := time.monotonic()) < until:
        async with asyncio.timeout(until - began + PACE.stale):
            assert await acting.confirmed()
        waits.append(time.monotonic() - began)
        await asyncio.sleep(PACE.renew / 20)
    return waits


async def test_who_acts_speaks_on_because_the_one_that_stands_by_looks_whether_the_api_answers() -> None:
    async with two_masters() as (acting, standby, answers):
        await asyncio.sleep(PACE.renew)
        answers.clear()
        assert max(await silences(acting, 3 * PACE.stale)) < 1.5 * PACE.renew
        assert not standby.term
        answers.set()
        assert max(await silences(acting, 2 * PACE.stale)) < PACE.renew


async def test_a_master_that_reaches_the_api_vouches_for_none_that_does_not() -> None:
    async with two_masters() as (acting, standby, _):
        assert not await standby.vouch(acting.term)


async def test_none_vouches_for_an_earlier_term() -> None:
    async with two_masters() as (acting, standby, answers):
        answers.clear()
        assert await standby.vouch(acting.term)
        assert not await standby.vouch(acting.term - 1)


async def test_a_master_whose_standby_does_not_vouch_for_it_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with two_masters() as (acting, standby, answers):

        async def no(term: int) -> bool:
            return False

        monkeypatch.setattr(standby, "vouch", no)
        answers.clear()
        with pytest.raises(TimeoutError):
            await silences(acting, 2 * PACE.stale)


async def test_a_master_that_restarts_in_its_pod_follows_its_earlier_process_at_once() -> None:
    async with two_masters() as (acting, _, _):
        restarted = election("a", "b", acting._api, acting._ask)
        await restarted.open()
        assert await restarted.take()
        assert restarted.term == acting.term + 1
