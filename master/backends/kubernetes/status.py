# SPDX-License-Identifier: Apache-2.0
"""The status ConfigMap: it shows the job to users, and the next master continues from it.

The chart creates it (`<fullname>-status`), and only the master writes it. Each key is a short text, so that
`kubectl wait --for=jsonpath=...` and users can read it. `status.json` holds the whole status of a running
job, `summary.json` that of an ended job. `state`, `values` and `past` are for the next master. They do not
contain the text of the model, because etcd stores the whole object again at each write. `state` has its
digest, and the text is written once, into a separate object (`<fullname>-source`).

Promise: the object has what was written last. The response to each write shows the whole object, and the
object is also read from time to time. Keys that were removed are written again. A deleted object is created
again while the job exists.

Nothing waits for a write. While the API is unavailable, writes are repeated. A refusal is logged once and
passed to `report`; "" is passed once a write succeeds again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import structlog

import edl
from edl.config import model_check
from edl.contract.ids import RunId
from edl.fast_json import encoded
from edl.formatting import measured, numbered
from edl.kubernetes.client import SOON, Api, ApiError
from edl.kubernetes.rate_limit import Backoff
from edl.kubernetes.texts import cut
from edl.master.backends.kubernetes.event_recorder import rfc3339_now
from edl.master.backends.kubernetes.release import PAST, Place
from edl.master.core import facts

log = structlog.get_logger()

Data = dict[str, str | None]  # the ConfigMap's data; None removes a key

PROGRESS = frozenset({"progress", "etaSeconds", "goodput", "loss", "status.json"})  # written less often
NOT_IN_STATUS_JSON = ("seconds", "goodput", "news")  # they change all the time; other keys, Events have them
MAX_SUMMARY = 400_000  # bytes: JSON without characters beyond ASCII
MAX_STATUS = 100_000
MAX_TEXT = 10_000  # bytes of any other text
MAX_TEXTS = 20  # failures, and warnings, that the next master receives
MAX_LINE = 500  # bytes of each
MAX_NAMED = 8  # workers in one sentence
ADVICE = {
    403: "the master's account needs the verb patch for this ConfigMap (rbac.create=true)",
    404: "it was deleted, and so was the job; `helm upgrade` makes them again",
}
GENERAL_ADVICE = "progress is in the master's log and metrics meanwhile"


@dataclass(frozen=True)
class Snapshot:
    """The present state of a run.

    Args:
        job: the status of the job, as by `view.status`.
        values: the job's values that the run began with.
        next_id: the id of the next worker.
        scale_over: the id of the last `edl scale` that is superseded.
        started_at: when the run began, in seconds since 1970.
        requested: the `runId` of its values.
        past: the history of the run, for the summary of the next master; None without a history.
    """

    job: Mapping[str, Any]
    run_id: RunId
    values: Mapping[str, Any]
    next_id: int
    scale_over: str
    started_at: float = 0.0
    requested: str = ""
    past: facts.Past | None = None


@dataclass(frozen=True)
class Ended:
    """The summary of an ended run, and the time of its end."""

    summary: Mapping[str, Any]
    at: str


class Status:
    """Keeps the ConfigMap up to date.

    Args:
        place: the place of the release.
        metadata: returns metadata to create an object of that name; None if the job does not exist.
        snapshot: returns the present run; None while there is nothing to show.
        report: called with the reason when the API refuses a write, and with "" when a write succeeds again.
    """

    def __init__(
        self,
        api: Api,
        place: Place,
        metadata: Callable[[str], dict[str, Any] | None],
        snapshot: Callable[[], Snapshot | None],
        report: Callable[[str], None],
    ):
        self._api, self._place, self._metadata = api, place, metadata
        self._snapshot, self._report = snapshot, report
        self._source = ""  # the digest of the text that was written
        self._changed = asyncio.Event()
        self._there: Data | None = None  # the data, as last seen; None if unknown
        self._ended: Ended | None = None
        self._trouble = ""  # why the last write was refused; empty when it succeeded

    def changed(self) -> None:
        """Check for changes, and write them."""
        self._changed.set()

    def end(self, summary: Mapping[str, Any]) -> None:
        """Record the end of the run with its `summary`. Only the first call has an effect."""
        if self._ended is None:
            self._ended = Ended(summary, rfc3339_now())
            self.changed()

    async def run(self) -> None:
        """Write changes; does not return.

        A new phase is written at once. Other changes are written once a second at most, and less often if
        only the progress has changed.
        """
        pace, loop = self._api.pace, asyncio.get_running_loop()
        backoff = Backoff(pace.first_pause, pace.most_pause)
        written_at = -pace.drift
        while True:
            if not await self._changed_within(pace.relist):
                await self._look()
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
        """Write all pending changes.

        Raises:
            ApiError: the changes could not be written.
        """
        if new := self._new():
            await self._write(new)

    async def _changed_within(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        return self._changed.is_set()

    async def _look(self) -> None:
        """Read the object. Errors are ignored, because the response to the next write also shows it."""
        with suppress(ApiError):
            self._there = await read(self._api, self._place, self._place.names.status)

    def _new(self) -> Data:
        """The keys whose text differs from the object's."""
        snapshot = self._snapshot()
        if snapshot is None:
            return {}
        data = render(snapshot, self._ended)
        if self._there is None:
            return data
        return {key: text for key, text in data.items() if self._there.get(key) != text}

    async def _write(self, new: Data) -> None:
        try:
            await self._keep_source()
            name, stamp = self._place.names.status, {"updated": rfc3339_now()}
            snapshot = self._snapshot()
            whole = render(snapshot, self._ended) if snapshot is not None else {}
            self._there = await write(
                self._api, name, self._place, self._metadata, {**new, **stamp}, {**whole, **new, **stamp}
            )
        except ApiError as error:
            if not error.out:
                self._is_refused(error)
            raise
        self._tell("")
        if self._new():  # keys that were written earlier have been removed
            self.changed()

    async def _keep_source(self) -> None:
        """Write the text of the model, once in a run and before the status that refers to it.

        Raises:
            ApiError: the API is unavailable. A refusal is only logged.
        """
        snapshot = self._snapshot()
        text, digest = source(snapshot.values) if snapshot is not None else ("", "")
        if digest == self._source:
            return
        data: Data = {"model.py": text, "digest": digest}
        try:
            await write(self._api, self._place.names.source, self._place, self._metadata, data)
        except ApiError as error:
            if error.out:
                raise
            # Only a next master that finds a different text in the chart's object would need it.
            log.warning(f"configmap {self._place.names.source} cannot be written: {error}; {GENERAL_ADVICE}")
        self._source = digest

    def _is_refused(self, error: ApiError) -> None:
        name = self._place.names.status
        advice = ADVICE.get(error.status, GENERAL_ADVICE)
        self._tell(f"configmap {name} cannot be written: {error}; {advice}")

    def _tell(self, trouble: str) -> None:
        if trouble != self._trouble:
            self._trouble = trouble
            if trouble:
                log.warning(trouble)
            self._report(trouble)


