# SPDX-License-Identifier: Apache-2.0
"""The adapter: `Create` and `Delete` become pods; changes of pods become events of `WorkerPods`.

`start` adopts the existing pods, deletes those of other runs, and watches from then on. `close` writes the
last status. The pods stay, because they belong to the release and not to this master.

All background work runs in `Tasks`. If a worker's task fails, that worker is `Gone`. If a shared task (a
watch, the status, labels) fails, it is `Degraded` and restarted.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import structlog

from edl.contract.ids import RunId, WorkerId
from edl.errors import ConfigError
from edl.kubernetes import overrides, pods
from edl.kubernetes.client import ApiError
from edl.master.backends.base import Tasks, format_error
from edl.master.backends.kubernetes.event_recorder import EventRecorder
from edl.master.backends.kubernetes.installed import Installed
from edl.master.backends.kubernetes.labels import Labels
from edl.master.backends.kubernetes.leader_election import Superseded
from edl.master.backends.kubernetes.nodes import Nodes
from edl.master.backends.kubernetes.pod_control import PodCreation, PodDeletion
from edl.master.backends.kubernetes.pod_reuse import PodReuse
from edl.master.backends.kubernetes.pod_template import Identity, digest, excluding, render
from edl.master.backends.kubernetes.pod_view import RUNNING, WAITING, WorkerPod
from edl.master.backends.kubernetes.status import Snapshot, Status
from edl.master.backends.kubernetes.worker_pods import WorkerPods
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core import facts
from edl.master.spec import JobSpec, Wanted

log = structlog.get_logger()

STATUS = "status"  # the part that is Degraded while its writes are refused


class Run(Protocol):
    """The run of these workers, as the backend sees it."""

    run_id: RunId

    @property
    def spec(self) -> JobSpec:
        """The values that the run was started with, and the live values that it has taken since."""

    def emit(self, event: ev.Event) -> None:
        """Process Seen, Delayed, Terminating, Gone, Degraded, CheckpointAsked and StopAsked."""

    def take(self, wanted: Wanted) -> None:
        """Process changed values of the release."""

    def status(self, now: float) -> dict[str, Any]:
        """The status of the job, as by `view.status`."""

    def summary(self) -> dict[str, Any]:
        """The summary of the job, which is kept after its end."""

    def past(self) -> facts.Past:
        """The history of the job, for the next master."""


class Kubernetes:
    """The pods of one run of a release.

    Args:
        installed: the release, opened a moment ago.
    """

    def __init__(self, installed: Installed, run: Run):
        self._installed, self._run = installed, run
        api, place = installed.api, installed.place
        self._api, self._place = api, place
        self._tasks = Tasks()
        self._stopping = False
        installed.note_template(run.spec)
        left = installed.left
        known = left.started_at if left.run_id == run.run_id else 0.0
        self._started_at = known or time.time()
        self._done: dict[str, str] = {}  # the id of the last processed request, by key
        self.events = EventRecorder(api, place.namespace, installed.owner, place.pod)
        degraded = partial(ev.Degraded, STATUS)
        self.status = Status(
            api, place, installed.metadata, self._snapshot, lambda why: run.emit(degraded(why))
        )
        self._nodes = Nodes(api.pace.doubt, self._replace_the_outdated)
        self._creation = PodCreation(api, place, self._blocked)
        self._deletion = PodDeletion(api, place, self._tasks, run.emit)
        self._workers = WorkerPods(
            run.run_id,
            run.emit,
            installed.found.next_id,
            api.pace,
            self._nodes,
            self._creation,
            self._deletion,
            self.events,
        )
        self._pod_reuse = PodReuse(api, place, self._workers, run.spec.config.elastic.prefork)
        self._labels = Labels(api, place, self._workers, self._now)

    # --- the backend

    async def start(self) -> None:
        """Adopt the existing pods, and watch from then on."""
        for pod in self._installed.workers:
            run, worker = pods.of(pod)
            if run == self._workers.run_id and worker is not None:
                self._workers.adopt(worker, pod)
            else:
                log.info(f"pod {pod['metadata']['name']} is of another run: deleting it")
                self._deletion.discard(pod)
        self._installed.on_pod.append(self._workers.changed)
        self._installed.on_job.append(self._job_changed)
        self._tell_notices()
        self._do_what_is_asked()
        pause = self._api.pace.status
        for part, work in {
            "watching pods": self._installed.pods.run,
            "watching the release": self._installed.job.run,
            "events": self.events.run,
            STATUS: self.status.run,
            "labels": self._labels.run,
        }.items():
            self._tasks.keep(part, work, self._run.emit, pause)

    def perform(self, effect: ef.ForBackend) -> None:
        """Create or delete a pod; record notices as Events."""
        match effect:
            case ef.Create(worker):
                w = self._workers.add(worker)
                self._tasks.start(self._create(w), partial(self._failed, w))
            case ef.Fence(worker):
                self._workers.doubt(worker)
            case ef.Delete(worker, grace_period_seconds, patience_seconds):
                self._remove(worker, grace_period_seconds, patience_seconds)
            case ef.Notice(reason, text):
                self.events.record(reason, text)

    async def replace_in_place(self, ended: ev.Gone) -> WorkerId | None:
        """Start the next worker in the pod of a crashed one, if a worker is needed."""
        return await self._pod_reuse.offer(ended)

    def observe(self, now: float, event: ev.Event, effects: list[ef.Effect]) -> None:
        """Observe the master's loop, and update status and labels."""
        if any(isinstance(effect, ef.End) for effect in effects):
            self.status.end(self._run.summary())
        self.status.changed()
        self._labels.changed()

    async def close(self) -> None:
        """Write the last status and the pending Events. The pods stay."""
        await self._tasks.close()
        self._workers.close()
        self._nodes.close()
        try:
            async with asyncio.timeout(self._api.pace.outage * 3):
                await self.status.flush()  # first: the next master reads the status, but not the Events
                await self.events.flush()
        except Superseded:
            return  # logged when it was detected; the other master writes the status now
        except (TimeoutError, ApiError) as error:
            log.warning(f"the last status could not be written: {error}")

    def numbers(self) -> dict[str, Any]:
        """Numbers for the metrics."""
        return self._installed.numbers()

    # --- pods

    async def _create(self, w: WorkerPod) -> None:
        if not await self._pod_reuse.take(w):
            await self._workers.create(w, partial(self._rendered, w), self._installed)
        if w.unwanted and w.pod is not None and not w.ended:
            w.delete_requested = True
            await self._deletion.delete(w.pod)

    def _failed(self, w: WorkerPod, error: Exception) -> None:
        """End a worker whose task failed by an internal error."""
        w.creating = False
        if not w.ended:
            if w.pod is not None:
                self._deletion.discard(w.pod)
            self._workers.end(w, ev.Gone(w.id, why=f"internal error: {format_error(error)}"))

    def _blocked(self, why: str) -> None:
        self._workers.blocked(why)

    def _remove(self, worker: WorkerId, grace: float, patience: float = 0.0) -> None:
        w = self._workers.get(worker)
        if w is None or w.ended or w.unwanted:
            return
        w.unwanted = True
        if w.creating:
            self._creation.look_again()  # its creation may wait for room, and can be given up
        else:
            patience = max(patience, self._api.pace.mercy)
            self._tasks.start(self._delete(w, grace, patience), partial(self._failed, w))

    async def _delete(self, w: WorkerPod, grace: float, patience: float) -> None:
        """Delete a worker's pod, unless it ends by itself soon.

        The stream of a crashed worker ends before its pod. A pod that ends by itself keeps its log and its
        exit code; deletion removes them.
        """
        if w.state is RUNNING and not w.disrupted:
            with suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    await w.end.wait()
        if not w.ended:
            assert w.pod is not None
            w.delete_requested = True
            await self._deletion.delete(w.pod, grace)

    def _rendered(self, w: WorkerPod) -> pods.Pod:
        """Render the worker's pod from the present template and values."""
        place, workers = self._place, self._workers
        highs = sum(o.high for o in workers if o is not w and not o.ended)
        config = self._run.spec.config
        most = config.on_demand(config.workers)
        w.high = self._installed.has_priorities and highs < most
        identity = Identity(
            place.names,
            place.release,
            workers.run_id,
            place.address,
            self._installed.owner(),
            config.own_loop,
            config.local.threads,
        )
        return render(self._template(w), identity, w.id, w.high)

    def _template(self, w: WorkerPod) -> pods.Pod:
        return excluding(self._installed.template(w.high, self._run.spec), self._nodes.avoided)

    def _replace_the_outdated(self) -> None:
        """Replace pending pods whose template has changed, as the new template may fix what they wait for."""
        for w in self._workers:
            if w.pod is None or w.state is not WAITING or not w.why or w.unwanted:
                continue
            with suppress(ConfigError):  # an invalid template is reported when a pod is made of it
                made_from = (w.pod["metadata"].get("annotations") or {}).get(pods.TEMPLATE)
                if made_from != digest(self._template(w)):
                    w.disrupted = "it was pending, and its pod was outdated"
                    self._remove(w.id, 0.0)

    # --- the job's object

    def _job_changed(self) -> None:
        wanted = self._installed.wanted()
        self._tell_notices()
        self._run.take(wanted)
        self._installed.note_template(self._run.spec)
        self._replace_the_outdated()
        self._creation.retry()  # the old template may have caused a refusal
        self._do_what_is_asked()

    def _tell_notices(self) -> None:
        while self._installed.notices:
            self.events.record(*self._installed.notices.pop(0))

    def _do_what_is_asked(self) -> None:
        data = self._installed.data
        for key in (overrides.CHECKPOINT, overrides.FAREWELL):
            asked = overrides.Asked.read(data, key)
            if asked is None or asked.run != self._workers.run_id or self._done.get(key) == asked.id:
                continue
            self._done[key] = asked.id
            if key == overrides.CHECKPOINT:
                self._run.emit(ev.CheckpointAsked())
            else:
                self._run.emit(ev.StopAsked("stopped by edl stop", True, asked.force, asked.id))
        if not self._stopping and data.get(overrides.STOP) == self._workers.run_id:
            self._stopping = True
            self._run.emit(ev.StopAsked("stopped by edl stop"))

    def _snapshot(self) -> Snapshot | None:
        job, run = self._now(), self._run
        if not job:
            return None
        return Snapshot(
            job,
            run.run_id,
            run.spec.values,
            self._workers.next_id,
            self._installed.scale_over,
            self._started_at,
            run.spec.config.run_id,
            run.past(),
        )

    def _now(self) -> dict[str, Any]:
        return self._run.status(asyncio.get_running_loop().time())
