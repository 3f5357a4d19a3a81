# SPDX-License-Identifier: Apache-2.0
"""Faults of `edl chaos` for the pods of a release: deletion without a grace period, and eviction."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from edl.cli.release.status import FoundRelease
from edl.cli.shared.storm import Fault, Kind
from edl.kubernetes import pods
from edl.kubernetes.client import Api, ApiError


class PodFaults:
    """Inflicts faults on the pods of a release, in its own namespace.

    A container cannot be paused through the API of Kubernetes, so there is no `stop`.
    """

    kinds: tuple[Kind, ...] = (Kind.kill, Kind.term, Kind.server)

    def __init__(self, loop: asyncio.Runner, api: Api, found: FoundRelease):
        self._loop, self._api, self._found = loop, api, found

    def inflict(self, fault: Fault, victim: Mapping[str, Any]) -> bool:
        """Delete the pod without a grace period, or evict it (`term`). False: it is already gone.

        Raises:
            ApiError: the API refuses, or does not answer.
        """
        return self._loop.run(self._inflict(fault, victim))

    async def _inflict(self, fault: Fault, victim: Mapping[str, Any]) -> bool:
        names, namespace = self._found.names, self._found.namespace
        of_a_server = fault.kind is Kind.server
        name = f"{names.servers}-{victim['index']}" if of_a_server else str(victim["handle"])
        path = f"/api/v1/namespaces/{namespace}/pods"
        component = "ps" if of_a_server else "worker"
        # The name is from a status. Only pods with the labels of this release are hit.
        listed = await self._api.get(path, labelSelector=self._found.selector(component))
        found = [pod for pod in listed["items"] if pod["metadata"]["name"] == name]
        if not found or pods.deleting(found[0]):
            return False
        try:
            if fault.kind is Kind.term:
                meta = {"name": name, "namespace": namespace}
                eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": meta}
                await self._api.create(f"{path}/{name}/eviction", eviction)
            else:
                only = {"uid": pods.uid(found[0])}
                await self._api.delete(f"{path}/{name}", {"gracePeriodSeconds": 0, "preconditions": only})
        except ApiError as error:
            if error.status not in (404, 409):  # it is gone, or a new pod has its name
                raise
            return False
        return True
