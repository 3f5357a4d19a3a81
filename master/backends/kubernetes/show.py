"""What people see with kubectl: the status ConfigMap, and Events on the release's object.

None of it decides anything, all of it is behind what makes and deletes pods, and when the API does
not take it, it is written later or not at all.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import structlog

from edl.contract.ids import RunId
from edl.kubernetes.client import SOON, Api, ApiError, Backoff, Budget

log = structlog.get_logger()

DRIFT = ("progress", "etaSeconds", "goodput", "loss", "status.json")  # they change all the time
REASONS = {
    "ring": "RingReshaped", "worker": "Worker", "scale": "Scaled", "epoch": "EpochApplied",
    "fail": "WorkerFailed", "end": "Finished", "refused": "SpecRefused",
}  # fmt: skip
WORKER_REASONS = {
    " is ready ": "WorkerReady", " is waited for": "WorkerWaiting", " is to leave": "WorkerLeaving",
    " is lost": "WorkerLost", " has ended": "WorkerEnded",
}  # fmt: skip
MINOR = frozenset({"Worker", "EpochApplied", *WORKER_REASONS.values()})
WARNINGS = frozenset({"fail", "refused"})
ALIKE_SECONDS = 600.0  # an Event that comes again within this counts up instead
MOST_SUMMARY = 400_000
MOST_STATUS = 100_000
TOLD_ELSEWHERE = ("seconds", "goodput", "news")  # by other keys, by Events; and two of them never rest
MOST_WAITING = 50
MOST_NAMED = 8  # workers in one sentence
MOST_MESSAGE = 1024  # characters; more is not taken


def waiting(workers: Sequence[Mapping[str, Any]]) -> str:
    """Which workers of `view.status` are waited for, and why: `workers 2, 3: no node has room ...`."""
    causes: dict[str, list[str]] = {}
    for w in workers:
        if w.get("delay"):
            causes.setdefault(w["delay"], []).append(str(w["id"]))
    return "; ".join(f"{_named(ids)}: {cause}" for cause, ids in causes.items())


def _named(ids: list[str]) -> str:
    more = f" and {len(ids) - MOST_NAMED} more" if len(ids) > MOST_NAMED else ""
    return f"worker{'s' if len(ids) > 1 else ''} {', '.join(ids[:MOST_NAMED])}{more}"


class Status:
    """The release's status ConfigMap, which the chart makes and only the master writes."""

    def __init__(self, api: Api, path: str):
        self._api, self.path, self._pace = api, path, api.pace
        self._status: Callable[[], dict[str, Any]] = dict
        self._written: dict[str, str | None] = {}
        self._run_id = RunId("")
        self._values: dict[str, Any] = {}
        self._wake = asyncio.Event()
        self.next_id = 0
        self._summary: dict[str, Any] | None = None  # once the job has ended
        self._ended_at: str | None = None
        self.scale_over = ""  # the id of an `edl scale` that must not come back

    def begin(self, status: Callable[[], dict[str, Any]], run_id: RunId, values: dict[str, Any]) -> None:
        self._status, self._run_id, self._values = status, run_id, values

    def now(self) -> dict[str, Any]:
        """The job now, as `view.status` tells it."""
        return self._status()

    def end(self, summary: dict[str, Any]) -> None:
        """The job has ended, just now; `summary` is what is kept of it."""
        if self._summary is None:
            self._summary, self._ended_at = summary, _rfc3339()
            self.changed()

    def changed(self) -> None:
        """Something may have changed."""
        self._wake.set()

    async def run(self) -> None:
        """Write what has changed: at most once a second, and less often if it is only progress."""
        loop = asyncio.get_running_loop()
        backoff = Backoff(self._pace.first_pause, self._pace.most_pause)
        written_at = -self._pace.drift
        while True:
            await self._wake.wait()
            await asyncio.sleep(self._pace.look)
            self._wake.clear()
            new = self._new()
            age = loop.time() - written_at
            if new and ("phase" in new or age >= self._wait(new)):
                try:
                    await self._write(new)
                    written_at = loop.time()
                    backoff.reset()
                except ApiError as error:
                    log.debug(f"status: {error}")
                    self._wake.set()
                    await asyncio.sleep(max(backoff.next(), error.retry_after))
            elif new:
                try:
                    async with asyncio.timeout(self._wait(new) - age):
                        await self._wake.wait()
                except TimeoutError:
                    self._wake.set()

    def _wait(self, new: Mapping[str, Any]) -> float:
        return self._pace.drift if all(key in DRIFT for key in new) else self._pace.status

    async def flush(self) -> None:
        """Write what has not been written yet.

        Raises:
            ApiError: it could not be.
        """
        if self._run_id and (new := self._new()):
            await self._write(new)

    def _new(self) -> dict[str, str | None]:
        data = self._data()
        return {key: value for key, value in data.items() if self._written.get(key, "?") != value}

    async def _write(self, new: dict[str, str | None]) -> None:
        await self._api.patch(self.path, {"data": {**new, "updated": _rfc3339()}}, SOON)
        self._written |= new

    def _data(self) -> dict[str, str | None]:
        s = self._status()
        if not s:
            return {}
        records, eta = s["records"], s["eta_seconds"]
        progress = 100 * records["applied"] // records["total"] if records["total"] else 0
        spent = sum(s["goodput"].values())
        return {
            "phase": s["phase"],
            "reason": s["reason"],
            "progress": f"{progress}%",
            "etaSeconds": None if eta is None else str(_rounded(eta)),
            "ringSize": str(sum(w["rank"] is not None for w in s["workers"])),
            "workers": str(s["target"]),
            "waiting": waiting(s["workers"]) or None,
            "goodput": f"{100 * s['goodput'].get('useful', 0.0) / spent:.0f}%" if spent else None,
            "epoch": f"{records['epoch']}/{records['epochs']}",
            "loss": None if s["loss"] is None else f"{s['loss']:.4g}",
            "state": json.dumps(
                {"runId": self._run_id, "nextId": self.next_id}
                | ({"scaleOver": self.scale_over} if self.scale_over else {})
            ),
            "values": json.dumps(self._values, sort_keys=True),
            "endedAt": self._ended_at,
            "status.json": _in_full(s) if self._summary is None else None,
            "summary.json": None if self._summary is None else _fitting(self._summary),
        }