async def write(
    api: Api,
    name: str,
    place: Place,
    metadata: Callable[[str], dict[str, Any] | None],
    data: Data,
    whole: Data | None = None,
) -> Data:
    """Write some keys of an object of the master; return all keys that it then has.

    Args:
        metadata: returns metadata to create an object of that name; None if it must not be created.
        whole: all keys for an object that is created; None: those of `data`.

    Raises:
        ApiError: the API refuses, or is unavailable.
    """
    try:
        answer = await api.patch(place.path("configmaps", name), {"data": data}, SOON)
    except ApiError as error:
        if error.status != 404 or (meta := metadata(name)) is None:
            raise
        if whole is not None:
            log.warning(f"configmap {name} is gone; making it anew")
        texts = {key: text for key, text in (whole or data).items() if text is not None}
        made = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": texts}
        answer = await api.create(place.path("configmaps"), made, SOON)
    return dict(answer.get("data") or {})


async def read(api: Api, place: Place, name: str) -> Data:
    """Read the data of an object that the master writes; empty if the object is missing.

    Raises:
        ApiError: the API refuses, or is unavailable.
    """
    try:
        return dict((await api.get(place.path("configmaps", name))).get("data") or {})
    except ApiError as error:
        if error.status != 404:
            raise
        log.warning(f"configmap {name}: not found; going on as if it were empty")
        return {}


def source(values: Mapping[str, Any]) -> tuple[str, str]:
    """The text of the model and its digest; both empty if the values have none."""
    text = str(values.get("model", {}).get("source") or "")
    return text, model_check.digest(text) if text else ""


