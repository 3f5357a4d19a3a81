# SPDX-License-Identifier: Apache-2.0
"""The trained model of a release, read from its output volume; `release_audit` reads its digests there.

Without an output volume, the model is on the volume of the master, and is read in the master's pod.
The worker that wrote the model has ended, and the master does not mount the volume. So a pod is created that
does: the chart's worker pod, reduced to this volume (read-only) and `sleep`. The files are read with `cat` in
this pod, through the API server, as in `kubectl cp`. The pod is deleted afterwards. If this command is killed
before, the pod ends by itself, and is deleted with the release.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from edl.cli.release.status import LOST, FoundRelease
from edl.cli.shared import received
from edl.contract import artifacts
from edl.errors import EdlError
from edl.kubernetes import pods
from edl.kubernetes.client import Api, ApiError
from edl.kubernetes.informer import Object, changes

MOUNTED = "/var/lib/edl"  # the same path as in the worker's pod
OUTPUT = PurePosixPath("/var/lib/edl")  # the output directory of the chart's master
MASTER = "master"  # its container
COMPONENT = "model"
LIFE_SECONDS = 3600  # longest life of the pod
START_SECONDS = 180.0  # for the pod to start
KEPT = (  # fields of the worker's pod that are needed for admission, and for a node that can mount the volume
    "affinity",
    "imagePullSecrets",
    "nodeSelector",
    "runtimeClassName",
    "schedulerName",
    "securityContext",
    "serviceAccountName",
    "tolerations",
)
RESOURCES = {"requests": {"cpu": "50m", "memory": "32Mi"}, "limits": {"memory": "128Mi"}}


async def fetch(api: Api, found: FoundRelease, name: str, target: Path) -> str:
    """Copy the model that was exported in this format; return the outcome as text.

    Raises:
        EdlError: there is nothing to copy, the pod does not run, or the copy differs from what was written.
        ApiError: the API refuses, or does not answer.
    """
    where = f"release {found.release}"
    if not found.model:
        raise EdlError(f"{where}: {LOST.format('was' if found.ended else 'will be')}")
    received.refuse_script(str(found.values.get("model", {}).get("script", "")), where)
    if not found.ended:
        raise EdlError(f"{where}: the job has not ended: {found.phase}, {found.reason}")
    if found.model_file.startswith("/"):
        raise EdlError(f"{where}: the model is at {found.model_file}, where it was kept instead")
    async with mounted(api, found) as (volume, directory):
        files = received.listed(await volume.whole(directory / artifacts.EXPORTS), name, where)
        with received.receiving(target) as made:
            for file, about in files.items():
                with made.file(file, about) as write:
                    await volume.run(["cat", str(directory / file)], write)
    return made.outcome


@asynccontextmanager
async def mounted(api: Api, found: FoundRelease) -> AsyncIterator[tuple[Reading, PurePosixPath]]:
    """Create a pod with the output volume; yield access to it, and the directory of the run's model.

    If the master keeps the results on its own volume, they are read in its pod.

    Raises:
        EdlError: the pod does not run.
    """
    path = f"/api/v1/namespaces/{found.namespace}/pods"
    if found.stores:
        listed = await api.get(path, labelSelector=found.selector(MASTER))
        master = acting(listed["items"], f"release {found.release}")
        volume = Reading(api, f"{path}/{master}/exec", MASTER, "the master's volume")
        yield volume, PurePosixPath(OUTPUT, found.folder, found.model_file).parent
        return
    pod = reader(found)
    own = pod["metadata"]["name"]
    await api.create(path, pod)
    try:
        await _running(api, path, own)
        directory = PurePosixPath(MOUNTED, found.model_file).parent  # later runs have their own
        yield Reading(api, f"{path}/{own}/exec", COMPONENT, "the output volume"), directory
    finally:
        # No grace period: `sleep` does not end on SIGTERM.
        await api.delete(f"{path}/{own}", {"gracePeriodSeconds": 0})


def acting(masters: Sequence[Object], where: str) -> str:
    """The pod of the master that has the journal.

    Raises:
        EdlError: no master runs.
    """
    running = [p for p in masters if pods.running(p, MASTER) and not pods.deleting(p)]
    leading = [p for p in running if pods.ACTING in p["metadata"].get("labels", {})] or running
    if not leading:
        raise EdlError(f"{where}: no master runs, and its pod has the journal; `edl status` says why")
    return str(leading[0]["metadata"]["name"])


def reader(found: FoundRelease) -> Object:
    """The manifest of a pod with the release's output volume.

    Raises:
        EdlError: the worker's pod in the job's ConfigMap cannot be read.
    """
    try:
        worker = yaml.safe_load(found.job["data"]["worker.yaml"])
        spec: dict[str, Any] = worker["spec"]
        container = next(c for c in spec["containers"] if c["name"] == pods.CONTAINER)
        (volume,) = (v for v in spec["volumes"] if v["name"] == "output")
    except (yaml.YAMLError, KeyError, TypeError, ValueError, StopIteration) as error:
        raise EdlError(f"configmap {found.names.job}: cannot read worker.yaml") from error
    meta = found.job["metadata"]
    labels = {pods.PART_OF: "edl", pods.INSTANCE: found.release, pods.COMPONENT: COMPONENT}
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": meta["name"], "uid": meta["uid"]}
    kept = {
        key: container[key] for key in ("image", "imagePullPolicy", "securityContext") if key in container
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{found.names.fullname}-model-{secrets.token_hex(3)}",
            "labels": labels,
            "ownerReferences": [owner],
        },
        "spec": {
            **{key: spec[key] for key in KEPT if key in spec},
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "restartPolicy": "Never",
            "activeDeadlineSeconds": LIFE_SECONDS,
            "terminationGracePeriodSeconds": 1,
            "containers": [
                {
                    **kept,
                    "name": COMPONENT,
                    "command": ["sleep", str(LIFE_SECONDS)],
                    "resources": RESOURCES,
                    "volumeMounts": [{"name": "output", "mountPath": MOUNTED, "readOnly": True}],
                }
            ],
            "volumes": [volume],
        },
    }


async def _running(api: Api, path: str, name: str) -> None:
    """Wait until the pod runs.

    Raises:
        EdlError: the pod does not run in time, or has ended.
    """
    pod: Object = {}
    try:
        async with (
            asyncio.timeout(START_SECONDS),
            aclosing(changes(api, path, {"fieldSelector": f"metadata.name={name}"})) as changed,
        ):
            while not pods.running(pod, COMPONENT):
                pod, gone = await anext(changed)
                if gone or pods.ended(pod):
                    raise EdlError(f"pod {name}, which reads the model, has ended: {pods.phase(pod)}")
    except TimeoutError:
        why = pods.delay(pod) or "it is starting"
        raise EdlError(
            f"pod {name}, which reads the model, does not run after {START_SECONDS:g} s: {why}"
        ) from None


class Reading:
    """Access to files in a container.

    Args:
        path: API path of the pod, with /exec.
        what: name of the source in errors.
    """

    def __init__(self, api: Api, path: str, container: str, what: str):
        self._api, self._path, self._container, self._what = api, path, container, what

    async def whole(self, file: PurePosixPath) -> bytes:
        """Read a small file whole.

        Raises:
            EdlError: the file cannot be read.
        """
        found: list[bytes] = []
        await self.run(["cat", str(file)], found.append)
        return b"".join(found)

    async def run(self, command: Sequence[str], take: Callable[[bytes], object]) -> None:
        """Run a command, and call `take` with pieces of its output.

        Raises:
            EdlError: the command failed.
            ApiError: the API did not run the command, or the connection to it broke.
        """
        try:
            await self._api.run(self._path, command, self._container, take)
        except ApiError as error:
            if error.reason != "NonZeroExitCode":
                raise
            raise EdlError(f"{self._what} cannot be read: {error.message}") from error
