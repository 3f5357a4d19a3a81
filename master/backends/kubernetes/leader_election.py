"""Which master acts: the one that has last written its name into the release's Lease.

    start ──▶ stands by ──take──▶ acts ──release, or superseded──▶ says and writes nothing more

A master takes the Lease when nobody has it; when its holder is gone, or is being deleted and has had the time
to give it back; and when the holder seems lost to two who cannot both be mistaken: it has not renewed the
Lease for `stale`, and a worker that it had has lost it. The API alone would not do (it may be that only the
holder is cut off from it, and trains on), nor a worker alone (it may be the one that is cut off).

While another master is there that could take the Lease, its holder renews it, and says nothing to a worker
when its last renewal is older than `fresh`, which is less than `stale`: before another one can act, this one
is silent. The clock goes on while a process or its machine is stopped, so one that wakes up is silent, too.

An outage of the API stops nothing. Where no other master is there, nobody renews. Where others are, and the
API is out for them, too, they vouch for the holder when it asks them itself: not to take the Lease for
`stale` counts as much as a renewal.

How often the Lease has changed hands is the term of its holder: every order carries it, and a worker that has
seen a greater one obeys it no more.

The chart makes the Lease; where charts' Leases are not applied (Argo CD leaves them out), or one was deleted,
the first master does.
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
    """Go on after a refusal with that status."""
    try:
        yield
    except ApiError as error:
        if error.status != status:
            raise


class Superseded(ApiError):
    """Another master acts: what this one would write is the other's to write."""


@dataclass(frozen=True)
class Rival:
    """The holder of the Lease, as one sees it that stands by.

    Args:
        holder: its name; "" if nobody has the Lease.
        where: its pod.
        leaving_for: seconds since its pod was seen to be deleted.
        silent_for: seconds without a renewal, while the API answered.
        lost_by: the workers that have lost it.
    """

    holder: str
    where: Whereabouts
    leaving_for: float = 0.0
    silent_for: float = 0.0
    lost_by: tuple[int, ...] = ()


def why_take(rival: Rival, pace: Timing) -> str:
    """Why the Lease is to be taken now; empty: it is not."""
    if not rival.holder:
        return "no master acts"
    if rival.where is Whereabouts.GONE:
        return f"{rival.holder} is gone"
    if rival.where is Whereabouts.LEAVING and rival.leaving_for >= pace.handover:
        return f"{rival.holder} is being deleted"
    if rival.lost_by and rival.silent_for >= pace.stale:
        who = ", ".join(map(str, rival.lost_by[:5])) + (", ..." if len(rival.lost_by) > 5 else "")
        silent = f"{rival.holder} has not renewed the Lease for {rival.silent_for:.1f} s"
        return f"{silent}, and was lost by worker {who}"
    return ""


