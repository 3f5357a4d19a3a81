# SPDX-License-Identifier: Apache-2.0
"""A cache of selected API objects that is kept up to date: one list, then watches.

Its rules avoid known failures of other watch loops:
    - An object that is missing in a list was deleted while no watch ran: report it like a deletion.
    - Objects are distinguished by UID: a new object may have the name of a deleted one.
    - A watch that is silent for 75 s is dead (bookmarks come every minute), in any state of TCP.
    - After 410, as an HTTP status or inside the stream: list anew, after a pause.
    - A watch that repeatedly ends at once is a failure, too.
    - Make a full list every five minutes, independently of the watches.

A notified consumer must look at the current object: the number of notifications means nothing.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing, suppress
from typing import Any, TypeAlias

import structlog

from edl.kubernetes.client import Api, ApiError
from edl.kubernetes.rate_limit import Backoff

log = structlog.get_logger()

Object: TypeAlias = dict[str, Any]
PAGE = "500"


class Informer:
    """A cache of the objects at a path that match a selector.

    Args:
        changed: is called with each object that is new or has changed (False), or is gone (True), in its last
            known state.
        forgiving: retry if a right is missing, as it may be granted later; else `run` raises the refusal.
    """

    def __init__(
        self,
        api: Api,
        path: str,
        selector: dict[str, str],
        changed: Callable[[Object, bool], None],
        forgiving: bool = True,
    ):
        self._api, self._path, self._selector, self._changed = api, path, selector, changed
        self._forgiving = forgiving
        self._version = ""  # the version to watch from; "": a list is due
        self._why = "start"  # reason of the next list
        self._listed_at = self._heard_at = 0.0
        self.objects: dict[str, Object] = {}  # by name
        self._learned: set[str] = set()  # since the last list was requested
        self.relists: Counter[str] = Counter()  # by reason; includes the first list

    @property
    def age(self) -> float:
        """Seconds since the last list or event."""
        return asyncio.get_running_loop().time() - self._heard_at

    async def list(self) -> None:
        """Refresh all objects from one consistent list.

        Raises:
            ApiError: the list failed.
        """
        found: dict[str, Object] = {}
        self._learned.clear()
        query = {**self._selector, "limit": PAGE}
        while True:
            answer = await self._api.get(self._path, **query)
            found |= {o["metadata"]["name"]: o for o in answer.get("items") or []}
            if not (more := answer["metadata"].get("continue")):
                break
            query["continue"] = more
        self.relists[self._why] += 1
        self._listed_at = self._heard_at = asyncio.get_running_loop().time()
        self._version, self._why = answer["metadata"]["resourceVersion"], "age"
        for name, known in list(self.objects.items()):
            other = name in found and _uid(found[name]) != _uid(known)
            if other or (name not in found and name not in self._learned):
                self._gone(known)
        for thing in found.values():
            self._is(thing)

    def learn(self, thing: Object) -> None:
        """Register an object that this process has created.

        If it is deleted before a watch reports it, the next list lacks it. The deletion is only noticed
        because the object was registered. (A list that was requested before may be older than the object.)
        """
        self.objects.setdefault(thing["metadata"]["name"], thing)
        self._learned.add(thing["metadata"]["name"])

    async def run(self) -> None:
        """Keep the objects up to date, forever. Start from the version of the last `list`.

        Raises:
            ApiError: access is denied, and `forgiving` is False.
        """
        loop = asyncio.get_running_loop()
        pace = self._api.pace
        backoff = Backoff(pace.first_pause, pace.most_pause)
        while True:
            began, broke, named = loop.time(), True, 0.0
            try:
                if not self._version or loop.time() - self._listed_at >= pace.relist * 0.8:
                    await self.list()
                await self._watch()
                broke = False
            except ApiError as error:
                if error.status in (401, 403) and not self._forgiving:
                    raise
                (log.error if error.status in (401, 403, 404) else log.debug)(f"cannot watch: {error}")
                named = error.retry_after
                if error.status == 410:
                    self._version, self._why = "", "expired"
            except Exception:  # an object that cannot be processed must not hide all others
                log.exception("watching failed; trying again from a new list")
                self._version, self._why = "", "error"
            lasted = loop.time() - began
            if lasted > pace.outage and self._heard_at > began:
                backoff.reset()
            if broke or lasted < pace.outage:
                await asyncio.sleep(max(backoff.next(), named))

    async def _watch(self) -> None:
        """Run one watch, until the server ends it or the next list is due.

        Raises:
            ApiError: the watch broke, or the version is too old.
        """
        pace = self._api.pace
        loop = asyncio.get_running_loop()
        until_list = max(self._listed_at + pace.relist - loop.time(), 1.0)
        seconds = min(pace.watch * random.uniform(0.8, 1.0), until_list)
        query = {
            **self._selector,
            "resourceVersion": self._version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(max(1, round(seconds))),
        }
        with suppress(TimeoutError):  # in case the server ignores timeoutSeconds
            async with (
                asyncio.timeout(seconds + pace.silence),
                aclosing(self._api.watch(self._path, query)) as events,
            ):
                async for event in events:
                    self._heard_at = loop.time()
                    self._note(event)

    def _note(self, event: Object) -> None:
        kind, thing = event["type"], event["object"]
        if kind == "ERROR":
            raise ApiError("watch", thing.get("code", 500), thing.get("reason", ""), thing.get("message", ""))
        if kind == "DELETED":
            # Not if a new object has the name now, and not twice.
            if _uid(self.objects.get(thing["metadata"]["name"])) == _uid(thing):
                self._gone(thing)
        elif kind != "BOOKMARK":
            known = self.objects.get(thing["metadata"]["name"])
            if known is not None and _uid(known) != _uid(thing):
                self._gone(known)
            self._is(thing)
        self._version = thing["metadata"]["resourceVersion"]

    def _is(self, thing: Object) -> None:
        name = thing["metadata"]["name"]
        known = self.objects.get(name)
        self.objects[name] = thing
        if known is None or known["metadata"]["resourceVersion"] != thing["metadata"]["resourceVersion"]:
            self._changed(thing, False)

    def _gone(self, thing: Object) -> None:
        del self.objects[thing["metadata"]["name"]]
        self._changed(thing, True)


def _uid(thing: Object | None) -> str:
    return str(thing["metadata"]["uid"]) if thing is not None else ""


async def changes(
    api: Api, path: str, selector: dict[str, str], known: Iterable[Object] = ()
) -> AsyncGenerator[tuple[Object, bool], None]:
    """Yield each object that is new or has changed (False), or is gone (True), as it happens, without end.

    Args:
        known: objects that the caller has seen. They are yielded only if they have changed since.

    Raises:
        ApiError: the account may not watch these objects.
    """
    news: asyncio.Queue[tuple[Object, bool] | None] = asyncio.Queue()
    mirror = Informer(
        api, path, selector, lambda thing, gone: news.put_nowait((thing, gone)), forgiving=False
    )
    for thing in known:
        mirror.learn(thing)
    await mirror.list()
    running = asyncio.create_task(mirror.run())
    running.add_done_callback(lambda _: news.put_nowait(None))
    try:
        while (change := await news.get()) is not None:
            yield change
        running.result()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
