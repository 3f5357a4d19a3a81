# SPDX-License-Identifier: Apache-2.0
"""Events on the release's object, which `kubectl describe configmap <fullname>-job` lists.

`record` never waits. An Event is sent when its share of the rate limit allows it. Until then, equal Events
are merged into one with a count. For ten minutes after that, further equal Events increase the count of the
one that was sent. Events are for users: an Event that the API refuses is dropped, with a warning in the log.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import structlog

from edl.contract.reasons import Reason, Share
from edl.kubernetes.client import SOON, Api, ApiError
from edl.kubernetes.rate_limit import Backoff, Budget
from edl.kubernetes.texts import cut

log = structlog.get_logger()

COMPONENT = "edl-master"
BURST = {Share.MAJOR: 25, Share.MINOR: 15}  # Events that are sent at once; then one every `Pace.events`
REPEATED_SECONDS = 600.0  # an Event that is recorded again within this counts up instead
MAX_WAITING = 50  # Events of a share; a further one replaces one of its reason, and adds to its count
MAX_MESSAGE = 1024  # bytes; the API refuses more


@dataclass(frozen=True)
class Event:
    """The reason and the message of an Event."""

    reason: Reason
    message: str


@dataclass
class Occurrences:
    """Count and times of an Event since it was last sent."""

    count: int
    first: str
    last: str


@dataclass
class Sent:
    """An Event that was sent to the API."""

    name: str
    count: int
    at: float


class Queue:
    """The Events of one share that wait to be sent, the oldest first."""

    def __init__(self, budget: Budget):
        self.budget = budget
        self.filled = asyncio.Event()
        self._waiting: dict[Event, Occurrences] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, event: Event) -> None:
        """Add an event. A waiting event that is equal is counted once more instead.

        A full queue merges the event with one of the same reason, or drops it.
        """
        now = rfc3339_now()
        if len(self._waiting) >= MAX_WAITING and event not in self._waiting:
            alike = next((e for e in self._waiting if e.reason is event.reason), None)
            if alike is None:
                return
            self._waiting[event] = self._waiting.pop(alike)
        occurrences = self._waiting.setdefault(event, Occurrences(0, now, now))
        occurrences.count += 1
        occurrences.last = now
        self.filled.set()

    def pop(self) -> tuple[Event, Occurrences]:
        """Remove and return the oldest event, with how often and when it occurred."""
        event = next(iter(self._waiting))
        return event, self._waiting.pop(event)

    def put_back(self, event: Event, unsent: Occurrences) -> None:
        """Put an Event back at the front, merged with its later occurrences."""
        if since := self._waiting.pop(event, None):
            unsent = Occurrences(unsent.count + since.count, unsent.first, since.last)
        self._waiting = {event: unsent, **self._waiting}


class EventRecorder:
    """Records Events of one object.

    Args:
        namespace: the namespace of the object and of its Events.
        involved: the reference to the object, with its UID.
        pod: name of the master's pod.
    """

    def __init__(self, api: Api, namespace: str, involved: Callable[[], dict[str, str]], pod: str):
        self._api, self._namespace, self._involved, self._pod = api, namespace, involved, pod
        self._path = f"/api/v1/namespaces/{namespace}/events"
        self._queues = {share: Queue(Budget(api.pace.events, BURST[share])) for share in Share}
        self._sent: dict[Event, Sent] = {}
        self._refused = ""

    def record(self, reason: Reason, message: str) -> None:
        """Queue an Event. Returns at once."""
        self._queues[reason.share].add(Event(reason, cut(message, MAX_MESSAGE)))

    async def run(self) -> None:
        """Send the queued Events; does not return."""
        async with asyncio.TaskGroup() as senders:
            for queue in self._queues.values():
                senders.create_task(self._send_all(queue))

    async def flush(self) -> None:
        """Send all queued Events, regardless of the rate limit.

        Raises:
            ApiError: an Event could not be sent.
        """
        for queue in self._queues.values():
            while queue:
                await self._send_first(queue)

    async def _send_all(self, queue: Queue) -> None:
        backoff = Backoff(self._api.pace.first_pause, self._api.pace.most_pause)
        while True:
            await queue.filled.wait()
            queue.filled.clear()
            while queue:
                await queue.budget.take(SOON)
                try:
                    await self._send_first(queue)
                    backoff.reset()
                except ApiError as error:
                    self._warn(error)
                    await asyncio.sleep(max(backoff.next(), error.retry_after))

    async def _send_first(self, queue: Queue) -> None:
        event, occurrences = queue.pop()
        try:
            await self._send(event, occurrences)
        except ApiError as error:
            if error.out:  # the API is unavailable; after a refusal, repeating would not help
                queue.put_back(event, occurrences)
            raise
        except asyncio.CancelledError:  # the master exits and flushes: an Event sent twice beats a lost one
            queue.put_back(event, occurrences)
            raise

    async def _send(self, event: Event, occurrences: Occurrences) -> None:
        now = asyncio.get_running_loop().time()
        self._sent = {e: sent for e, sent in self._sent.items() if now - sent.at <= REPEATED_SECONDS}
        if sent := self._sent.get(event):
            sent.count, sent.at = sent.count + occurrences.count, now
            repeated = {"count": sent.count, "lastTimestamp": occurrences.last}
            await self._api.patch(f"{self._path}/{sent.name}", repeated, SOON)
        else:
            made = self._made(event, occurrences)
            await self._api.create(self._path, made, SOON)
            self._sent[event] = Sent(made["metadata"]["name"], occurrences.count, now)

    def _made(self, event: Event, occurrences: Occurrences) -> dict[str, Any]:
        involved = self._involved()
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {
                "name": f"{involved['name']}.{secrets.token_hex(8)}",
                "namespace": self._namespace,
            },
            "involvedObject": {**involved, "namespace": self._namespace},
            "type": str(event.reason.severity),
            "reason": str(event.reason),
            "message": event.message,
            "source": {"component": COMPONENT},
            "reportingComponent": COMPONENT,
            "reportingInstance": self._pod,
            "firstTimestamp": occurrences.first,
            "lastTimestamp": occurrences.last,
            "count": occurrences.count,
        }

    def _warn(self, error: ApiError) -> None:
        """Log once per cause that the API refuses Events; skip outages of the API."""
        if not error.out and error.message != self._refused:
            self._refused = error.message
            log.warning(
                f"an Event was refused and is dropped: {error}; "
                "the master's account needs the verbs create and patch for events (docs/access.md)"
            )


def rfc3339_now() -> str:
    """Return the present time in UTC with whole seconds, as Kubernetes writes times."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
