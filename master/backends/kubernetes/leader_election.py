# SPDX-License-Identifier: Apache-2.0
"""Leader election: the acting master is the holder of the release's Lease.

    start ──▶ stands by ──take──▶ acts ──release, or superseded──▶ sends and writes nothing more

A master takes the Lease in three cases. First, the Lease has no holder. Second, the holder's pod is gone, or
is being deleted and has had the time to release the Lease. Third, two independent observers have lost the
holder: it has not renewed the Lease for `stale`, and one of its workers has lost its connection to it.
Neither observation is enough alone. If only the API has lost the holder, the holder may still train with its
workers. If only a worker has lost it, the worker itself may be cut off.

While a different master could take the Lease, the holder renews it. The holder sends nothing to workers if
its last renewal is older than `fresh`. As `fresh` is less than `stale`, it is silent before a different
master can act. The clock also advances while a process or its machine is stopped, so a holder that resumes is
silent, too.

An outage of the API stops nothing. A single master does not renew the Lease. Otherwise the holder asks the
standbys to vouch for it. If the API is out for them as well, they promise not to take the Lease for `stale`,
which counts as a renewal.

The term of a holder is the number of times that the Lease has changed hands. Every order carries the term,
and a worker rejects orders of a smaller term than it has seen.

The chart creates the Lease. If it is missing, the first master creates it: Argo CD does not apply Leases of
charts, and a Lease can be deleted.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import structlog

from edl.kubernetes.client import URGENT, Api, ApiError
from edl.kubernetes.informer import Informer, Object
from edl.kubernetes.timing import Timing
from edl.master.backends.kubernetes.masters import Masters, Whereabouts
from edl.master.backends.kubernetes.release import Place, made_for

log = structlog.get_logger()

GROUP = "apis/coordination.k8s.io/v1"


@contextmanager
def suppress_status(status: int) -> Iterator[None]:
    """Suppress an ApiError with that status.

    Raises:
        ApiError: the error has a different status.
    """
    try:
        yield
    except ApiError as error:
        if error.status != status:
            raise


class Superseded(ApiError):
    """A different master acts, so this one must not write."""


@dataclass(frozen=True)
class Rival:
    """The holder of the Lease, as a standby sees it.

    Args:
        holder: its name; "" if the Lease has no holder.
        where: the state of its pod.
        leaving_for: seconds since its pod was first seen being deleted.
        silent_for: seconds without a renewal, while the API answered.
        lost_by: the workers that have lost the holder.
    """

    holder: str
    where: Whereabouts
    leaving_for: float = 0.0
    silent_for: float = 0.0
    lost_by: tuple[int, ...] = ()


def why_take(rival: Rival, pace: Timing) -> str:
    """Return why a standby should take the Lease now; empty if it should not."""
    if not rival.holder:
        return "no master acts"
    if rival.where is Whereabouts.GONE:
        return f"{rival.holder} is gone"
    if rival.where is Whereabouts.LEAVING and rival.leaving_for >= pace.handover:
        return f"{rival.holder} is being deleted"
    if rival.lost_by and rival.silent_for >= pace.stale:
        workers = ", ".join(map(str, rival.lost_by[:5])) + (", ..." if len(rival.lost_by) > 5 else "")
        silent = f"{rival.holder} has not renewed the Lease for {rival.silent_for:.1f} s"
        return f"{silent}, and was lost by worker {workers}"
    return ""


def awake() -> float:
    """Seconds of a clock that also advances while this process, or its machine, is stopped."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class LeaderElection:
    """One process's part in the election: it stands by first, and may then act.

    `lost` is set when a different master has taken the Lease; from then on this one sends and writes nothing.
    This class is the `Authority` of the job's server, and its clock is `awake`.

    Args:
        ask: asks the standby at host:port whether it vouches for the holder of that term.
    """

    def __init__(
        self,
        api: Api,
        place: Place,
        ask: Callable[[str, int], Awaitable[bool]],
        clock: Callable[[], float] = awake,
    ):
        self._api, self._place, self._ask, self._clock = api, place, ask, clock
        self._path = place.path("leases", place.names.lease, GROUP)
        self._informer = Informer(
            api,
            place.path("leases", group=GROUP),
            {"fieldSelector": f"metadata.name={place.names.lease}"},
            self._changed,
        )
        self.masters = Masters(api, place, self.wake)
        self.holder = f"{place.pod or 'master'}_{secrets.token_hex(4)}"
        self.term = 0  # 0: it stands by
        self.lost = asyncio.Event()
        self._news = asyncio.Event()
        self._seen: Object = {}  # the Lease
        self._seen_at = self._leaving_at = 0.0
        self._renewed = asyncio.Event()  # set, and replaced, at each renewal
        self._renewed_at = 0.0
        self._unanswered = False  # the last renewal
        self._vouched_at = -api.pace.stale  # when this standby last vouched for the holder
        self._taking = False
        self._outranked = 0  # the greatest term that a worker has reported

    # --- standing by

    def wake(self) -> None:
        """Check again, after a change, whether this master must act, or renew the Lease."""
        self._news.set()

    async def open(self) -> None:
        """Read the masters' pods and the Lease. Raises: ApiError."""
        await self.masters.read()
        self._see(await self._found())

    def due(self, lost: Callable[[int], list[int]]) -> str:
        """Return why this master should act now; empty if it should not.

        Args:
            lost: returns the workers that have lost the master of that term.
        """
        now, spec = self._clock(), self._seen.get("spec") or {}
        if not self._api.api_up:
            self._seen_at = now  # the holder could not renew the Lease, either
        holder = str(spec.get("holderIdentity") or "")
        if holder and now - self._vouched_at < self._api.pace.stale:
            return ""
        pod = holder.rpartition("_")[0]
        # The container was restarted in the same pod, so the holder was its previous process.
        where = Whereabouts.GONE if pod == self._place.pod else self.masters.whereabouts(pod)
        if where is not Whereabouts.LEAVING:
            self._leaving_at = now
        lost_by = tuple(lost(int(spec.get("leaseTransitions") or 0)))
        rival = Rival(holder, where, now - self._leaving_at, now - self._seen_at, lost_by)
        return why_take(rival, self._api.pace)

    async def vouch(self, term: int) -> bool:
        """Promise the holder of that term not to take the Lease for `stale`, while the API is out.

        The holder itself asks for this. False if this master reaches the API: it then takes over instead.
        """
        if not self._may_vouch(term) or (self._api.api_up and await self._api_answers()):
            return False
        if not self._may_vouch(term):  # it took the Lease meanwhile
            return False
        self._vouched_at = self._clock()
        return True

    def _may_vouch(self, term: int) -> bool:
        spec = self._seen.get("spec") or {}
        pod = str(spec.get("holderIdentity") or "").rpartition("_")[0]
        waits = not (self.term or self._taking) and term == spec.get("leaseTransitions")
        return waits and self.masters.whereabouts(pod) is Whereabouts.HERE

    async def _api_answers(self) -> bool:
        """Ask the API now: watches show an API that is frozen only after a minute."""
        try:
            async with asyncio.timeout(self._api.pace.renew / 2):
                await self._api.get(self._path)
        except (ApiError, TimeoutError):
            self._seen_at = self._clock()  # the holder could not renew the Lease, either
            return False
        return True

    async def stand_by(self, lost: Callable[[int], list[int]]) -> None:
        """Wait until this master acts.

        Raises:
            ApiError: the API refuses.
        """
        while not await self.take(lost):
            self._news.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._api.pace.renew / 2):
                    await self._news.wait()

    async def take(self, lost: Callable[[int], list[int]] = lambda _: []) -> bool:
        """Take the Lease if it is due; True if this master acts now.

        Raises:
            ApiError: the API refuses.
        """
        if not (why := self.due(lost)):
            return False
        self._taking = True
        try:
            if (self._seen.get("spec") or {}).get("holderIdentity"):
                await self.masters.read()  # the watch may lag behind
            self._see(await self._found())
            if not (why := self.due(lost)):
                return False
            began, now = self._clock(), _timestamp()
            term = int((self._seen.get("spec") or {}).get("leaseTransitions") or 0) + 1
            self._see(
                await self._write(
                    {
                        "holderIdentity": self.holder,
                        "acquireTime": now,
                        "renewTime": now,
                        "leaseTransitions": term,
                    }
                )
            )
        except ApiError as error:
            if error.status == 409:  # a different write came first: try again with the new Lease
                return await self.take(lost)
            if not error.out:
                raise
            return False
        finally:
            self._taking = False
        self.term, self._renewed_at = term, began
        log.info(f"this master ({self.holder}) acts, term {self.term}: {why}")
        self._api.vet = self._check
        return True

    # --- acting

    @property
    def standbys(self) -> tuple[str, ...]:
        """host:port of the masters that stand by."""
        return self.masters.standbys

    @property
    def fresh(self) -> bool:
        """True if no other master can be acting."""
        if self.lost.is_set():
            return False
        return not self.masters.others or self._clock() - self._renewed_at < self._api.pace.fresh

    async def confirmed(self) -> bool:
        """Wait until no other master can be acting; False if this master was superseded."""
        while not self.fresh and not self.lost.is_set():
            self.wake()
            await self._renewed.wait()
        return not self.lost.is_set()

    def outranked(self, term: int) -> None:
        """Check the Lease, because a worker has obeyed a master of a greater term.

        If the Lease still names this master, the Lease and its count were deleted. This master then continues
        to count from the greater term.
        """
        self._outranked = max(self._outranked, term)
        self.wake()

    async def watch(self) -> None:
        """Watch the Lease, for ever."""
        await self._informer.run()

    async def renew(self) -> None:
        """Renew the Lease while a different master could take it, for ever."""
        while not self.lost.is_set():
            if self.masters.others or self._outranked > self.term:
                answered = not self._unanswered
                await self._renew()
                if answered and self._unanswered:
                    continue  # ask the standbys at once, before the last renewal is too old
            self._news.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._api.pace.renew if self.masters.others else None):
                    await self._news.wait()

    async def _renew(self) -> None:
        began, pace = self._clock(), self._api.pace
        term = self.term if self._outranked <= self.term else self._outranked + 1
        spec = {"holderIdentity": self.holder, "renewTime": _timestamp(), "leaseTransitions": term}
        vouched = self._unanswered and await self._vouched_for()
        if vouched:
            self._renewed_at = began
            self._announce()
        try:
            async with asyncio.timeout(pace.renew if vouched else pace.fresh - pace.renew):
                began = self._clock()
                try:
                    self._see(await self._write(spec))
                except ApiError as error:
                    if error.status not in (404, 409):
                        raise
                    self._see(await self._found())  # a different master, or a person, has written the Lease
                    return
        except (ApiError, TimeoutError) as error:
            log.debug(f"the Lease is not renewed: {error}")
            self._unanswered = True
            return
        self._unanswered = False
        self.term, self._renewed_at = term, began
        self._announce()

    async def _vouched_for(self) -> bool:
        """Ask all other masters to vouch for this one; True if all do."""
        others, standbys = self.masters.others, self.masters.standbys
        if len(standbys) < len(others):
            return False
        asked = (self._ask(address, self.term) for address in standbys)
        return all(await asyncio.gather(*asked))

    async def release(self) -> None:
        """Release the Lease, so that a standby can take it at once.

        This process must not send or write anything after that.
        """
        if self.term and not self.lost.is_set():
            with suppress(ApiError, TimeoutError):
                async with asyncio.timeout(self._api.pace.handover):
                    await self._write({"holderIdentity": None})

    # --- the Lease

    async def _write(self, spec: dict[str, Any]) -> Object:
        """Change the Lease, unless it has changed since it was last seen.

        Raises:
            ApiError: 409 if it has changed; or any other error.
        """
        version = {"resourceVersion": self._seen["metadata"]["resourceVersion"]}
        return await self._api.patch(self._path, {"metadata": version, "spec": spec}, URGENT)

    async def _found(self) -> Object:
        """Read the Lease; create it if it is missing. Raises: ApiError."""
        while True:
            with suppress_status(404):
                return await self._api.get(self._path)
            with suppress_status(409):  # a different master was quicker
                return await self._api.create(self._place.path("leases", group=GROUP), await self._new())

    async def _new(self) -> Object:
        """Return a Lease like the chart's, with the job's labels and owned by the job's object.

        Kubernetes then deletes it with the job; Helm would not.
        """
        job = await self._api.get(self._place.path("configmaps", self._place.names.job))
        lease = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": made_for(job, self._place.names.lease),
        }
        # If the Lease was deleted while it was held, restore its holder, and its count: terms must be unique.
        return {**lease, "spec": spec} if (spec := self._seen.get("spec")) else lease

    async def _check(self) -> None:
        """Check the Lease before the first write after an outage, as a different master may have taken it.

        Raises:
            Superseded: a different master has taken it.
            ApiError: the API is out again.
        """
        if not self.lost.is_set():
            try:
                self._see(await self._api.get(self._path))
            except ApiError as error:
                if error.status != 404:  # a deleted Lease was not taken
                    raise
        if self.lost.is_set():
            raise Superseded("write", 0, "", "superseded by another master")

    def _changed(self, lease: Object, vanished: bool) -> None:
        if not vanished:  # else the release was uninstalled, or the Lease will be created again
            self._see(lease)

    def _see(self, lease: Object) -> None:
        known = self._seen.get("metadata", {})
        if lease["metadata"]["resourceVersion"] != known.get("resourceVersion"):
            if lease["metadata"].get("uid") == known.get("uid") and _version(lease) < _version(self._seen):
                return  # a late event of the watch, older than what this process has written
            self._seen, self._seen_at = lease, self._clock()
            if not self.term:
                self.wake()
        holder = (self._seen.get("spec") or {}).get("holderIdentity")
        if self.term and holder and holder != self.holder:
            self._supersede(f"another master ({holder})")

    def _supersede(self, other: str) -> None:
        if not self.lost.is_set():
            self.lost.set()
            self._announce()
            self._api.doubt()
            log.warning(f"superseded by {other}; this one ({self.holder}) stands down")

    def _announce(self) -> None:
        self._renewed.set()
        self._renewed = asyncio.Event()


def _version(lease: Object) -> int:
    """The resourceVersion as a number; Kubernetes guarantees since 1.35 that it can be compared."""
    text = str(lease["metadata"].get("resourceVersion", ""))
    return int(text) if text.isdecimal() else 0


def _timestamp() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
