# SPDX-License-Identifier: Apache-2.0
"""A release of the chart as a job of the command line, through the Kubernetes API.

`connect` finds a release by its labels, in one list of ConfigMaps. Read access to these, to the pods and to
the Events is enough for the commands that only show. `scale`, `checkpoint` and `stop` write a key of the
job's ConfigMap (`edl.kubernetes.overrides`), which the master watches.
"""

from __future__ import annotations

import asyncio
import base64
import secrets
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any, NoReturn

import structlog
from lightkube.config.kubeconfig import KubeConfig

from edl.cli.release import model as release_model
from edl.cli.release import status as release_status
from edl.cli.release.pod_faults import PodFaults
from edl.cli.release.status import FoundRelease
from edl.cli.shared.jobs import DISCARD, ENDED, JobSnapshot, Journal, LogSource, Phase, in_short, unsaved
from edl.config import unscalable
from edl.errors import EdlError
from edl.formatting import plain
from edl.kubernetes import overrides, pods
from edl.kubernetes.client import SOON, Api, ApiError
from edl.kubernetes.informer import Object, changes
from edl.kubernetes.kubeconfig import Access
from edl.kubernetes.kubeconfig import load as load_kubeconfig
from edl.kubernetes.names import Names
from edl.kubernetes.timing import Timing
from edl.net import tls

JOBS = f"{pods.PART_OF}=edl,{pods.COMPONENT}=job"
ANSWER_SECONDS = 15.0  # for a running master to handle a request
MAX_LOGS = 1000  # that kubectl follows


@contextmanager
def connect(name: str, namespace: str, kubeconfig: Path | None, context: str) -> Iterator[Release]:
    """Connect to the cluster of a release, and yield the release.

    Args:
        name: name of the release; or the prefix of its objects' names, if a release has several jobs.
        namespace: namespace of the release; "": the context's.
        kubeconfig: path of the kubeconfig; None: kubectl's default.
        context: a context of the kubeconfig; "": its current one.

    Raises:
        ConfigError: no kubeconfig was found, or it cannot be used.
        EdlError: the release does not exist, access is denied, or the API does not answer (also later).
    """
    _log("critical")
    with asyncio.Runner() as loop:
        api = loop.run(_open(*load_kubeconfig(kubeconfig, context)))
        try:
            yield Release(loop, api, loop.run(_find(api, name, namespace or api.namespace)))
        except ApiError as error:
            raise EdlError(_in_words(error, api.server)) from error
        finally:
            loop.run(api.close())


def releases(namespace: str, kubeconfig: Path | None, context: str) -> list[dict[str, Any]]:
    """Describe the releases of a cluster for a list: namespace, release, phase, progress, workers, start.

    The release is what `--release` takes: the full name of a job if its release has several.

    Args:
        namespace: only the releases of this namespace; "": of all.

    Raises:
        ConfigError: no kubeconfig was found, or it cannot be used.
        EdlError: access is denied, or the API does not answer.
    """
    _log("critical")
    where = f"namespaces/{namespace}/" if namespace else ""
    with asyncio.Runner() as loop:
        api = loop.run(_open(*load_kubeconfig(kubeconfig, context)))
        try:
            maps = loop.run(api.get(f"/api/v1/{where}configmaps", labelSelector=JOBS))["items"]
        except ApiError as error:
            raise EdlError(_in_words(error, api.server)) from error
        finally:
            loop.run(api.close())
    found = {(m["metadata"]["namespace"], m["metadata"]["name"]): m for m in maps}
    jobs = Counter(
        (place, job["metadata"]["labels"][pods.INSTANCE])
        for (place, name), job in found.items()
        if Names.of_job(name) is not None
    )
    rows = []
    for (place, name), job in sorted(found.items()):
        if (names := Names.of_job(name)) is None:
            continue
        of = FoundRelease(
            place, job["metadata"]["labels"][pods.INSTANCE], names, job, found.get((place, names.status), {})
        )
        # What --release takes: a parent chart can have several jobs in one release.
        alone = jobs[place, of.release] == 1
        row = {"namespace": place, "release": of.release if alone else names.fullname}
        rows.append({**row, "started": job["metadata"].get("creationTimestamp", ""), **in_short(of.report)})
    return rows


