"""The status ConfigMap: what people see of the job, and what the next master goes on from.

The chart makes it (`<fullname>-status`), and only the master writes it. Each key is a short text, so that
`kubectl wait --for=jsonpath=...` and people can read it; `status.json` holds the whole status of a job that
runs, `summary.json` that of a job that has ended. `state` and `values` are for the next master.

Nothing waits for a write. While the API is unavailable it is tried again; what the API refuses is logged
once and handed to `report`; the same with an empty text once a write succeeds again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import structlog

from edl.contract.ids import RunId
from edl.kubernetes.client import SOON, Api, ApiError, Backoff
from master.backends.kubernetes.event_recorder import rfc3339_now

log = structlog.get_logger()

Data = dict[str, str | None]  # of the ConfigMap; None takes a key away

PROGRESS = frozenset({"progress", "etaSeconds", "goodput", "loss", "status.json"})  # written less often
NOT_IN_STATUS_JSON = ("seconds", "goodput", "news")  # they never rest; other keys and Events have them
MAX_SUMMARY = 400_000  # characters
MAX_STATUS = 100_000
MAX_NAMED = 8  # workers in one sentence
ADVICE = {
    403: "the master's account needs the verb patch for this ConfigMap (rbac.create=true)",
    404: "was it deleted? `helm upgrade` makes it again",
}
GENERAL_ADVICE = "progress is in the master's log and metrics meanwhile"


@dataclass(frozen=True)
class Snapshot:
    """A run as it is now.

    Args:
        job: as `view.status` shows it.
        values: the job's values that the run began with.
        next_id: of workers.
        scale_over: the id of the last `edl scale` that no longer holds.
    """

    job: Mapping[str, Any]
    run_id: RunId
    values: Mapping[str, Any]
    next_id: int
    scale_over: str


@dataclass(frozen=True)
class Ended:
    """How a run has ended, and when."""

    summary: Mapping[str, Any]
    at: str


class Status:
    """Keeps the ConfigMap up to date.

    Args:
        path: of the ConfigMap, at the API.
        snapshot: the run now; None while there is nothing to show.
        report: takes the reason when the API refuses a write, and "" when a write succeeds again.
    """

    def __init__(
        self, api: Api, path: str, snapshot: Callable[[], Snapshot | None], report: Callable[[str], None]
    ):
        self._api, self._path, self._snapshot, self._report = api, path, snapshot, report
        self._changed = asyncio.Event()
        self._written: Data = {}
        self._ended: Ended | None = None
        self._trouble = ""  # why the last write was refused; empty when it succeeded

    def changed(self) -> None:
        """Something may have changed: look, and write if it has."""
        self._changed.set()

    def end(self, summary: Mapping[str, Any]) -> None:
        """The run has ended now; `summary` is what is kept of it. Only the first call counts."""
        if self._ended is None:
            self._ended = Ended(summary, rfc3339_now())
            self.changed()

    async def run(self) -> None:
        """Write changes; does not return.

        At once when the phase is another one, else once a second at most, and less often when nothing has
        changed but the progress.
        """
        pace, loop = self._api.pace, asyncio.get_running_loop()
        backoff = Backoff(pace.first_pause, pace.most_pause)
        written_at = -pace.drift
        while True:
            await self._changed.wait()
            await asyncio.sleep(pace.look)  # changes come in bursts
            self._changed.clear()
            new = self._new()
            if not new:
                continue
            pause = pace.drift if new.keys() <= PROGRESS else pace.status
            early = written_at + pause - loop.time()
            if early > 0 and "phase" not in new:
                await self._changed_within(early)
                self._changed.set()
                continue
            try:
                await self._write(new)
                written_at = loop.time()
                backoff.reset()
            except ApiError as error:
                self._changed.set()
                await asyncio.sleep(max(backoff.next(), error.retry_after))

    async def flush(self) -> None:
        """Write what has not been written yet.

        Raises:
            ApiError: it could not be written.
        """
        if new := self._new():
            await self._write(new)

    async def _changed_within(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    def _new(self) -> Data:
        """What is to be written, as far as it is not what was written last."""
        snapshot = self._snapshot()
        if snapshot is None:
            return {}
        data = render(snapshot, self._ended)
        return {key: text for key, text in data.items() if self._written.get(key, "?") != text}

    async def _write(self, new: Data) -> None:
        try:
            await self._api.patch(self._path, {"data": {**new, "updated": rfc3339_now()}}, SOON)
        except ApiError as error:
            if not error.out:
                self._is_refused(error)
            raise
        self._tell("")
        self._written |= new

    def _is_refused(self, error: ApiError) -> None:
        name = self._path.rpartition("/")[2]
        advice = ADVICE.get(error.status, GENERAL_ADVICE)
        self._tell(f"configmap {name} cannot be written: {error}; {advice}")

    def _tell(self, trouble: str) -> None:
        if trouble != self._trouble:
            self._trouble = trouble
            if trouble:
                log.warning(trouble)
            self._report(trouble)


def render(snapshot: Snapshot, ended: Ended | None) -> Data:
    """The ConfigMap's data, all but the time of the write."""
    job = snapshot.job
    records, eta, loss = job["records"], job["eta_seconds"], job["loss"]
    progress = 100 * records["applied"] // records["total"] if records["total"] else 0
    spent = sum(job["goodput"].values())
    state = {"runId": snapshot.run_id, "nextId": snapshot.next_id}
    if snapshot.scale_over:
        state["scaleOver"] = snapshot.scale_over
    return {
        "phase": job["phase"],
        "reason": job["reason"],
        "progress": f"{progress}%",
        "etaSeconds": None if eta is None else str(_rounded(eta)),
        "ringSize": str(sum(w["rank"] is not None for w in job["workers"])),
        "workers": str(job["target"]),
        "waiting": pending(job["workers"]) or None,
        "goodput": f"{100 * job['goodput'].get('useful', 0.0) / spent:.0f}%" if spent else None,
        "epoch": f"{records['epoch']}/{records['epochs']}",
        "loss": None if loss is None else f"{loss:.4g}",
        "state": json.dumps(state),
        "values": json.dumps(snapshot.values, sort_keys=True),
        "endedAt": None if ended is None else ended.at,
        "status.json": _status_json(job) if ended is None else None,
        "summary.json": None if ended is None else _summary_json(ended.summary),
    }