def awake() -> float:
    """Seconds that go on while this process, or its machine, is stopped."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class LeaderElection:
    """One process's time as the master that stands by, and then as the one that acts. `lost` is set when
    another one has taken the Lease; from then on nothing is written and nothing said.

    It is the `Authority` of the job's server, and its clock is `awake`.

    Args:
        ask: whether the master that stands by at host:port vouches for the holder of that term.
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
        self._vouched_at = -api.pace.stale  # for the holder
        self._taking = False
        self._outranked = 0  # the greatest term that a worker has told of

    # --- standing by

    def wake(self) -> None:
        """Something has changed: look anew whether this master is to act, or to renew."""
        self._news.set()

    async def open(self) -> None:
        """Read who acts. Raises: ApiError."""
        await self.masters.read()
        self._see(await self._found())

    def due(self, lost: Callable[[int], list[int]]) -> str:
        """Why this master is to act now; empty: it is not.

        Args:
            lost: the workers that have lost the master of that term.
        """
        now, spec = self._clock(), self._seen.get("spec") or {}
        if not self._api.api_up:
            self._seen_at = now  # the holder could not renew it, either
        holder = str(spec.get("holderIdentity") or "")
        if holder and now - self._vouched_at < self._api.pace.stale:
            return ""
        pod = holder.rpartition("_")[0]
        # A container that was started again in its pod follows the one before it.
        where = Whereabouts.GONE if pod == self._place.pod else self.masters.whereabouts(pod)
        if where is not Whereabouts.LEAVING:
            self._leaving_at = now
        lost_by = tuple(lost(int(spec.get("leaseTransitions") or 0)))
        rival = Rival(holder, where, now - self._leaving_at, now - self._seen_at, lost_by)
        return why_take(rival, self._api.pace)

    def vouch(self, term: int) -> bool:
        """The holder of that term asks, itself, to go on while the API is out: whether this one leaves it
        alone for `stale`. If only the holder has no API, one that has takes over instead."""
        spec = self._seen.get("spec") or {}
        pod = str(spec.get("holderIdentity") or "").rpartition("_")[0]
        yes = not (self.term or self._taking or self._api.api_up) and term == spec.get("leaseTransitions")
        if not yes or self.masters.whereabouts(pod) is not Whereabouts.HERE:
            return False
        self._vouched_at = self._clock()
        return True

    async def stand_by(self, lost: Callable[[int], list[int]]) -> None:
        """Until this master acts.

        Raises:
            ApiError: the API refuses.
        """
        while not await self.take(lost):
            self._news.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._api.pace.renew / 2):
                    await self._news.wait()

    async def take(self, lost: Callable[[int], list[int]] = lambda _: []) -> bool:
        """Act, if it is time.

        Raises:
            ApiError: the API refuses.
        """
        if not (why := self.due(lost)):
            return False
        self._taking = True
        try:
            if (self._seen.get("spec") or {}).get("holderIdentity"):
                await self.masters.read()  # a watch may not have told yet who came or went
            self._see(await self._found())
            if not (why := self.due(lost)):
                return False
            began, now = self._clock(), _timestamp()
            term = int((self._seen.get("spec") or {}).get("leaseTransitions") or 0) + 1
            self._see(
                await self._write({
                    "holderIdentity": self.holder, "acquireTime": now, "renewTime": now,
                    "leaseTransitions": term,
                })
            )  # fmt: skip
        except ApiError as error:
            if error.status == 409:  # two at once: one after the other
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
        """No other master can be acting."""
        if self.lost.is_set():
            return False
        return not self.masters.others or self._clock() - self._renewed_at < self._api.pace.fresh

    async def confirmed(self) -> bool:
        """Wait until no other master can be acting; False: another one does, for good."""
        while not self.fresh and not self.lost.is_set():
            self.wake()
            await self._renewed.wait()
        return not self.lost.is_set()

    def outranked(self, term: int) -> None:
        """A worker has obeyed a master of a greater term: look into the Lease. If it names this one all the
        same, it was deleted, and the count with it: this master goes on counting from there."""
        self._outranked = max(self._outranked, term)
        self.wake()

    async def watch(self) -> None:
        """Look out for changes of the Lease, for ever."""
        await self._informer.run()

    async def renew(self) -> None:
        """Renew the Lease for as long as another master could take it, for ever."""
        while not self.lost.is_set():
            if self.masters.others or self._outranked > self.term:
                await self._renew()
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
            async with asyncio.timeout(pace.renew if vouched else pace.fresh):
                began = self._clock()
                try:
                    self._see(await self._write(spec))
                except ApiError as error:
                    if error.status not in (404, 409):
                        raise
                    self._see(await self._found())  # somebody else wrote it: a master, or a person
                    return
        except (ApiError, TimeoutError) as error:
            log.debug(f"the Lease is not renewed: {error}")
            self._unanswered = True
            return
        self._unanswered = False
        self.term, self._renewed_at = term, began
        self._announce()

    async def _vouched_for(self) -> bool:
        """All who could take the Lease leave it to this master."""
        others, standbys = self.masters.others, self.masters.standbys
        if len(standbys) < len(others):
            return False
        asked = (self._ask(address, self.term) for address in standbys)
        return all(await asyncio.gather(*asked))

    async def release(self) -> None:
        """Give the Lease back, for who stands by to take at once. This process has said and written its
        last."""
        if self.term and not self.lost.is_set():
            with suppress(ApiError, TimeoutError):
                async with asyncio.timeout(self._api.pace.handover):
                    await self._write({"holderIdentity": None})

    # --- the Lease

    async def _write(self, spec: dict[str, Any]) -> Object:
        """Change the Lease, unless somebody else has since it was seen.

        Raises:
            ApiError: 409, somebody has; or whatever else.
        """
        version = {"resourceVersion": self._seen["metadata"]["resourceVersion"]}
        return await self._api.patch(self._path, {"metadata": version, "spec": spec}, URGENT)

    async def _found(self) -> Object:
        """The Lease; made, if there is none. Raises: ApiError."""
        while True:
            with suppress_status(404):
                return await self._api.get(self._path)
            with suppress_status(409):  # another master was quicker
                return await self._api.create(self._place.path("leases", group=GROUP), await self._new())

    async def _new(self) -> Object:
        """As the chart makes it, with the job's labels; and deleted with the job, which Helm does not do."""
        job = await self._api.get(self._place.path("configmaps", self._place.names.job))
        lease = {
            "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
            "metadata": made_for(job, self._place.names.lease),
        }  # fmt: skip
        # It was deleted under its holder: nobody is to take it for free, and no term to come twice.
        return {**lease, "spec": spec} if (spec := self._seen.get("spec")) else lease

    async def _check(self) -> None:
        """After an outage, before the first write: another master may have taken it since.

        Raises:
            Superseded: one has.
            ApiError: the API is out again.
        """
        if not self.lost.is_set():
            try:
                self._see(await self._api.get(self._path))
            except ApiError as error:
                if error.status != 404:  # who deletes the Lease does not take it
                    raise
        if self.lost.is_set():
            raise Superseded("write", 0, "", "superseded by another master")

    def _changed(self, lease: Object, vanished: bool) -> None:
        if not vanished:  # else the release was uninstalled, or it is made again
            self._see(lease)

    def _see(self, lease: Object) -> None:
        known = self._seen.get("metadata", {})
        if lease["metadata"]["resourceVersion"] != known.get("resourceVersion"):
            if lease["metadata"].get("uid") == known.get("uid") and _version(lease) < _version(self._seen):
                return  # the watch tells late of what this process has written meanwhile
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
    """Kubernetes calls it opaque, but since 1.35 also promises that it can be compared."""
    text = str(lease["metadata"].get("resourceVersion", ""))
    return int(text) if text.isdecimal() else 0


def _timestamp() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