class Release:
    """The job of a release."""

    def __init__(self, loop: asyncio.Runner, api: Api, found: FoundRelease):
        self._loop, self._api, self._found = loop, api, found
        self._is_fresh = True  # nothing has been shown of `found` yet

    def snapshot(self) -> JobSnapshot:
        if not self._is_fresh:
            self._found = self._loop.run(_find(self._api, self._found.names.fullname, self._found.namespace))
        self._is_fresh = False
        return self._loop.run(self._snapshot())

    def announce(self) -> None:
        where = f"release {self._found.release} in namespace {self._found.namespace} at {self._api.server}"
        print(f"edl: {plain(where)}", file=sys.stderr, flush=True)

    def unsaved(self) -> str:
        return "" if self._found.ended else unsaved(self._found.report)

    def wait(self, phase: Phase, seconds: float | None) -> tuple[str, str]:
        _log("info")  # it continues while the API is unavailable, and logs that
        found = self._loop.run(self._until(lambda now: now.ended or now.phase == phase, seconds))
        return found.phase, found.reason

    def until(self, reached: Callable[[dict[str, Any]], bool], seconds: float | None) -> bool:
        def met(now: FoundRelease) -> bool:
            return now.ended or reached(now.report)

        self._found = self._loop.run(self._until(met, seconds))
        return not self._found.ended and reached(self._found.report)

    def faults(self) -> PodFaults:
        if self._found.ended:
            raise EdlError(f"release {self._found.release}: the job has ended: {self._found.phase}")
        return PodFaults(self._loop, self._api, self._found)

    def logs(self, source: LogSource, tail: int | None, follow: bool) -> NoReturn:
        selector = self._found.selector(*source.components)
        if source.number is not None:
            label = pods.SERVER_INDEX if source.components == ("ps",) else pods.WORKER_ID
            selector += f",{label}={source.number}"
        command = ["kubectl", "logs", "-n", self._found.namespace, "-l", selector, "--prefix"]
        command += [f"--tail={-1 if tail is None else tail}", f"--max-log-requests={MAX_LOGS}"]
        command += ["--follow"] if follow else []
        raise EdlError(
            f"release {self._found.release}: kubectl prints the logs of pods: {shlex.join(command)}"
        )

    def scale(self, workers: int | None, servers: int | None = None) -> str:
        if servers is not None:
            raise EdlError(
                f"the chart has the servers of release {self._found.release}: "
                f"helm upgrade {self._found.release} CHART --reuse-values --set ps.servers={servers}"
            )
        assert workers is not None
        return self._loop.run(self._scale(workers))

    def checkpoint(self) -> str:
        return self._loop.run(self._checkpoint())

    def fetch(self, name: str, target: Path) -> str:
        return self._loop.run(release_model.fetch(self._api, self._found, name, target))

    def audit(self) -> str:
        from edl.cli.release import audit as release_audit  # needs NumPy

        return release_audit.audit(self._loop, self._api, self._found, self._loop.run(self._pods("master")))

    @contextmanager
    def journal(self) -> Iterator[Journal]:
        from edl.cli.release import audit as release_audit  # needs NumPy

        told, masters = self.snapshot().data, self._loop.run(self._pods("master"))
        with release_audit.copied(self._loop, self._api, self._found, masters) as copy:
            yield Journal(copy, self._found.release, told, release_audit.unread("they are in the cluster"))

    def token(self) -> str:
        return self._loop.run(self._token())

    def authority(self) -> str:
        return tls.authority()  # the file of the Secret is not here: callers from outside have their own

    def stop(self, discard: bool, seconds: float) -> str:
        if discard or self._found.ended or not self._writes_checkpoints():
            return self._loop.run(self._stop())
        print(f"writing the state to {self._checkpoints()} first; {DISCARD}", flush=True)
        return self.stop_with_checkpoint(True, seconds)

    def _writes_checkpoints(self) -> bool:
        asked = self._found.values.get("checkpoint", {}).get("dir") or None
        return self._found.report.get("checkpoint", asked) is not None  # there may be no status yet

    def stop_with_checkpoint(self, force: bool, seconds: float) -> str:
        return self._loop.run(self._stop_with_checkpoint(force, seconds))

    # --- reading the status

    async def _snapshot(self) -> JobSnapshot:
        there = await self._pods("master", "worker")
        warnings = await self._warnings() if release_status.unexplained(there) else []
        return release_status.snapshot(self._found, there, await self._events(), warnings)

    async def _pods(self, *components: str) -> list[Object]:
        found = await self._api.get(self._path("pods"), labelSelector=self._found.selector(*components))
        return list(found["items"])

    async def _events(self) -> list[Object]:
        ours = f"involvedObject.name={self._found.names.job}"
        return list((await self._api.get(self._path("events"), fieldSelector=ours))["items"])

    async def _warnings(self) -> list[Object]:
        """Warnings of the whole namespace, also about pods that do not run or could not be created."""
        return list((await self._api.get(self._path("events"), fieldSelector="type=Warning"))["items"])

    async def _until(self, reached: Callable[[FoundRelease], bool], seconds: float | None) -> FoundRelease:
        """Wait until the job has reached a condition, or the time is up.

        Raises:
            EdlError: the release was uninstalled.
        """
        found = self._found
        only = {"fieldSelector": f"metadata.name={found.names.status}"}
        try:
            async with (
                asyncio.timeout(seconds),
                aclosing(changes(self._api, self._path("configmaps"), only, [found.status])) as changed,
            ):
                while not reached(found):
                    status, gone = await anext(changed)
                    if gone:
                        raise EdlError(f"release {found.release} was uninstalled")
                    found = self._with(status)
        except TimeoutError:
            pass
        return found

    # --- requests to the master

    async def _scale(self, workers: int) -> str:
        found = self._found
        if found.ended:
            raise EdlError(f"release {found.release}: the job has ended: {found.phase}")
        if wrong := unscalable(found.values, workers):
            raise EdlError("; ".join(wrong))
        scale = overrides.Scale(workers, int(found.values["workers"]), secrets.token_hex(4))
        await self._ask(overrides.SCALE, None if workers == scale.instead else scale.text())
        await self._answer(
            lambda now: now.told.get("workers") == str(workers), f"requested {workers} workers"
        )
        return f"workers {found.told.get('workers', scale.instead)} -> {workers}"

    async def _checkpoint(self) -> str:
        found = self._found
        if found.ended:
            raise EdlError(f"release {found.release}: the job has ended: {found.phase}")
        run, where = self._run_id(), self._checkpoints()
        before = found.told.get("checkpointStep")
        await self._ask(overrides.CHECKPOINT, overrides.Asked(run, secrets.token_hex(4)).text())
        if problem := release_status.master_problem(await self._pods("master")):
            raise EdlError(f"requested a checkpoint; the master will do it when it runs: {problem}")
        found = await self._until(
            lambda now: now.ended or now.told.get("checkpointStep") != before, ANSWER_SECONDS
        )
        step = found.told.get("checkpointStep")
        if step == before:
            return f"requested a checkpoint; it is not complete yet ({found.phase}, {found.reason})"
        return f"the checkpoint of step {int(step or 0):,} is in {where}"

    async def _stop_with_checkpoint(self, force: bool, seconds: float) -> str:
        if self._found.ended:
            return self._left(self._found)
        run, asked = self._run_id(), secrets.token_hex(4)
        self._checkpoints()
        await self._ask(overrides.FAREWELL, overrides.Asked(run, asked, force).text())
        what = "requested the end of the job with a checkpoint"
        if problem := release_status.master_problem(await self._pods("master")):
            raise EdlError(f"{what}; the master will do it when it runs: {problem}")
        stopped = (*ENDED, Phase.Ending)
        found = await self._until(lambda now: now.phase in stopped or bool(now.stop_failure(asked)), seconds)
        if why := found.stop_failure(asked):
            await self._ask(overrides.FAREWELL, None)  # or the next master would try it again
            raise EdlError(why)
        if found.phase not in stopped:
            raise TimeoutError(f"{found.phase}, {found.reason}")
        return self._left(found)

    def _checkpoints(self) -> str:
        """The directory or address of the job's checkpoints.

        Raises:
            EdlError: the job writes no checkpoints.
        """
        where = self._found.values.get("checkpoint", {}).get("dir")
        if not where:
            raise EdlError(
                f"release {self._found.release}: the job writes no checkpoints: its checkpoint.dir is empty"
            )
        return str(where)

    def _run_id(self) -> str:
        """The id of the run.

        Raises:
            EdlError: no run has begun yet.
        """
        found = self._found
        if not (run := found.state.get("runId")):
            raise EdlError(
                f"release {found.release}: the job has not started a run yet; to remove it: "
                f"{_uninstall(found)}"
            )
        return str(run)

    async def _stop(self) -> str:
        found = self._found
        if not found.ended:
            await self._ask(overrides.STOP, self._run_id())
            stopped = (*ENDED, Phase.Ending)
            found = await self._answer(lambda now: now.phase in stopped, "requested the end of the job")
        return self._left(found)

    async def _token(self) -> str:
        """Read the token from the Secret that the workers' pods use.

        Raises:
            EdlError: the Secret cannot be read, or its key holds no token.
        """
        name, key = release_status.token_secret(self._found)
        data = (await self._api.get(self._path("secrets", name))).get("data") or {}
        try:
            return base64.b64decode(data[key], validate=True).decode().strip()
        except (LookupError, ValueError) as error:
            raise EdlError(f"secret {name}: its key {key!r} holds no token") from error

    def _left(self, found: FoundRelease) -> str:
        """Message about an ended job: its outcome, and what remains of the release."""
        outcome = f"the job has ended: {found.phase}, {found.reason}" if found.ended else "the job is ending"
        left = f"its master, the summary in configmap/{found.names.status}, the logs of ended pods"
        return f"{outcome}\nThe release remains: {left}.\nTo remove it: {_uninstall(found)}"

    async def _ask(self, key: str, text: str | None) -> None:
        path = self._path("configmaps", self._found.names.job)
        await self._api.patch(path, {"data": {key: text}}, SOON)

    async def _answer(self, done: Callable[[FoundRelease], bool], what: str) -> FoundRelease:
        """Wait until the master has handled a request.

        Raises:
            EdlError: the master is not running, or has not handled the request in time.
        """
        if problem := release_status.master_problem(await self._pods("master")):
            raise EdlError(f"{what}; the master will do it when it runs: {problem}")
        found = await self._until(done, ANSWER_SECONDS)
        if not done(found):
            status = found.refused or f"{found.phase}, {found.reason}"
            raise EdlError(f"{what}, but the master has not done it within {ANSWER_SECONDS:g} s: {status}")
        return found

    def _with(self, status: Object) -> FoundRelease:
        found = self._found
        return FoundRelease(found.namespace, found.release, found.names, found.job, status)

    def _path(self, kind: str, *more: str) -> str:
        return "/".join([f"/api/v1/namespaces/{self._found.namespace}/{kind}", *more])


