"""The logs of a release's pods: as they are, or followed while pods come and go."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

from edl.kubernetes import pods
from edl.kubernetes.client import Api, ApiError, Backoff
from edl.kubernetes.informer import Informer, Object, until


class Logs:
    """The logs of the pods at a path that a selector selects.

    Args:
        tail: how many of the last lines of each; None: all.
        show: is given each line, with the pod's name before it.

    Raises (every method):
        ApiError: not allowed, or not to be had.
    """

    def __init__(self, api: Api, path: str, selector: str, tail: int | None, show: Callable[[str], None]):
        self._api, self._path, self._tail, self._show = api, path, tail, show
        self._pods = Informer(api, path, {"labelSelector": selector}, self._changed, forgiving=False)
        self._logs: dict[str, _PodLog] = {}  # of containers that have started, by the pod's UID
        self._over = asyncio.Event()
        self._following: dict[str, asyncio.Task[None]] | None = None
        self._failed: Exception | None = None

    async def read(self) -> int:
        """Show them as they are, one after the other; how many pods there are."""
        await self._pods.list()
        for pod in sorted(self._pods.objects.values(), key=_seniority):
            if log := self._logs.get(pods.uid(pod)):
                await log.read()
            else:
                why = pods.delay(pod) or "it is starting"
                print(f"edl: {pod['metadata']['name']} has no log yet: {why}", file=sys.stderr)
        return len(self._pods.objects)

    async def follow(self, over: asyncio.Event, status: Informer) -> None:
        """Show them as they grow, those of pods to come too, until it is over and all that was said is shown.

        Args:
            status: what sets `over`; it is kept up to date meanwhile.
        """
        self._over, self._following = over, {}
        try:
            await self._pods.list()
            await status.list()
            await until(over, [status, self._pods])
        finally:
            for task in self._following.values():
                task.cancel()
            await asyncio.gather(*self._following.values(), return_exceptions=True)
        if self._failed is not None:
            raise self._failed
        for log in self._logs.values():
            await log.read()

    def _changed(self, pod: Object, gone: bool) -> None:
        uid = pods.uid(pod)
        if gone or uid in self._logs or not pods.started(pod):
            return
        name, container = pod["metadata"]["name"], pods.component(pod)
        log = self._logs[uid] = _PodLog(
            self._api,
            f"{self._path}/{name}/log",
            container,
            self._tail,
            lambda line: self._show(f"{name}: {line}"),
        )
        if self._following is not None:
            self._following[uid] = asyncio.create_task(self._keep_reading(log, name, uid))

    async def _keep_reading(self, log: _PodLog, name: str, uid: str) -> None:
        """Until the pod has ended: a stream also breaks off because a server or a container starts again."""
        backoff = Backoff(self._api.pace.first_pause, self._api.pace.most_pause)
        while True:
            try:
                if await log.read(follow=True):
                    backoff.reset()
            except ApiError as error:
                if error.status in (401, 403):
                    self._give_up(error)
                    return
            except OSError as error:  # nobody reads any more what is shown
                self._give_up(error)
                return
            pod = self._pods.objects.get(name)
            if pod is None or pods.uid(pod) != uid or pods.phase(pod) in ("Succeeded", "Failed"):
                return
            await asyncio.sleep(backoff.next())

    def _give_up(self, error: Exception) -> None:
        self._failed = error
        self._over.set()


class _PodLog:
    """One container's log, read on from where it was left."""

    def __init__(self, api: Api, path: str, container: str, tail: int | None, show: Callable[[str], None]):
        self._api, self._path, self._container, self._tail, self._show = api, path, container, tail, show
        self._last = ""  # when the last line that was shown was said

    async def read(self, follow: bool = False) -> bool:
        """Show what is there, and with `follow` what comes until the stream ends; whether there was anything.

        A pod that is gone has nothing more to say.
        """
        query = {"container": self._container, "timestamps": "true"}
        if follow:
            query["follow"] = "true"
        if self._last:
            query["sinceTime"] = self._last  # which means its second
        elif self._tail is not None:
            query["tailLines"] = str(self._tail)
        shown = self._last
        try:
            async for line in self._api.log(self._path, query):
                at, _, text = line.partition(" ")
                if at > shown:
                    self._last = at
                    self._show(text)
        except ApiError as error:
            if error.status != 404:
                raise
        return self._last > shown


def _seniority(pod: Object) -> tuple[bool, int]:
    """The master first, then the workers by number."""
    worker = pods.of(pod)[1]
    return worker is not None, worker or 0