def pending(workers: Sequence[Mapping[str, Any]]) -> str:
    """Which workers of `view.status` are pending, and why: `workers 2, 3: no node has room ...`."""
    causes: dict[str, list[str]] = {}
    for w in workers:
        if w.get("delay"):
            causes.setdefault(w["delay"], []).append(str(w["id"]))
    return "; ".join(f"{_named(ids)}: {cause}" for cause, ids in causes.items())


def _named(ids: list[str]) -> str:
    more = f" and {len(ids) - MAX_NAMED} more" if len(ids) > MAX_NAMED else ""
    return f"worker{'s' if len(ids) > 1 else ''} {', '.join(ids[:MAX_NAMED])}{more}"


def _status_json(job: Mapping[str, Any]) -> str:
    """For `edl status`. With thousands of workers it would not fit: their pods show them."""
    kept = {key: value for key, value in job.items() if key not in NOT_IN_STATUS_JSON}
    text = json.dumps(kept)
    return text if len(text) <= MAX_STATUS else json.dumps({**kept, "workers": []})


def _summary_json(summary: Mapping[str, Any]) -> str:
    """A ConfigMap holds 1 MiB: of a job with thousands of rings, the last ones are kept."""
    text = json.dumps(summary)
    if len(text) > MAX_SUMMARY:
        text = json.dumps({**summary, "generations": summary.get("generations", [])[-100:]})
    return text if len(text) <= MAX_SUMMARY else json.dumps({k: summary.get(k) for k in ("phase", "reason")})


def _rounded(seconds: float) -> int:
    """Two digits: an estimate that flickers says no more."""
    whole = round(seconds)
    return whole if whole < 100 else int(float(f"{whole:.1e}"))