async def _open(account: KubeConfig, access: Access) -> Api:
    if access.plugin is not None:
        await access.plugin.refresh()  # before any request with its timeout: the plugin may ask for a login
    return Api(Timing(), account, access)


async def _find(api: Api, name: str, namespace: str) -> FoundRelease:
    """Find the release of that name, or the one whose object names start with it.

    Raises:
        EdlError: the release does not exist, or has several jobs.
    """
    maps = f"/api/v1/namespaces/{namespace}/configmaps"
    found = {m["metadata"]["name"]: m for m in (await api.get(maps, labelSelector=JOBS))["items"]}
    jobs = [names for key in found if (names := Names.of_job(key)) is not None]
    releases = {names: found[names.job]["metadata"]["labels"][pods.INSTANCE] for names in jobs}
    matching = [names for names in jobs if name in (names.fullname, releases[names])]
    if Names(name) in matching:
        matching = [Names(name)]
    if not matching:
        known = ", ".join(sorted(set(releases.values())))
        there = f"edl releases there: {known}" if known else "no edl releases found"
        raise EdlError(f"release {name} not found in namespace {namespace}; {there}")
    if len(matching) > 1:
        raise EdlError(
            f"release {name} in namespace {namespace} has several jobs; "
            f"use --release {' or --release '.join(names.fullname for names in matching)}"
        )
    (names,) = matching
    if names.status not in found:
        raise EdlError(f"configmap {names.status} not found in namespace {namespace}")
    return FoundRelease(namespace, releases[names], names, found[names.job], found[names.status])


def _uninstall(found: FoundRelease) -> str:
    return shlex.join(["helm", "uninstall", found.release, "-n", found.namespace])


def _log(level: str) -> None:
    """Print log messages of at least that level on standard error."""
    structlog.configure(
        processors=[lambda _logger, _method, event: f"edl: {plain(str(event['event']))}"],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def _in_words(error: ApiError, server: str) -> str:
    """Message for the user about an error of the Kubernetes API, with advice."""
    if error.status == 401:
        return f"the Kubernetes API at {server} does not accept the credentials: {error.message}"
    if error.status == 403:
        return f"permission denied by Kubernetes: {error.message} (docs/access.md lists the rights needed)"
    if error.out:
        return f"the Kubernetes API at {server} is unavailable: {error.message}"
    return f"the Kubernetes API at {server} refused: {error}"
