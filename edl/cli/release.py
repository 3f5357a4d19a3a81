"""A release of the chart as a job of the command line, through the Kubernetes API.

It is found by its labels, in one list of ConfigMaps; then its status says what its master knows, its
pods where the workers are, and its Events what has happened. Whoever may read these may ask; `scale`
and `stop` write a key of the job's ConfigMap (`edl.kubernetes.overrides`), which the master watches.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import shlex
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import structlog
import yaml

from edl.cli import display
from edl.cli.jobs import ENDED, Now, Phase, Whose
from edl.cli.pod_logs import Logs
from edl.config import unscalable
from edl.errors import EdlError
from edl.kubernetes import kubeconfig, overrides, pods
from edl.kubernetes.client import SOON, Api, ApiError, Timing
from edl.kubernetes.informer import Informer, Object, until

T = TypeVar("T")

OURS = f"{pods.PART_OF}=edl,{pods.COMPONENT}=job"
ANSWER_SECONDS = 15.0  # for a master that runs to do what was asked
MOST_EVENTS = 8


@dataclass(frozen=True)
class Release:
    """A release of the chart.

    Args:
        name: of the release; or what its objects' names begin with, where a release has several jobs.
        namespace: "": the context's.
        kubeconfig: None: where kubectl looks, too.
        context: of the kubeconfig; "": its current one.
    """

    name: str
    namespace: str
    kubeconfig: Path | None
    context: str

    def now(self) -> Now:
        return self._run(lambda job: job.now())

    def wait(self, so: Callable[[str], bool], seconds: float | None) -> tuple[str, str]:
        return self._run(lambda job: job.wait(so, seconds), patient=True)

    def logs(self, whose: Whose, tail: int | None, follow: bool, show: Callable[[str], None]) -> None:
        return self._run(lambda job: job.logs(whose, tail, follow, show), patient=follow)

    def scale(self, workers: int) -> str:
        return self._run(lambda job: job.scale(workers))

    def stop(self) -> str:
        return self._run(lambda job: job.stop())

    def _run(self, ask: Callable[[Job], Awaitable[T]], patient: bool = False) -> T:
        """The answer. Who is patient outlives an API in trouble, and is told of it."""

        async def asking() -> T:
            async with self._found() as job:
                return await ask(job)

        structlog.configure(
            processors=[lambda _logger, _method, event: f"edl: {event['event']}"],
            wrapper_class=structlog.make_filtering_bound_logger("info" if patient else "critical"),
            logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        )
        return asyncio.run(asking())

    @asynccontextmanager
    async def _found(self) -> AsyncIterator[Job]:
        api = Api(Timing(), kubeconfig.load(self.kubeconfig, self.context))
        try:
            yield await self._find(api, self.namespace or api.namespace)
        except ApiError as error:
            raise EdlError(_in_words(error, api.server)) from error
        finally:
            await api.close()

    async def _find(self, api: Api, namespace: str) -> Job:
        maps = f"/api/v1/namespaces/{namespace}/configmaps"
        found = {m["metadata"]["name"]: m for m in (await api.get(maps, labelSelector=OURS))["items"]}
        fullnames = [name.removesuffix("-job") for name in found if name.endswith("-job")]
        releases = {full: found[f"{full}-job"]["metadata"]["labels"][pods.INSTANCE] for full in fullnames}
        mine = [full for full in fullnames if self.name in (full, releases[full])]
        if self.name in mine:
            mine = [self.name]
        if not mine:
            there = ", ".join(sorted(set(releases.values()))) or "none of edl at all"
            raise EdlError(f"no release {self.name} in namespace {namespace}; there is {there}")
        if len(mine) > 1:
            raise EdlError(
                f"release {self.name} in namespace {namespace} has several jobs: name one of them "
                f"(--release {' or '.join(mine)})"
            )
        (full,) = mine
        if f"{full}-status" not in found:
            raise EdlError(f"configmap {full}-status: not found in namespace {namespace}")
        return Job(api, namespace, releases[full], full, found[f"{full}-job"], found[f"{full}-status"])


@dataclass
class Job:
    """The job of a release that was found."""

    api: Api
    namespace: str
    release: str
    fullname: str
    job: Object  # ConfigMaps
    status: Object

    def path(self, kind: str, *more: str) -> str:
        return "/".join([f"/api/v1/namespaces/{self.namespace}/{kind}", *more])

    # --- how it is

    async def now(self) -> Now:
        found = (await self.api.get(self.path("pods"), labelSelector=self.selector()))["items"]
        happened = (await self._events())[-MOST_EVENTS:]
        data = {
            "release": self.release,
            "namespace": self.namespace,
            **self._told(),
            "workers": self._workers(found),
            "events": happened,
        }
        notes = [f"worker {w['id']} waits: {w['delay']}" for w in data["workers"] if w["delay"]]
        if data["phase"] in ENDED:
            model = f"; the model in {self._output()}" if data["phase"] == Phase.Succeeded else ""
            return Now(data, f"configmap/{self.fullname}-status{model}")
        if trouble := self._trouble(found):
            notes.append(f"{trouble}; what is told here is of {self._data.get('updated', 'no time at all')}")
        if by_hand := self._by_hand():
            done = "" if self._data.get("workers") == str(by_hand.workers) else "; the master has not done it"
            asked_for = f"`edl scale {by_hand.workers}` holds, in place of the chart's {by_hand.instead}"
            notes.append(f"{asked_for}{done}")
        if happened:
            notes.append("")
        notes += [f"{display.age(e['at']):>7} ago  {e['reason']}: {e['message']}" for e in happened]
        return Now(data, "", tuple(notes))

    async def _events(self) -> list[dict[str, Any]]:
        """What has happened, the oldest first."""
        ours = f"involvedObject.name={self.fullname}-job"
        found = (await self.api.get(self.path("events"), fieldSelector=ours))["items"]
        return sorted((_event(e) for e in found), key=lambda e: str(e["at"]))

    @property
    def _data(self) -> dict[str, str]:
        return self.status.get("data") or {}

    def _told(self) -> dict[str, Any]:
        """What the master has written: its summary if the job has ended, else its status."""
        data = self._data
        in_short = {
            "phase": data.get("phase", str(Phase.Starting)),
            "reason": data.get("reason", "the master has not said anything yet"),
        }
        for key in ("summary.json", "status.json"):
            with suppress(KeyError, ValueError):
                told = dict(json.loads(data[key]))
                # The phase may be newer: with these values no run begins.
                if "records" in told and told["phase"] == in_short["phase"]:
                    return told | in_short
        return in_short

    def _workers(self, found: list[Object]) -> list[dict[str, Any]]:
        """What the pods say of the living, and what the master last heard of them."""
        heard = {w["id"]: w for w in self._told().get("workers", [])}
        numbers = {pods.of(pod)[1] for pod in found}
        # No pod can be made of these, as a quota or a right lacks.
        told = [
            {**w, "node": ""} for w in heard.values() if w["state"] == "pending" and w["id"] not in numbers
        ]
        for pod in found:
            worker = pods.of(pod)[1]
            if worker is None or pods.ended(pod):
                continue
            labels, known = pod["metadata"]["labels"], heard.get(worker, {})
            rank = labels.get(pods.RANK, "")
            told.append({
                "id": worker, "handle": pod["metadata"]["name"],
                "rank": int(rank) if rank else None, "state": labels.get(pods.STATE, ""),
                "delay": pods.delay(pod), "node": pod["spec"].get("nodeName", ""),
                **{key: known.get(key, 0) for key in ("step", "rate", "memory")},
            })  # fmt: skip
        return sorted(told, key=lambda w: int(w["id"]))

    def _trouble(self, found: list[Object]) -> str:
        """Why no master runs; empty if one does."""
        masters = [p for p in found if pods.component(p) == "master" and not pods.deleting(p)]
        if not masters:
            return "no master is there: the Deployment has no pod"
        if any(pods.running(p, "master") for p in masters):
            return ""
        names = (f"{p['metadata']['name']}: {pods.delay(p) or 'it is starting'}" for p in masters)
        return f"the master does not run ({', '.join(names)})"

    def _by_hand(self) -> overrides.Scale | None:
        scale = overrides.Scale.read(self.job.get("data") or {})
        over = scale is None or scale.id == self._state().get("scaleOver") or scale.over(self._values())
        return None if over else scale

    def _state(self) -> dict[str, Any]:
        """What the master keeps there for its successor."""
        with suppress(ValueError):
            return dict(json.loads(self._data.get("state", "{}")))
        return {}

    def _values(self) -> dict[str, Any]:
        """As the chart says them.

        Raises:
            EdlError: they cannot be read.
        """
        try:
            return dict(json.loads(self.job["data"]["values.json"]))
        except (KeyError, TypeError, ValueError) as error:
            raise EdlError(f"configmap {self.fullname}-job: values.json cannot be read") from error

    def _output(self) -> str:
        """Where the workers' output is."""
        try:
            pod = yaml.safe_load(self.job["data"]["worker.yaml"])
            volume = next(v for v in pod["spec"]["volumes"] if v["name"] == "output")
        except (yaml.YAMLError, KeyError, TypeError, StopIteration):
            return "a place that the worker's pod does not name"
        if claim := volume.get("persistentVolumeClaim"):
            return f"persistentvolumeclaim/{claim['claimName']}"
        if folder := volume.get("hostPath"):
            return f"{folder['path']} of its worker's node"
        return "its worker's pod, with which it goes"

    def selector(self, components: tuple[str, ...] = ("master", "worker")) -> str:
        chart = self.job["metadata"]["labels"].get(pods.NAME, "")
        return (
            f"{pods.NAME}={chart},{pods.INSTANCE}={self.release},{pods.COMPONENT} in ({','.join(components)})"
        )

    # --- what is waited for

    async def wait(self, so: Callable[[str], bool], seconds: float | None) -> tuple[str, str]:
        data = await self.until(lambda d: so(d.get("phase", "")) or d.get("phase") in ENDED, seconds)
        return data.get("phase", str(Phase.Starting)), data.get(
            "reason", "the master has not said anything yet"
        )

    async def until(
        self, so: Callable[[Mapping[str, str]], bool], seconds: float | None
    ) -> Mapping[str, str]:
        """The status when something is so of it, or the time is up.

        Raises:
            EdlError: the release is gone.
        """
        happened, name = asyncio.Event(), f"{self.fullname}-status"

        def changed(thing: Object, gone: bool) -> None:
            if gone or so(thing.get("data") or {}):
                happened.set()

        mirror = self.watched_status(changed)
        await mirror.list()
        if name in mirror.objects:
            await until(happened, [mirror], seconds)
        if name not in mirror.objects:
            raise EdlError(f"release {self.release} is gone: it was uninstalled")
        return mirror.objects[name].get("data") or {}

    def watched_status(self, changed: Callable[[Object, bool], None]) -> Informer:
        only = {"fieldSelector": f"metadata.name={self.fullname}-status"}
        return Informer(self.api, self.path("configmaps"), only, changed, forgiving=False)

    async def logs(self, whose: Whose, tail: int | None, follow: bool, show: Callable[[str], None]) -> None:
        selector = self.selector(whose.components)
        if whose.worker is not None:
            selector += f",{pods.WORKER_ID}={whose.worker}"
        logs = Logs(self.api, self.path("pods"), selector, tail, show)
        if follow and self._data.get("phase") not in ENDED:
            over = asyncio.Event()

            def changed(thing: Object, gone: bool) -> None:
                if gone or (thing.get("data") or {}).get("phase") in ENDED:
                    over.set()

            await logs.follow(over, self.watched_status(changed))
        elif not await logs.read():
            raise EdlError(f"release {self.release}: there is no pod of {whose.words}")

    # --- what is asked of it

    async def scale(self, workers: int) -> str:
        data, values = self._data, self._values()
        if data.get("phase") in ENDED:
            raise EdlError(f"release {self.release}: the job has ended: {data['phase']}")
        if wrong := unscalable(values, workers):
            raise EdlError("; ".join(wrong))
        scale = overrides.Scale(workers, int(values["workers"]), secrets.token_hex(4))
        await self._ask(overrides.SCALE, None if workers == scale.instead else scale.text())
        await self._answer(lambda d: d.get("workers") == str(workers), f"{workers} workers are asked for")
        return f"workers {data.get('workers', scale.instead)} -> {workers}"

    async def stop(self) -> str:
        data: Mapping[str, str] = self._data
        if data.get("phase") not in ENDED:
            run = self._state().get("runId")
            if not run:
                raise EdlError(
                    f"release {self.release}: no run has begun that could be stopped; "
                    f"{shlex.join(self._uninstall())} takes all of it away"
                )
            await self._ask(overrides.STOP, run)
            data = await self._answer(
                lambda d: d.get("phase") in (*ENDED, Phase.Ending), "the end of the job is asked for"
            )
        ended = data["phase"] in ENDED
        told = f"the job has ended: {data['phase']}, {data['reason']}" if ended else "the job is ending"
        stays = (
            f"its master, the summary in configmap/{self.fullname}-status, the logs of pods that have ended"
        )
        return f"{told}\nThe release stays: {stays}.\nAway with it: {shlex.join(self._uninstall())}"

    def _uninstall(self) -> list[str]:
        return ["helm", "uninstall", self.release, "-n", self.namespace]

    async def _ask(self, key: str, text: str | None) -> None:
        await self.api.patch(self.path("configmaps", f"{self.fullname}-job"), {"data": {key: text}}, SOON)

    async def _answer(self, so: Callable[[Mapping[str, str]], bool], what: str) -> Mapping[str, str]:
        """The status once the master has done what was asked of it.

        Raises:
            EdlError: it does not run, or has not done it in all this time.
        """
        found = (await self.api.get(self.path("pods"), labelSelector=self.selector(("master",))))["items"]
        if trouble := self._trouble(found):
            raise EdlError(f"{what}; it is done when the master runs: {trouble}")
        data = await self.until(so, ANSWER_SECONDS)
        if not so(data):
            refusals = [e["message"] for e in await self._events() if e["reason"] == "SpecRefused"]
            told = refusals[-1] if refusals else f"{data.get('phase')}, {data.get('reason')}"
            raise EdlError(f"{what}, and the master has not done it in {ANSWER_SECONDS:g} s; it says: {told}")
        return data


def _event(thing: Object) -> dict[str, Any]:
    at = thing.get("lastTimestamp") or thing["metadata"].get("creationTimestamp", "")
    return {"at": at, "reason": thing.get("reason", ""), "message": thing.get("message", "")}


def _in_words(error: ApiError, server: str) -> str:
    """What the user can do about it, and where."""
    if error.status == 401:
        return f"the Kubernetes API at {server} does not know who asks: {error.message}"
    if error.status == 403:
        return (
            f"Kubernetes does not allow it: {error.message} (docs/kubernetes.md says which rights edl needs)"
        )
    if error.out:
        return f"the Kubernetes API at {server} is not to be reached: {error.message}"
    return f"the Kubernetes API at {server} refuses: {error}"
