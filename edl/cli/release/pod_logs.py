# SPDX-License-Identifier: Apache-2.0
"""The logs of a release's pods: current contents, or followed while pods are created and deleted."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing

from edl.kubernetes import pods
from edl.kubernetes.client import Api, ApiError
from edl.kubernetes.informer import Object, changes
from edl.kubernetes.rate_limit import Backoff

REFUSED = 401, 403
ATTEMPTS = 4  # to read the end of a log


async def read(api: Api, path: str, selector: str, tail: int | None) -> AsyncGenerator[str, None]:
    """Yield the current lines of each pod's log, one pod after the other, each line with the pod's name.

    Args:
        path: API path of the pods.
        tail: number of last lines of each log; None: all.

    Raises:
        ApiError: access is denied, or the API does not answer.
    """
    found = (await api.get(path, labelSelector=selector))["items"]
    for pod in sorted(found, key=_seniority):
        if pods.started(pod):
            async for line in _PodLog(api, path, pod, tail).lines():
                yield line
        else:
            why = pods.delay(pod) or "it is starting"
            print(f"edl: {pod['metadata']['name']} has no log yet: {why}", file=sys.stderr)


async def follow(
    api: Api, path: str, selector: str, tail: int | None, ended: Coroutine[None, None, None]
) -> AsyncGenerator[str, None]:
    """Like `read`, but also yield new lines, including those of new pods, until `ended` returns.

    Lines that were logged before `ended` returns are still yielded.

    Raises:
        ApiError: access is denied.
    """
    following = _Following(api, path, selector, tail)
    following.start(following.watch_pods())
    end = following.start(ended)
    try:
        while (news := await following.news.get()) is not end:
            if isinstance(news, str):
                yield news
            else:
                news.result()  # a reader has finished, or was refused
        end.result()
    finally:
        await following.cancel()
    while not following.news.empty():
        if isinstance(news := following.news.get_nowait(), str):
            yield news
    for log in following.logs.values():
        async for line in log.rest():
            yield line


class _Following:
    """The followed pods and logs, with one task for each.

    A task puts the lines that it reads into `news`, and finally itself.
    """

    def __init__(self, api: Api, path: str, selector: str, tail: int | None):
        self._api, self._path, self._selector, self._tail = api, path, selector, tail
        self._pods: dict[str, Object] = {}  # by UID
        self._tasks: set[asyncio.Task[None]] = set()
        self.logs: dict[str, _PodLog] = {}  # by UID; only pods whose container has started
        self.news: asyncio.Queue[str | asyncio.Task[None]] = asyncio.Queue()

    def start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self.news.put_nowait)
        return task

    async def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def watch_pods(self) -> None:
        """Start a reader for every pod that has started."""
        selected = {"labelSelector": self._selector}
        async with aclosing(changes(self._api, self._path, selected)) as changed:
            async for pod, gone in changed:
                uid = pods.uid(pod)
                self._pods[uid] = pod
                if gone:
                    del self._pods[uid]
                elif uid not in self.logs and pods.started(pod):
                    self.logs[uid] = _PodLog(self._api, self._path, pod, self._tail)
                    self.start(self._read(self.logs[uid], uid))

    async def _read(self, log: _PodLog, uid: str) -> None:
        """Read a log until its pod has ended: a stream also breaks when a server or a container restarts.

        Raises:
            ApiError: the API refuses the log, so that another attempt is useless.
        """
        backoff = Backoff(self._api.pace.first_pause, self._api.pace.most_pause)
        while True:
            try:
                async for line in log.lines(follow=True):
                    backoff.reset()
                    self.news.put_nowait(line)
            except ApiError as error:
                if error.status in REFUSED:
                    raise
            if uid not in self._pods or pods.phase(self._pods[uid]) in ("Succeeded", "Failed"):
                return
            await asyncio.sleep(backoff.next())


class _PodLog:
    """One container's log. Each reading continues where the last one ended."""

    def __init__(self, api: Api, path: str, pod: Object, tail: int | None):
        self._api, self._name, self._tail = api, pod["metadata"]["name"], tail
        self._path, self._container = f"{path}/{self._name}/log", pods.component(pod)
        self._last = ""  # the time of the last line that was read

    async def lines(self, follow: bool = False) -> AsyncGenerator[str, None]:
        """Yield new lines, and with `follow`, later ones until the stream ends. A deleted pod has none.

        Raises:
            ApiError: the log cannot be read although its pod exists.
        """
        query = {"container": self._container, "timestamps": "true"}
        if follow:
            query["follow"] = "true"
        if self._last:
            query["sinceTime"] = self._last  # with a resolution of one second
        elif self._tail is not None:
            query["tailLines"] = str(self._tail)
        shown = self._last
        try:
            async with aclosing(self._api.log(self._path, query)) as lines:
                async for line in lines:
                    at, _, text = line.partition(" ")
                    if at > shown:
                        self._last = at
                        yield f"{self._name}: {text}"
        except ApiError as error:
            if error.status != 404:
                raise

    async def rest(self) -> AsyncGenerator[str, None]:
        """Yield new lines up to now.

        A node may refuse the log of a container that is just ending, so the request is repeated. If it still
        fails, a message reports that the end of the log is missing.

        Raises:
            ApiError: the API refuses the log, so that another attempt is useless.
        """
        backoff = Backoff(self._api.pace.first_pause, self._api.pace.most_pause)
        for attempt in range(ATTEMPTS):
            try:
                async for line in self.lines():
                    yield line
                return
            except ApiError as error:
                if error.status in REFUSED:
                    raise
                if attempt == ATTEMPTS - 1:
                    print(f"edl: the end of the log of {self._name} cannot be read: {error}", file=sys.stderr)
                else:
                    await asyncio.sleep(backoff.next())


def _seniority(pod: Object) -> tuple[bool, int]:
    """Sort key of pods: the master first, then the workers by number."""
    worker = pods.of(pod)[1]
    return worker is not None, worker or 0
