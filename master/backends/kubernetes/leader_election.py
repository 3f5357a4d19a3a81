"""Which master acts: the one that has last written its name into the release's Lease.

A new master is started because Kubernetes, or a person, wants the old one gone: so it takes the
Lease at once, and the old one stands down as soon as it sees another name there.

The chart makes it; where charts' Leases are not applied (Argo CD leaves them out), or one was deleted, the
first master does.

Nobody renews it, and it does not expire. A master that has lost sight of the API goes on with the
workers that it reaches, for an outage must not stop training; so that a Lease was not renewed
would not mean that its holder has stopped. What can be had is this: without the API nobody makes
or deletes pods, and whoever comes back to it looks at the Lease before writing anything.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

import structlog

from edl.kubernetes.client import URGENT, Api, ApiError
from edl.kubernetes.informer import Informer, Object
from master.backends.kubernetes.release import Place, made_for

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


class LeaderElection:
    """One process's time as the master that acts. `lost` is set when another one has taken the Lease; from
    then on no write is made."""

    def __init__(self, api: Api, place: Place):
        self._api, self._place = api, place
        self._path = place.path("leases", place.names.lease, GROUP)
        self._mirror = Informer(
            api,
            place.path("leases", group=GROUP),
            {"fieldSelector": f"metadata.name={place.names.lease}"},
            self._changed,
        )
        self.holder = f"{place.pod or 'master'}_{secrets.token_hex(4)}"
        self.lost = asyncio.Event()

    async def take(self) -> None:
        """Be the one that acts.

        Raises:
            ApiError: the API refuses, or is out.
        """
        while True:
            lease = await self._found()
            spec = lease.get("spec") or {}
            now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
            mine = {
                "holderIdentity": self.holder, "acquireTime": now, "renewTime": now,
                "leaseTransitions": spec.get("leaseTransitions", 0) + 1,
            }  # fmt: skip
            version = {"resourceVersion": lease["metadata"]["resourceVersion"]}
            try:
                await self._api.patch(self._path, {"metadata": version, "spec": mine}, URGENT)
                break
            except ApiError as error:
                if error.status != 409:  # two masters at once: one after the other
                    raise
        if earlier := spec.get("holderIdentity"):
            log.info(f"this master ({self.holder}) takes over from {earlier}")
        self._api.vet = self._check

    async def _found(self) -> Object:
        """The Lease; made, if there is none."""
        while True:
            with suppress_status(404):
                return await self._api.get(self._path)
            with suppress_status(409):  # another master was quicker
                return await self._api.create(self._place.path("leases", group=GROUP), await self._new())

    async def _new(self) -> Object:
        """As the chart makes it, with the job's labels; and deleted with the job, which Helm does not do."""
        job = await self._api.get(self._place.path("configmaps", self._place.names.job))
        return {
            "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
            "metadata": made_for(job, self._place.names.lease),
        }  # fmt: skip

    async def watch(self) -> None:
        """Look out for another master, for ever."""
        await self._mirror.run()

    async def _check(self) -> None:
        """After an outage, before the first write: another master may have taken it since.

        Raises:
            Superseded: one has.
            ApiError: the API is out again.
        """
        if not self.lost.is_set():
            try:
                self._look(await self._api.get(self._path))
            except ApiError as error:
                if error.status != 404:  # who deletes the Lease does not take it
                    raise
        if self.lost.is_set():
            raise Superseded("write", 0, "", "superseded by another master")

    def _changed(self, lease: Object, vanished: bool) -> None:
        if not vanished:  # else the release was uninstalled
            self._look(lease)

    def _look(self, lease: Object) -> None:
        holder = (lease.get("spec") or {}).get("holderIdentity")
        if holder != self.holder and not self.lost.is_set():
            self.lost.set()
            self._api.doubt()
            log.warning(f"superseded by another master ({holder}); this one ({self.holder}) stands down")