def _fitting(summary: dict[str, Any]) -> str:
    """A ConfigMap holds 1 MiB: of a job with thousands of rings, the last ones are kept."""
    text = json.dumps(summary)
    if len(text) > MOST_SUMMARY:
        text = json.dumps({**summary, "generations": summary.get("generations", [])[-100:]})
    return text if len(text) <= MOST_SUMMARY else json.dumps({k: summary.get(k) for k in ("phase", "reason")})


def _in_full(status: dict[str, Any]) -> str:
    """For `edl status`; of thousands of workers only their pods tell."""
    told = {key: value for key, value in status.items() if key not in TOLD_ELSEWHERE}
    text = json.dumps(told)
    return text if len(text) <= MOST_STATUS else json.dumps({**told, "workers": []})


def _rounded(seconds: float) -> int:
    """Two digits: an estimate that flickers says no more."""
    whole = round(seconds)
    return whole if whole < 100 else int(float(f"{whole:.1e}"))


@dataclass
class _News:
    """What is to be told: how often it happened, when first and last."""

    count: int
    first: str
    last: str


@dataclass
class _Event:
    name: str
    at: float
    count: int = 1


class _Line:
    """News that wait for their turn, the oldest first, by (reason, message, warning)."""

    def __init__(self, budget: Budget):
        self.budget, self.wake = budget, asyncio.Event()
        self.waiting: dict[tuple[str, str, bool], _News] = {}

    def add(self, key: tuple[str, str, bool]) -> None:
        now = _rfc3339()
        if len(self.waiting) >= MOST_WAITING and key not in self.waiting:
            alike = next((k for k in self.waiting if k[0] == key[0]), None)
            if alike is None:
                return
            self.waiting[key] = self.waiting.pop(alike)
        news = self.waiting.setdefault(key, _News(0, now, now))
        news.count, news.last = news.count + 1, now
        self.wake.set()

    def put_back(self, key: tuple[str, str, bool], news: _News) -> None:
        if again := self.waiting.pop(key, None):
            news = _News(news.count + again.count, news.first, again.last)
        self.waiting = {key: news, **self.waiting}