def render(snapshot: Snapshot, ended: Ended | None) -> Data:
    """Render the ConfigMap's data, without the time of the write."""
    job = {**snapshot.job, "reason": cut(snapshot.job["reason"], MAX_TEXT)}
    task, eta, loss = job["task"], job["eta_seconds"], job["loss"]
    progress = 100 * task["step"] // task["steps"] if task["steps"] else 0
    spent = sum(job["goodput"].values())
    state = {"runId": snapshot.run_id, "nextId": snapshot.next_id, "version": edl.__version__}
    if snapshot.started_at:
        state["startedAt"] = int(snapshot.started_at)
    if snapshot.requested:
        state["requested"] = snapshot.requested
    if snapshot.scale_over:
        state["scaleOver"] = snapshot.scale_over
    if began_with := job.get("began_with"):
        state["beganWith"] = cut(began_with, MAX_TEXT)
    text, digest = source(snapshot.values)
    values = dict(snapshot.values)
    if text:
        state["source"] = digest
        values["model"] = {**values["model"], "source": ""}
    return {
        "phase": job["phase"],
        "reason": job["reason"],
        "progress": f"{progress}%",
        "etaSeconds": None if eta is None else str(_rounded(eta)),
        "ringSize": str(sum(w["rank"] is not None for w in job["workers"])),
        "workers": str(job["target"]),
        "waiting": cut(pending(job["workers"]), MAX_TEXT) or None,
        "goodput": f"{100 * job['goodput'].get('useful', 0.0) / spent:.0f}%" if spent else None,
        "epoch": f"{task['epoch']}/{task['epochs']}",
        "loss": None if loss is None else measured(loss),
        **condition(job.get("refused", "")),
        "checkpointStep": str(kept["step"]) if (kept := job.get("checkpoint")) else None,
        "stop": json.dumps(asked) if (asked := job.get("stop")) else None,
        "state": json.dumps(state),
        "values": json.dumps(values, sort_keys=True),
        "past": None if snapshot.past is None else _past(snapshot.past),
        "servers": None,  # written after the end of the run (ended_run)
        "endedAt": None if ended is None else ended.at,
        "status.json": _status_json(job) if ended is None else None,
        "summary.json": None if ended is None else _summary_json(ended.summary),
    }


def _past(past: facts.Past) -> str:
    """Encode the history as JSON of bounded length."""
    failures = tuple((worker, cut(why, MAX_LINE)) for worker, why in past.failures[-MAX_TEXTS:])
    warnings = tuple(cut(text, MAX_LINE) for text in past.warnings[:MAX_TEXTS])
    past = replace(past, failures=failures, warnings=warnings)
    text = PAST.dump_json(past).decode()
    if len(text) <= MAX_STATUS:
        return text
    result = replace(past.result, history={}, failed=past.result.failed[:MAX_TEXTS])
    return PAST.dump_json(replace(past, result=result)).decode()


def condition(refused: str) -> Data:
    """Render whether all values of the release are applied, and if not, which are refused and why."""
    return {
        "valuesApplied": "False" if refused else "True",
        "refused": cut(refused, MAX_TEXT) or None,
    }


def pending(workers: Sequence[Mapping[str, Any]]) -> str:
    """Which workers of `view.status` are pending, and why: `workers 2 and 3: no node has room ...`."""
    causes: dict[str, list[str]] = {}
    for w in workers:
        if w.get("delay"):
            causes.setdefault(w["delay"], []).append(str(w["id"]))
    return "; ".join(f"{numbered('worker', ids, MAX_NAMED)}: {cause}" for cause, ids in causes.items())


def _status_json(job: Mapping[str, Any]) -> str:
    """Encode the status for `edl status`; without workers if they do not fit, as their pods show them."""
    kept = {key: value for key, value in job.items() if key not in NOT_IN_STATUS_JSON}
    text = encoded(kept)
    return (text if len(text) <= MAX_STATUS else encoded({**kept, "workers": []})).decode()


def _summary_json(summary: Mapping[str, Any]) -> str:
    """Encode the summary; drop the oldest generations if they do not fit, as a ConfigMap holds 1 MiB."""
    text = json.dumps(summary)
    if len(text) > MAX_SUMMARY:
        text = json.dumps({**summary, "generations": summary.get("generations", [])[-100:]})
    if len(text) > MAX_SUMMARY:
        text = json.dumps({k: cut(str(summary.get(k)), MAX_TEXT) for k in ("phase", "reason")})
    return text


def _rounded(seconds: float) -> int:
    """Round to two digits, because the estimate fluctuates."""
    whole = round(seconds)
    return whole if whole < 100 else int(float(f"{whole:.1e}"))
