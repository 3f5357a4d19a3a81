"""The adapter: `Create` and `Delete` become pods, what happens to pods becomes `Seen`, `Delayed`, `Gone`.

    open      read the job's object, what the last master has left, and the pods that are there
    settle    say which run this is: its living pods stay, all others are deleted
    start     watch; from here on, events are emitted
    close     stop watching. The pods stay: they are the release's, not this master's

A pod is ours by its UID. Its name tells the worker, and as ids are never reused, no two pods of a
run ever have one name; where another one has, it is not touched, and the worker is given up.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import structlog
import yaml

from edl import config as config_module
from edl.errors import ConfigError
from edl.ids import RunId, WorkerId
from edl.kubernetes.api import SOON, Api, ApiError, Backoff
from edl.kubernetes.watch import Mirror, Object
from master.adapters.kubernetes import pods, show
from master.core import events as ev

log = structlog.get_logger()

KEPT = 20  # pods of ended workers that stay for `kubectl logs`; more would only fill the list


@dataclass(frozen=True)
class Place:
    """Where in Kubernetes this master is: what the chart tells it by its environment."""

    namespace: str
    release: str
    fullname: str  # what the names of all the release's objects begin with
    address: str  # host:port of the master, as workers reach it
    pod: str = ""  # the master's own
    pod_uid: str = ""

    @classmethod
    def from_environment(cls) -> Place:
        """As EDL_NAMESPACE, EDL_RELEASE, EDL_FULLNAME, EDL_MASTER_ADDRESS, POD_NAME and POD_UID say.

        Raises:
            ConfigError: one of the first four is missing.
        """
        names = ("EDL_NAMESPACE", "EDL_RELEASE", "EDL_FULLNAME", "EDL_MASTER_ADDRESS")
        if missing := [n for n in names if not os.environ.get(n)]:
            raise ConfigError(
                f"{', '.join(missing)}: not in the environment; the chart sets it in the master's pod"
            )
        namespace, release, fullname, address = (os.environ[n] for n in names)
        own = os.environ.get("POD_NAME", ""), os.environ.get("POD_UID", "")
        return cls(namespace, release, fullname, address, *own)


@dataclass(frozen=True)
class Found:
    """What is there when a master starts.

    Args:
        values: the job's values as the chart has rendered them.
        source: the model, if it comes as one file (model.py).
        run_id: of the run that an earlier master has left, None if there is none.
        earlier: the values with which that run was started; None if unknown.
        born: how many workers there have been; also the next id. Counts pods of other runs too: no name
            is used twice.
        workers: of that run, whose pods have not ended: id and pod name, "" for one that does not run yet.
        ended: the phase in which that run has ended, "" if it has not.
    """

    values: dict[str, Any]
    source: str
    run_id: RunId | None
    earlier: dict[str, Any] | None
    born: int
    workers: tuple[tuple[WorkerId, str], ...]
    ended: str

    @property
    def adopted(self) -> ev.Adopted:
        return ev.Adopted(self.workers, self.born)


@dataclass
class _Worker:
    """One worker and its pod."""

    id: WorkerId
    uid: str = ""  # unknown until the pod is made
    pod: Object | None = None
    high: bool = False
    making: bool = False  # a create is under way
    unwanted: bool = False  # to be deleted
    asked: bool = False  # its deletion has been asked for
    seen: bool = False
    why: str = ""  # it does not run yet
    disrupted: str = ""  # why Kubernetes takes it away
    overdue: asyncio.TimerHandle | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)  # `Gone` is said
    labels: tuple[str, str] = ("", "starting")  # rank and state, as last written


class Kubernetes:
    """The pods of one release.

    Args:
        place: where.
        api: the API, with its pace.
    """

    def __init__(self, place: Place, api: Api):
        self._place, self._api, self._pace = place, api, api.pace
        core = f"/api/v1/namespaces/{place.namespace}"
        self._pods, self._maps = f"{core}/pods", f"{core}/configmaps"
        self._job = f"{place.fullname}-job"
        self._mirror = Mirror(api, self._pods, {"labelSelector": pods.selector(place.release)}, self._changed)
        self._job_mirror = Mirror(
            api, self._maps, {"fieldSelector": f"metadata.name={self._job}"}, self._job_changed
        )
        self._emit: Callable[[ev.Event], None] = lambda _: None
        self._take: Callable[[dict[str, Any]], None] = lambda _: None
        self._run_id = RunId("")
        self._left: dict[str, Any] = {}  # what an earlier master has written for us
        self._workers: dict[WorkerId, _Worker] = {}
        self._born = 0
        self._high, self._keep_seconds = 0, -1.0  # live values of our own
        self._ended_order: list[WorkerId] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._blocked, self._retry_at = "", 0.0  # why creates are refused, and when to try again
        self._block_backoff = Backoff(max(self._pace.first_pause, self._pace.outage), self._pace.blocked)
        self._probing = asyncio.Lock()
        self._room = asyncio.Event()  # a pod has gone: there may be room
        self._settled = self._ended = False
        self.events = show.Events(api, place.namespace, self._owner, place.pod)
        self.status = show.Status(api, f"{self._maps}/{place.fullname}-status")

    # --- before the job

    async def open(self) -> Found:
        """Read what is there. Waits for an API that is out.

        Raises:
            ConfigError: the job's object is missing or cannot be read, or the account lacks a right.
        """
        await self._patiently(self._job_mirror.list)
        if self._job not in self._job_mirror.objects:
            raise ConfigError(f"configmap {self._job}: not found in namespace {self._place.namespace}")
        status = await self._patiently(lambda: self._api.get(self.status.path))
        await self._patiently(self._mirror.list)
        data = status.get("data") or {}
        left = self._left = _left_by(data)
        known = self._mirror.objects.values()
        living = [p for p in known if not pods.ended(p)]
        runs = {pods.of(p)[0] for p in living}
        run_id = left.get("runId") or (runs.pop() if len(runs) == 1 else None)
        numbers = [worker for p in known if (worker := pods.of(p)[1]) is not None]
        self._born = max([left.get("born", 0), *(n + 1 for n in numbers)])
        workers = tuple(
            (worker, p["metadata"]["name"] if pods.running(p) else "")
            for p in living
            if (worker := pods.of(p)[1]) is not None and pods.of(p)[0] == run_id
        )
        return Found(
            self.values, self._data().get("model.py", ""), RunId(run_id) if run_id else None,
            left.get("values"), self._born, tuple(sorted(workers)),
            data.get("phase", "") if "summary.json" in data else "",
        )  # fmt: skip

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
        self._run_id, self._emit, self._take = run_id, emit, take
        # A run keeps the values that it began with, whatever the chart says by now.
        earlier = self._left.get("values") if run_id == self._left.get("runId") else None
        try:
            self._take_own(self.values)
        except ConfigError:  # a run that goes on takes none of them
            self._take_own(earlier or self.values)
        self.status.begin(status, run_id, earlier or self.values)
        for pod in self._mirror.objects.values():
            run, worker = pods.of(pod)
            if run == run_id and worker is not None:
                self._workers[worker] = _Worker(
                    worker, pods.uid(pod), pod, high=pod["metadata"]["labels"].get(pods.PRIORITY) == "high"
                )

    async def refuse(self, phase: str, why: str, changed: Callable[[], None]) -> None:
        """In place of `settle` and `start`: show why no run begins. `changed`: the chart's object has."""
        self._take = lambda _: changed()
        self._emit = lambda _: changed()
        self._settled = True
        self._keep(self._job_mirror.run())
        said = {"data": {"phase": phase, "reason": why}}
        await self._patiently(lambda: self._api.patch(self.status.path, said, SOON))

    @property
    def values(self) -> dict[str, Any]:
        """The job's values, as the chart has last rendered them.

        Raises:
            ConfigError: they are no JSON object.
        """
        return _values(self._job, self._data())

    # --- the backend

    async def start(self) -> None:
        """Tell of the pods that are there, and watch from there on."""
        self._settled = True
        for pod in list(self._mirror.objects.values()):
            run, worker = pods.of(pod)
            if run != self._run_id or worker is None:
                log.info(f"pod {pod['metadata']['name']} is of another run: deleting it")
                self._keep(self._delete(pod, 0.0))
            elif pods.ended(pod):  # an earlier master has told of it, or the adoption leaves it out
                self._workers[worker].over.set()
                self._ended_order.append(worker)
            else:
                self._changed(pod, False)
        self.status.born = self._born
        for task in (self._mirror.run(), self._job_mirror.run(), self.events.run(), self.status.run(),
                     self._write_labels()):  # fmt: skip
            self._keep(task)

    def perform(self, effect: ev.Effect) -> None:
        """Make or delete a pod; show what is said."""
        match effect:
            case ev.Create(worker):
                self._born = max(self._born, worker + 1)
                self.status.born = self._born
                w = self._workers[worker] = _Worker(worker, making=True)
                self._keep(self._create(w))
            case ev.Delete(worker, grace_seconds):
                self._remove(worker, grace_seconds)
            case ev.Say(kind, text):
                self.events.say(kind, text)
            case ev.End():
                self._ended = True
                self._keep(self._clear_away())

    def observe(self, now: float, event: ev.Event, effects: list[ev.Effect]) -> None:
        """An observer of the master's loop: what people see may be another now."""
        self.status.changed()

    async def close(self) -> None:
        """Write the last status and go. Pods are left as they are."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for w in self._workers.values():
            if w.overdue is not None:
                w.overdue.cancel()
        try:
            async with asyncio.timeout(self._pace.outage * 3):
                await self.events.flush()
                await self.status.flush()
        except (TimeoutError, ApiError) as error:
            log.warning(f"the last status could not be written: {error}")
        await self._api.close()

    @property
    def in_sight(self) -> bool:
        """The API answers."""
        return self._api.in_sight

    def numbers(self) -> dict[str, Any]:
        """For the metrics: requests by (verb, resource, status), lists by reason, age of the last news."""
        return {
            "requests": dict(self._api.requests),
            "relists": dict(self._mirror.relists),
            "watch_age_seconds": self._mirror.age,
            "in_sight": self.in_sight,
        }

    # --- making pods

    async def _create(self, w: _Worker) -> None:
        """Until the pod is there, or nobody wants it any more.

        When one create is refused for a reason that holds for all (a quota, a right), the others
        wait, and one asks now and then for all of them.
        """
        while not w.unwanted and not w.uid:  # the watch may know of a pod whose create was never answered
            if not self._blocked:
                if await self._try(w):
                    break
                continue
            self._delay(w, self._blocked)
            async with self._probing:
                if self._blocked and not w.unwanted and not w.uid:
                    await self._until_retry()
                    if w.unwanted or w.uid or await self._try(w):
                        break
        w.making = False
        if not w.uid and not w.over.is_set():
            self._over(w, ev.Gone(w.id, free=True, why="it was not started yet"))
        elif w.unwanted and w.uid and not w.over.is_set():
            assert w.pod is not None
            w.asked = True
            await self._delete(w.pod, 0.0)

    async def _until_retry(self) -> None:
        loop = asyncio.get_running_loop()
        while (pause := self._retry_at - loop.time()) > 0:
            self._room.clear()
            try:
                async with asyncio.timeout(pause):
                    await self._room.wait()
            except TimeoutError:
                return
            # A pod is gone and leaves room, but pods that go all the time are no reason to hurry.
            self._retry_at = min(self._retry_at, loop.time() + self._pace.outage)

    async def _try(self, w: _Worker) -> bool:
        """One create. True: no other is needed, the pod is there or never will be."""
        name = pods.name(self._place.fullname, w.id)
        try:
            pod = await self._api.create(self._pods, self._stamped(w))
        except ConfigError as error:
            self._block(f"the worker's pod cannot be made: {error}")
            return False
        except ApiError as error:
            if error.status == 409 and error.reason == "AlreadyExists":
                return await self._meet(w, name)
            self._block(_blocked_by(error, name))
            return False
        self._unblock()
        self._known(w, pod)
        return True

    def _stamped(self, w: _Worker) -> dict[str, Any]:
        data = self._data()
        highs = sum(o.high for o in self._workers.values() if o is not w and not o.over.is_set())
        w.high = "worker-high.yaml" in data and highs < self._high
        env = {"EDL_WORKER_ID": str(w.id), "EDL_RUN_ID": self._run_id, "EDL_MASTER": self._place.address}
        key = "worker-high.yaml" if w.high else "worker.yaml"
        return pods.stamp(
            _template(self._job, data, key), self._place.fullname, self._place.release, w.id, self._run_id,
            self._owner(), env, w.high,
        )  # fmt: skip

    async def _meet(self, w: _Worker, name: str) -> bool:
        """A pod of that name exists. It is ours if a create came through whose answer did not."""
        try:
            pod = await self._api.get(f"{self._pods}/{name}")
        except ApiError as error:
            if error.status != 404:
                self._block(_blocked_by(error, name))
            return False
        if pods.of(pod) == (self._run_id, w.id) and not pods.deleting(pod) and not pods.ended(pod):
            self._known(w, pod)
            return True
        run = pods.of(pod)[0]
        whose = f"it belongs to run {run}" if run and run != self._run_id else "this master did not make it"
        why = f"there is a pod {name} already, and {whose}"
        self.events.note("PodExists", f"{why}; worker {w.id} is given up", warning=True)
        self._over(w, ev.Gone(w.id, free=True, why=why))
        return True

    def _known(self, w: _Worker, pod: Object) -> None:
        if not w.uid:
            w.uid, w.pod = pods.uid(pod), pod
            self._mirror.learn(pod)
            self._delay(w, "")
            self._look(w, pod, False)  # it may run by now, and nothing else would ever change

    def _block(self, why: str) -> None:
        now = asyncio.get_running_loop().time()
        if why != self._blocked:
            log.warning(f"workers cannot be made: {why}")
        if not self._blocked or now >= self._retry_at:  # once for a burst of refusals
            self._retry_at = now + self._block_backoff.next()
        self._blocked = why
        for w in self._workers.values():
            if w.making:
                self._delay(w, why)

    def _unblock(self) -> None:
        if self._blocked:
            log.info("workers can be made again")
        self._blocked = ""
        self._block_backoff.reset()

    # --- deleting pods

    def _remove(self, worker: WorkerId, grace: float) -> None:
        w = self._workers.get(worker)
        if w is None or w.over.is_set() or w.unwanted:
            return
        w.unwanted = True
        if w.making:
            self._room.set()  # should it wait for room: it need not any more
        else:
            self._keep(self._remove_pod(w, grace))

    async def _remove_pod(self, w: _Worker, grace: float) -> None:
        if w.seen and not w.disrupted:
            # A worker that has crashed is known by its stream before its pod has ended. A pod that
            # ends by itself keeps its log and its exit code; a deleted one takes them along.
            try:
                async with asyncio.timeout(self._pace.mercy):
                    await w.over.wait()
            except TimeoutError:
                pass
        if not w.over.is_set():
            assert w.pod is not None
            w.asked = True
            await self._delete(w.pod, grace)

    async def _delete(self, pod: Object, grace: float) -> None:
        """Until the API has agreed. With no grace it would forget a pod that still runs: 1 s at least."""
        body = {
            "gracePeriodSeconds": max(1, math.ceil(grace)),
            "preconditions": {"uid": pods.uid(pod)},
        }
        backoff = Backoff(self._pace.first_pause, self._pace.blocked)
        while True:
            try:
                await self._api.delete(f"{self._pods}/{pod['metadata']['name']}", body)
                return
            except ApiError as error:
                if error.status in (404, 409):  # it is gone already, or by now it is another one
                    return
                log.warning(f"pod {pod['metadata']['name']} cannot be deleted: {error}")
                await asyncio.sleep(max(backoff.next(), error.retry_after))

    async def _clear_away(self) -> None:
        """When the job has ended and its time to live is over, delete what is left of the workers."""
        if self._keep_seconds >= 0:
            await asyncio.sleep(self._keep_seconds)
            for pod in list(self._mirror.objects.values()):
                await self._delete(pod, 0.0)

    # --- what happens to pods

    def _changed(self, pod: Object, vanished: bool) -> None:
        """A pod is as it is now, or gone."""
        if not self._settled:
            return
        run, worker = pods.of(pod)
        w = self._workers.get(worker) if worker is not None and run == self._run_id else None
        if w is not None and not w.uid and w.making and not vanished:
            self._known(w, pod)  # the watch was quicker than the answer to the create
        if w is None or w.uid != pods.uid(pod):
            if not vanished:
                self._stranger(pod)
            return
        w.pod = pod
        if not w.over.is_set():
            self._look(w, pod, vanished)
        if vanished:
            del self._workers[w.id]
            if w.id in self._ended_order:
                self._ended_order.remove(w.id)
            self._room.set()

    def _look(self, w: _Worker, pod: Object, vanished: bool) -> None:
        if (why := pods.disruption(pod)) and not w.disrupted:
            w.disrupted = why
            self.events.note("WorkerPreempted", f"worker {w.id}: {why}", warning=True)
        if vanished or pods.ended(pod):
            self._over(w, pods.verdict(w.id, pod, w.asked, w.disrupted))
            return
        if pods.running(pod):
            if not w.seen:
                w.seen, w.why = True, ""
                self._emit(ev.Seen(w.id, pod["metadata"]["name"]))
        else:
            self._delay(w, pods.delay(pod))
        if pods.deleting(pod) and w.overdue is None:
            grace = pod["metadata"].get("deletionGracePeriodSeconds") or 0
            loop = asyncio.get_running_loop()
            w.overdue = loop.call_later(grace + self._pace.overdue, self._is_overdue, w)

    def _is_overdue(self, w: _Worker) -> None:
        """Kubernetes keeps a pod until its node says that it has ended. A lost node never does."""
        if not w.over.is_set() and w.pod is not None:
            self._over(w, pods.verdict(w.id, w.pod, w.asked, w.disrupted, overdue=True))

    def _over(self, w: _Worker, gone: ev.Gone) -> None:
        w.over.set()
        self._room.set()
        if w.overdue is not None:
            w.overdue.cancel()
        self._emit(gone)
        pod = w.pod
        if not w.uid:
            self._workers.pop(w.id, None)
        elif pod is not None and pods.ended(pod) and not pods.deleting(pod):
            if pods.goes_on(pod):
                self._keep(self._delete(pod, 0.0))
                return
            self._ended_order.append(w.id)
            self._keep(self._patch_labels(w, ("", "gone")))
            if len(self._ended_order) > KEPT:
                oldest = self._workers.get(self._ended_order.pop(0))
                if oldest is not None and oldest.pod is not None:
                    self._keep(self._delete(oldest.pod, 0.0))

    def _stranger(self, pod: Object) -> None:
        """A pod with our labels that we do not know."""
        run, worker = pods.of(pod)
        if run != self._run_id or worker is None or worker >= self._born:
            return  # of another master, which may know better
        if not pods.deleting(pod):
            log.warning(
                f"pod {pod['metadata']['name']} says that it is worker {worker}, which is gone: deleting it"
            )
            self._keep(self._delete(pod, 0.0))

    def _delay(self, w: _Worker, why: str) -> None:
        if why != w.why and not w.over.is_set():
            w.why = why
            self._emit(ev.Delayed(w.id, why))

    # --- the job's object

    def _data(self) -> Mapping[str, str]:
        return (self._job_mirror.objects.get(self._job) or {}).get("data") or {}

    def _owner(self) -> dict[str, str]:
        meta = (self._job_mirror.objects.get(self._job) or {}).get("metadata", {})
        return {"apiVersion": "v1", "kind": "ConfigMap", "name": self._job, "uid": str(meta.get("uid", ""))}

    def _job_changed(self, thing: Object, vanished: bool) -> None:
        if not self._settled:
            return
        if vanished:
            log.warning(f"configmap {self._job} is gone: the release was uninstalled")
            return
        try:
            values = _values(self._job, thing.get("data") or {})
        except ConfigError as error:
            self._emit(ev.Refused(f"the new values are refused: {error}"))
            return
        self._take(values)
        with suppress(ConfigError):  # which whoever takes the values has told
            self._take_own(values)
            if self._ended:
                self._keep(self._clear_away())
        self._retry_at = 0.0  # the template may have been what was wrong
        self._room.set()

    def _take_own(self, values: dict[str, Any]) -> None:
        """The live values that are the backend's own.

        Raises:
            ConfigError: the values are wrong.
        """
        config = config_module.parse(values)
        self._high, self._keep_seconds = (
            config.high_priority(config.workers),
            config.ttl_seconds_after_finished,
        )

    # --- labels

    async def _write_labels(self) -> None:
        """What each worker is by now, for `kubectl get pods -L edl.dev/rank,edl.dev/state`."""
        while True:
            await self.status.news.wait()
            await asyncio.sleep(self._pace.labels)
            self.status.news.clear()
            for entry in self.status.now().get("workers", []):
                w = self._workers.get(entry["id"])
                labels = show.labels(entry)
                if w is None or not w.uid or w.over.is_set() or w.labels == labels:
                    continue
                w.labels = labels
                self._keep(self._patch_labels(w, labels))

    async def _patch_labels(self, w: _Worker, labels: tuple[str, str]) -> None:
        try:
            await self._api.patch(
                f"{self._pods}/{pods.name(self._place.fullname, w.id)}",
                {"metadata": {"uid": w.uid, "labels": {pods.RANK: labels[0] or None, pods.STATE: labels[1]}}},
                show.WHENEVER,
            )
        except ApiError as error:
            log.debug(f"labels: {error}")
            w.labels = ("?", "?")  # with the next change of anything

    # --- small verbs

    async def _patiently(self, ask: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Ask until the API answers.

        Raises:
            ConfigError: it refuses.
        """
        backoff = Backoff(self._pace.first_pause, self._pace.most_pause)
        while True:
            try:
                return await ask()
            except ApiError as error:
                if not error.out:
                    raise ConfigError(_refusal(error)) from error
                await asyncio.sleep(max(backoff.next(), error.retry_after))

    def _keep(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task of the Kubernetes backend failed", exc_info=error)


def _blocked_by(error: ApiError, name: str) -> str:
    """Why no pod can be made now, the same words for all pods."""
    message = error.message.replace(f'pods "{name}" is forbidden: ', "").replace(name, "the pod")
    if error.out:
        return f"the Kubernetes API is in trouble ({error.message})"
    if error.status == 403 and "exceeded quota" in message:
        return message
    return _refusal(ApiError("", error.status, error.reason, message))


def _refusal(error: ApiError) -> str:
    if error.status == 403:
        return (
            f"Kubernetes does not allow it: {error.message} (the Role of the master's account; rbac.create)"
        )
    return f"Kubernetes refuses: {error.message}"


def _values(job: str, data: Mapping[str, str]) -> dict[str, Any]:
    try:
        values = json.loads(data.get("values.json", ""))
    except ValueError as error:
        raise ConfigError(f"configmap {job}: values.json is no JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"configmap {job}: values.json is no map of keys")
    return values


def _template(job: str, data: Mapping[str, str], key: str) -> dict[str, Any]:
    try:
        pod = yaml.safe_load(data.get(key, ""))
    except yaml.YAMLError as error:
        raise ConfigError(f"configmap {job}: {key} is no YAML: {error}") from error
    if not isinstance(pod, dict):
        raise ConfigError(f"configmap {job}: {key} is no pod")
    return pod


def _left_by(data: Mapping[str, str]) -> dict[str, Any]:
    """What an earlier master has written for us; whatever is not sound is as if it were not there."""
    left: dict[str, Any] = {}
    try:
        state = json.loads(data.get("state", "{}"))
        if isinstance(state.get("runId"), str) and isinstance(state.get("born"), int):
            left = {"runId": state["runId"], "born": state["born"]}
            values = json.loads(data.get("values", "null"))
            left["values"] = values if isinstance(values, dict) else None
    except (ValueError, AttributeError) as error:
        log.warning(f"the status of an earlier master cannot be read, and is not used: {error}")
    return left
