"""The adapter: `Create` and `Delete` become pods, what happens to pods becomes `Seen`, `Delayed`, `Gone`.

open      read the job's object, what the last master has left, and the pods that are there
settle    say which run this is: its living pods stay, all others are deleted
start     watch; from here on, events are emitted
close     stop watching. The pods stay: they are the release's, not this master's
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import structlog

from edl import config as config_module
from edl.contract.ids import RunId, WorkerId
from edl.contract.reasons import Reason
from edl.errors import ConfigError
from edl.kubernetes import overrides, pods
from edl.kubernetes.client import SOON, Api, ApiError
from edl.kubernetes.informer import Informer, Object
from master.backends.kubernetes.event_recorder import EventRecorder
from master.backends.kubernetes.labels import Labels
from master.backends.kubernetes.nodes import Nodes, elsewhere
from master.backends.kubernetes.pod_maker import Maker
from master.backends.kubernetes.pod_remover import Remover
from master.backends.kubernetes.pod_template import digest, stamp
from master.backends.kubernetes.release import Found, Left, Place, template_of, values_of
from master.backends.kubernetes.retry import patiently
from master.backends.kubernetes.status import Snapshot, Status
from master.backends.kubernetes.tasks import Tasks
from master.backends.kubernetes.workers import Worker, Workers
from master.core import events as ev

log = structlog.get_logger()


class Kubernetes:
    """The pods of one release.

    Args:
        place: where.
        api: the API, with its pace.
    """

    def __init__(self, place: Place, api: Api):
        self._place, self._api, self._pace = place, api, api.pace
        self._nodes = Nodes(api.pace.doubt, self._replace_the_outdated)
        self._workers = Workers(api.pace, self._nodes, self)
        self._mirror = Informer(
            api, place.path("pods"), {"labelSelector": pods.selector(place.release)}, self._pod_changed
        )
        self._job_mirror = Informer(
            api, place.path("configmaps"), {"fieldSelector": f"metadata.name={place.job}"}, self._job_changed
        )
        self._maker = Maker(api, place, self._workers, self._stamped, self._mirror.learn)
        self._remover = Remover(api, place)
        self._tasks = Tasks()
        self._take: Callable[[dict[str, Any]], None] = lambda _: None
        self._emit: Callable[[ev.Event], None] = lambda _: None
        self._left = Left()
        self._high, self._keep_seconds = 0, -1  # live values of our own
        self._own_values = asyncio.Event()  # set when they are other ones
        self._settled = self._stopping = False
        self._job: Callable[[], dict[str, Any]] = dict  # the job now, as `view.status` shows it
        self._run_values: dict[str, Any] = {}  # that the run began with
        self._scale_over = ""  # the id of the last `edl scale` that no longer holds
        self._status_path = place.path("configmaps", f"{place.fullname}-status")
        self.events = EventRecorder(api, place.namespace, self._owner, place.pod)
        self.status = Status(api, self._status_path, self._snapshot, self.events)
        self._labels = Labels(api, place, self._workers, lambda: self._job())

    # --- before the job

    async def open(self) -> Found:
        """Read what is there. Waits for an API that is out.

        Raises:
            ConfigError: the job's object is missing or cannot be read, or the account lacks a right.
        """
        await patiently(self._pace, self._job_mirror.list)
        if self._place.job not in self._job_mirror.objects:
            raise ConfigError(f"configmap {self._place.job}: not found in namespace {self._place.namespace}")
        status = await patiently(self._pace, lambda: self._api.get(self._status_path))
        await patiently(self._pace, self._mirror.list)
        self._left = Left.read(status.get("data") or {})
        self._scale_over = self._left.scale_over
        found = Found.of(self.values, self._left, self._mirror.objects.values(), self._owner()["uid"])
        self._workers.next_id = found.next_id
        return found

    def settle(
        self,
        run_id: RunId,
        emit: Callable[[ev.Event], None],
        take: Callable[[dict[str, Any]], None],
        status: Callable[[], dict[str, Any]],
    ) -> None:
        """Say which run this is. What is left of other runs is deleted when the backend starts.

        Args:
            emit: takes Seen, Delayed, Gone and, when the chart's object makes no sense, Refused.
            take: takes the job's values when they have changed.
            status: the job now, as `view.status` tells it.
        """
        self._emit, self._take = emit, take
        # A run keeps the values that it began with, whatever the chart says by now.
        earlier = self._left.values if run_id == self._left.run_id else None
        try:
            self._take_own(self.values)
        except ConfigError:  # a run that goes on takes none of them
            self._take_own(earlier or self.values)
        self._workers.begin(run_id, emit)
        self._job, self._run_values = status, earlier or self.values

    async def refuse(self, phase: str, why: str, changed: Callable[[], None]) -> None:
        """In place of `settle` and `start`: show why no run begins. `changed`: the chart's object has."""
        self._take = lambda _: changed()
        self._emit = lambda _: changed()
        self._settled = True
        self._tasks.keep(self._job_mirror.run())
        said = {"data": {"phase": phase, "reason": why}}
        await patiently(self._pace, lambda: self._api.patch(self._status_path, said, SOON))

    @property
    def values(self) -> dict[str, Any]:
        """The job's values, as the chart has last rendered them, and as somebody has scaled them since.

        Raises:
            ConfigError: they are no JSON object.
        """
        data = self._data()
        values, scale = values_of(self._place.job, data), overrides.Scale.read(data)
        if scale is None or scale.id == self._scale_over:
            return values
        if why := scale.over(values):
            self._scale_over = scale.id
            self.events.record(Reason.ScaleSuperseded, f"`edl scale {scale.workers}` no longer holds: {why}")
            return values
        return {**values, "workers": scale.workers}

    # --- the backend

    async def start(self) -> None:
        """Tell of the pods that are there, and watch from there on."""
        self._settled = True
        for pod in list(self._mirror.objects.values()):
            run, worker = pods.of(pod)
            if run == self._workers.run_id and worker is not None:
                self._workers.adopt(worker, pod)
            else:
                log.info(f"pod {pod['metadata']['name']} is of another run: deleting it")
                self.discard(pod)
        self._stop_if_asked()
        for task in (self._mirror.run(), self._job_mirror.run(), self.events.run(), self.status.run(),
                     self._labels.run()):  # fmt: skip
            self._tasks.keep(task)

    def clear_away(self) -> None:
        """The run had ended before: have its workers' pods deleted when their time to live is over."""
        self._tasks.keep(self._clear_away())

    def perform(self, effect: ev.Effect) -> None:
        """Make or delete a pod; show what is said."""
        match effect:
            case ev.Create(worker):
                w = self._workers.add(worker)
                self._tasks.keep(self._make(w))
            case ev.Fence(worker):
                self._workers.doubt(worker)
            case ev.Delete(worker, grace_period_seconds):
                self._remove(worker, grace_period_seconds)
            case ev.Notice(reason, text):
                self.events.record(reason, text)

    def observe(self, now: float, event: ev.Event, effects: list[ev.Effect]) -> None:
        """An observer of the master's loop: what people see may be another now."""
        self.status.changed()
        self.relabel()

    async def close(self) -> None:
        """Write the last status and go. Pods are left as they are."""
        await self._tasks.close()
        self._workers.close()
        self._nodes.close()
        try:
            async with asyncio.timeout(self._pace.outage * 3):
                await self.status.flush()  # which the next master reads, and Events nobody but people
                await self.events.flush()
        except (TimeoutError, ApiError) as error:
            log.warning(f"the last status could not be written: {error}")

    @property
    def api_up(self) -> bool:
        """The API answers."""
        return self._api.api_up

    def numbers(self) -> dict[str, Any]:
        """For the metrics: requests by (verb, resource, status), lists by reason, age of the last news."""
        return {
            "requests": dict(self._api.requests),
            "relists": dict(self._mirror.relists),
            "watch_age_seconds": self._mirror.age,
            "api_up": self.api_up,
        }

    def _snapshot(self) -> Snapshot | None:
        job = self._job()
        if not job:
            return None
        workers = self._workers
        return Snapshot(job, workers.run_id, self._run_values, workers.next_id, self._scale_over)

    # --- what the workers' fate calls for

    def discard(self, pod: pods.Pod) -> None:
        self._tasks.keep(self._remover.delete(pod))

    def note(self, reason: Reason, message: str) -> None:
        self.events.record(reason, message)

    def relabel(self) -> None:
        self._labels.changed()

    # --- pods

    async def _make(self, w: Worker) -> None:
        await self._maker.make(w)
        if w.unwanted and w.pod is not None and not w.over.is_set():
            w.asked = True
            await self._remover.delete(w.pod)

    def _remove(self, worker: WorkerId, grace: float) -> None:
        w = self._workers.get(worker)
        if w is None or w.over.is_set() or w.unwanted:
            return
        w.unwanted = True
        if w.making:
            self._workers.room.set()  # should it wait for room: it need not any more
        else:
            self._tasks.keep(self._remover.remove(w, grace))

    async def _clear_away(self) -> None:
        while True:
            self._own_values.clear()
            left = self._left.ended_at + self._keep_seconds - time.time()
            try:
                async with asyncio.timeout(None if self._keep_seconds < 0 else max(left, 0.0)):
                    await self._own_values.wait()
            except TimeoutError:
                break
        log.info(f"the run ended {self._keep_seconds:g} s ago: deleting what is left of its workers")
        for pod in list(self._mirror.objects.values()):
            await self._remover.delete(pod)

    def _stamped(self, w: Worker) -> dict[str, Any]:
        workers, place = self._workers, self._place
        highs = sum(o.high for o in workers if o is not w and not o.over.is_set())
        w.high = "worker-high.yaml" in self._data() and highs < self._high
        template = self._template(w)
        env = {"EDL_WORKER_ID": str(w.id), "EDL_RUN_ID": workers.run_id, "EDL_MASTER": place.address}
        return stamp(
            template, place.fullname, place.release, w.id, workers.run_id, self._owner(), env, w.high
        )

    def _template(self, w: Worker) -> pods.Pod:
        key = "worker-high.yaml" if w.high else "worker.yaml"
        return elsewhere(template_of(self._place.job, self._data(), key), self._nodes.avoided)

    def _replace_the_outdated(self) -> None:
        """What a pod waits for (an image, a node) may be there for another; by itself it would wait on."""
        for w in self._workers:
            if w.pod is None or w.seen or not w.why or w.unwanted or w.over.is_set():
                continue
            with suppress(ConfigError):  # the template is told to be wrong when a pod is to be made of it
                if (w.pod["metadata"].get("annotations") or {}).get(pods.TEMPLATE) != digest(
                    self._template(w)
                ):
                    w.disrupted = "it waited, and by now other pods are made"
                    w.unwanted = True
                    self._tasks.keep(self._remover.remove(w, 0.0))

    def _pod_changed(self, pod: Object, vanished: bool) -> None:
        if self._settled:
            self._workers.changed(pod, vanished)

    # --- the job's object

    def _data(self) -> Mapping[str, str]:
        return (self._job_mirror.objects.get(self._place.job) or {}).get("data") or {}

    def _owner(self) -> dict[str, str]:
        job = self._place.job
        meta = (self._job_mirror.objects.get(job) or {}).get("metadata", {})
        return {"apiVersion": "v1", "kind": "ConfigMap", "name": job, "uid": str(meta.get("uid", ""))}

    def _job_changed(self, thing: Object, vanished: bool) -> None:
        if not self._settled:
            return
        if vanished:
            log.warning(f"configmap {self._place.job} is gone: the release was uninstalled")
            return
        try:
            values = self.values
        except ConfigError as error:
            self._emit(ev.Refused(f"the new values are refused: {error}"))
            return
        self._take(values)
        with suppress(ConfigError):  # which whoever takes the values has told
            self._take_own(values)
        self._replace_the_outdated()
        self._maker.retry()  # the template may have been what was wrong
        self._stop_if_asked()

    def _stop_if_asked(self) -> None:
        if not self._stopping and self._data().get(overrides.STOP) == self._workers.run_id:
            self._stopping = True
            self._emit(ev.StopAsked("stopped by edl stop"))

    def _take_own(self, values: dict[str, Any]) -> None:
        """The live values that are the backend's own.

        Raises:
            ConfigError: the values are wrong.
        """
        config = config_module.parse(values)
        self._high = config.high_priority(config.workers)
        self._keep_seconds = config.ttl_seconds_after_finished
        self._own_values.set()
