# SPDX-License-Identifier: Apache-2.0
"""The faults of `edl chaos`: their plan, which a seed fixes, and the report of a storm."""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from edl.contract.phases import ENDED, Phase
from edl.errors import ConfigError
from edl.formatting import how_many, measured

if TYPE_CHECKING:
    from edl.report.timeline import Change

PAUSE_SECONDS = (1.0, 20.0)  # shortest and longest SIGSTOP


class Kind(StrEnum):
    """The kinds of faults, by the names that --only takes."""

    kill = "kill"
    stop = "stop"
    term = "term"
    server = "server"


@dataclass(frozen=True)
class Fault:
    """One planned fault.

    Args:
        position: of the victim among the possible ones: from 0 (the first) up to, but excluding, 1.
        delay: time since the recovery from the fault before, as a multiple of its mean; 0 up to 2.
        seconds: length of the pause of a stopped worker.
    """

    kind: Kind
    position: float
    delay: float
    seconds: float

    def choose(self, victims: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Choose one of at least one possible victim."""
        return victims[int(self.position * len(victims))]


@dataclass(frozen=True)
class Hit:
    """A fault that was inflicted.

    Args:
        victim: the worker or the server, for people.
        recovered: seconds until all workers and servers were back and had made a step; None: never.
        stayed: whether the ring has waited for a stopped worker instead of replacing it.
    """

    fault: Fault
    victim: str
    recovered: float | None
    stayed: bool = False


def members(status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the workers in the ring."""
    return [worker for worker in status.get("workers") or [] if worker["state"] == "member"]


def candidates(status: Mapping[str, Any], kind: Kind) -> list[Mapping[str, Any]]:
    """Return the workers or servers that a fault of this kind may hit now.

    The only worker of a ring has the only copy of the state, so it is spared unless there are checkpoints.
    """
    if kind is Kind.server:
        return [server for server in status.get("servers") or [] if server["state"] == "running"]
    inside = members(status)
    return inside if len(inside) > 1 or status.get("checkpoint") is not None else []


def is_over(status: Mapping[str, Any]) -> bool:
    """Whether the job trains no further step."""
    return status["phase"] in (*ENDED, Phase.Ending)


class Recovery:
    """Notices from the status of a job that it has recovered from a fault.

    It has once the victim is out of the ring, the ring has its size again, all servers run, and a step is
    made after that. A stopped worker may stay in the ring.

    Args:
        before: the status before the fault.
        victim: the worker or server in it.
    """

    def __init__(self, before: Mapping[str, Any], kind: Kind, victim: Mapping[str, Any]):
        self._workers, self._restarts = len(members(before)), _restarts(before)
        self._kind, self._victim = kind, victim
        self._complete_at: int | None = None  # the step at which all were first seen to be back
        self._step = _step(before)

    def __call__(self, status: Mapping[str, Any]) -> bool:
        """Note a later status; return whether the job has recovered."""
        if not self._complete(status):
            self._complete_at = None
            return False
        if self._complete_at is None:
            self._complete_at = max(_step(status), self._step)
        return _step(status) > self._complete_at

    def _complete(self, status: Mapping[str, Any]) -> bool:
        inside = {worker["id"] for worker in members(status)}
        if len(inside) < min(self._workers, status.get("target", self._workers)):
            return False
        if self._kind is Kind.server:
            running = len(candidates(status, Kind.server)) == len(status["servers"])
            return running and _restarts(status) > self._restarts
        return self._kind is Kind.stop or self._victim["id"] not in inside


def _step(status: Mapping[str, Any]) -> int:
    return int(status.get("step") or 0)


def _restarts(status: Mapping[str, Any]) -> int:
    return sum(server.get("restarts", 0) for server in status.get("servers") or [])


def plan(seed: int, kinds: Sequence[Kind]) -> Iterator[Fault]:
    """Yield faults without end; the same ones for the same seed and kinds."""
    chance = random.Random(seed)
    while True:
        yield Fault(
            chance.choice(kinds), chance.random(), chance.uniform(0, 2), chance.uniform(*PAUSE_SECONDS)
        )


def kinds_of(only: str, possible: Sequence[Kind]) -> list[Kind]:
    """Parse --only, a list such as kill,term; empty: all possible kinds.

    Args:
        possible: the kinds that can hit this job.

    Raises:
        ConfigError: a kind is unknown or impossible.
    """
    names = [name.strip() for name in only.split(",")] if only else list(possible)
    for name in names:
        if name not in tuple(possible):
            why = "this job cannot be hit by it" if name in tuple(Kind) else "unknown kind"
            raise ConfigError(f"--only {name}: {why} (expected {', '.join(possible)})")
    return [kind for kind in Kind if kind in names]


def report(
    hits: Sequence[Hit], changes: Sequence[Change], data: Mapping[str, Any], audit: str, exact: bool
) -> dict[str, Any]:
    """Return the report of a storm, as docs/output.md describes it.

    Args:
        changes: the changes of the ring since the storm began.
        data: the job's status, or its summary.
        audit: the verdict of the audit, or why it failed.
        exact: whether each record counted once.
    """
    stalls = [change.stall for change in changes if change.stepped is not None]
    stalls += [hit.fault.seconds for hit in hits if hit.stayed]
    recoveries = [hit.recovered for hit in hits if hit.recovered is not None]
    return {
        "faults": dict(Counter(str(hit.fault.kind) for hit in hits)),
        "stalls": _spread(stalls),
        "recoveries": _spread(recoveries),
        "unrecovered": [hit.victim for hit in hits if hit.recovered is None],
        "redone_records": sum(change.redone for change in changes),
        "exact": exact,
        "audit": audit,
        "phase": str(data["phase"]),
        "reason": str(data["reason"]),
        "workers": None if data["phase"] in ENDED else len(members(data)),
        "target": data.get("target"),
        "metrics": final_metrics(data),
    }


def final_metrics(data: Mapping[str, Any]) -> dict[str, float]:
    """Return a job's training loss, and the held-out metrics if it has any."""
    found = {"loss": data.get("epoch_loss"), **(data.get("metrics") or {})}
    return {name: float(value) for name, value in found.items() if value is not None}


def _spread(seconds: Sequence[float]) -> dict[str, Any]:
    """Return the number of these times, their median and the longest one; null if there are no times."""
    some = bool(seconds)
    return {
        "count": len(seconds),
        "median_seconds": statistics.median(seconds) if some else None,
        "longest_seconds": max(seconds) if some else None,
    }


def lines(told: Mapping[str, Any]) -> list[str]:
    """Format a report for people."""
    faults = told["faults"]
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(faults.items()))
    text = {
        "faults": f"{sum(faults.values())}" + (f": {kinds}" if kinds else ""),
        "stalls": _words(told["stalls"]),
        "recovered": _words(told["recoveries"]),
        "redone": how_many(told["redone_records"], "record"),
        "audit": told["audit"] if told["exact"] else f"FAILED: {told['audit']}",
        "job": f"{told['phase']}: {told['reason']}",
    }
    if told["workers"] is not None:
        text["workers"] = f"{told['workers']} of {told['target']} in the ring"
    if told["unrecovered"] and told["phase"] not in ENDED:
        text["warning"] = f"no recovery was seen from the faults on {', '.join(told['unrecovered'])}"
    undisturbed = told.get("undisturbed", {})
    for name in sorted({*told["metrics"], *undisturbed}):
        values = [
            "none" if (value := found.get(name)) is None else measured(value)
            for found in (told["metrics"], undisturbed)
        ]
        text[name] = values[0] + (f", undisturbed {values[1]}" if undisturbed else "")
    return [f"{name:9} {value}" for name, value in text.items()]


def _words(spread: Mapping[str, Any]) -> str:
    if not (count := spread["count"]):
        return "none"
    return f"{count}, median {spread['median_seconds']:.2f} s, longest {spread['longest_seconds']:.2f} s"