class Events:
    """Events on the release's object: what `kubectl describe configmap <fullname>-job` shows."""

    def __init__(self, api: Api, namespace: str, owner: Callable[[], dict[str, str]], pod: str):
        self._api, self._namespace, self._owner, self._pod = api, namespace, owner, pod
        self._path = f"/api/v1/namespaces/{namespace}/events"
        # Each with a share of its own: an epoch a second must not keep a change of the ring waiting.
        self._major, self._minor = _Line(Budget(api.pace.events, 25)), _Line(Budget(api.pace.events, 15))
        self._sent: dict[tuple[str, str], _Event] = {}

    def say(self, kind: str, text: str) -> None:
        """What the core has said."""
        reason = REASONS.get(kind, kind.capitalize())
        if kind == "end" and not text.startswith("Succeeded") and ":" in text:
            reason = {"Failed": "Failed", "Stopped": "Stopped"}.get(text.split(":")[0], reason)
        if kind == "worker":
            reason = next((r for words, r in WORKER_REASONS.items() if words in text), reason)
        if kind == "ring" and not text.startswith("ring "):
            reason = "Ring"
        self.note(reason, text, warning=kind in WARNINGS or reason == "Failed")

    def note(self, reason: str, message: str, warning: bool = False) -> None:
        """Something has happened. When there is too much to tell, alike ones are told as one."""
        line = self._minor if reason in MINOR else self._major
        line.add((reason, message[:MOST_MESSAGE], warning))

    async def run(self) -> None:
        async with asyncio.TaskGroup() as both:
            both.create_task(self._send_all(self._major))
            both.create_task(self._send_all(self._minor))

    async def flush(self) -> None:
        """Send what waits, without a budget.

        Raises:
            ApiError: it could not be sent.
        """
        for line in (self._major, self._minor):
            while line.waiting:
                await self._send_first(line)

    async def _send_all(self, line: _Line) -> None:
        backoff = Backoff(self._api.pace.first_pause, self._api.pace.most_pause)
        while True:
            await line.wake.wait()
            line.wake.clear()
            while line.waiting:
                await line.budget.take(SOON)
                try:
                    await self._send_first(line)
                    backoff.reset()
                except ApiError as error:
                    log.debug(f"events: {error}")
                    await asyncio.sleep(max(backoff.next(), error.retry_after))

    async def _send_first(self, line: _Line) -> None:
        key = next(iter(line.waiting))
        news = line.waiting.pop(key)
        try:
            await self._send(*key, news)
        except ApiError as error:
            if error.out:  # else it is not wanted, and never will be
                line.put_back(key, news)
            raise
        except asyncio.CancelledError:  # this master goes: rather twice than never
            line.put_back(key, news)
            raise

    async def _send(self, reason: str, message: str, warning: bool, news: _News) -> None:
        loop = asyncio.get_running_loop()
        for old in [k for k, e in self._sent.items() if loop.time() - e.at > ALIKE_SECONDS]:
            del self._sent[old]
        if known := self._sent.get((reason, message)):
            known.count += news.count
            known.at = loop.time()
            body: dict[str, Any] = {"count": known.count, "lastTimestamp": news.last}
            await self._api.patch(f"{self._path}/{known.name}", body, SOON)
            return
        owner = self._owner()
        made = _Event(f"{owner['name']}.{secrets.token_hex(8)}", loop.time(), news.count)
        await self._api.create(self._path, {
            "apiVersion": "v1", "kind": "Event",
            "metadata": {"name": made.name, "namespace": self._namespace},
            "involvedObject": {**owner, "namespace": self._namespace},
            "type": "Warning" if warning else "Normal", "reason": reason, "message": message,
            "source": {"component": "edl-master"}, "reportingComponent": "edl-master",
            "reportingInstance": self._pod,
            "firstTimestamp": news.first, "lastTimestamp": news.last, "count": news.count,
        }, SOON)  # fmt: skip
        self._sent[reason, message] = made


def _rfc3339() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
