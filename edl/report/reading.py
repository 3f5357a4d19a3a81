# SPDX-License-Identifier: Apache-2.0
"""Reading of a job's timeline from its journal: one method for each event and effect that a report shows."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from edl.contract.modes import HOROVOD
from edl.contract.phases import WorkerState
from edl.contract.reasons import Reason
from edl.contract.steps import Steps
from edl.formatting import one_line
from edl.journal.format import JournalReader, next_segment, segments
from edl.report.pace import Paces
from edl.report.servers import ServerReading
from edl.report.timeline import Change, Entry, State, Timeline, Worker

_STATES = {
    WorkerState.PENDING: State.STARTING,
    WorkerState.STARTING: State.STARTING,
    WorkerState.INITIALIZING: State.INITIALIZING,
    WorkerState.READY: State.READY,
    WorkerState.MEMBER: State.MEMBER,
    WorkerState.DRAINING: State.DRAINING,
}


def read(output: Path) -> Timeline:
    """Read the journal of a job that runs or has ended.

    Raises:
        EdlError: a segment cannot be read, or is damaged.
    """
    return Following(output).read()


class Following:
    """A journal that grows: each call of `read` reads only the lines that are new.

    Args:
        output: the output directory of the job.

    Raises (also `read`):
        EdlError: a segment cannot be read, or is damaged. Then begin anew with a different `Following`.
    """

    def __init__(self, output: Path):
        self._reading = _Reading()
        self._segments = segments(output)  # the first one is being read, the last one may grow
        self._reading.head(self._segments[0])

    def read(self) -> Timeline:
        """Return the timeline up to the last line that is written."""
        while True:
            # The master appends no more to a segment that has a successor, so ask for this before reading.
            if len(self._segments) == 1 and (following := next_segment(self._segments[0])) is not None:
                self._segments.append(following)
            for _, entry in self._segments[0]:
                self._reading.note(entry)
            if len(self._segments) == 1:
                return self._reading.timeline_now()
            del self._segments[0]
            self._reading.head(self._segments[0])


class _Reading:
    """Builds a timeline line by line."""

    def __init__(self) -> None:
        self.timeline, self._workers = Timeline(), dict[int, Worker]()
        self._offset: float | None = None  # added to the time of a line; None: its first line is not read
        self._active = 0.0  # seconds of the job before the present master
        self._ring: tuple[int, ...] = ()
        self._generation = 0
        self._noticed: float | None = None  # when the cause of the next change was heard
        self._left: float | None = None
        self._waits: tuple[float, str] | None = None  # since when the ring makes no step, and the kind
        self._broken = ""
        self._orders = set[str]()  # Leave, Cut: how the members were ordered to leave the ring
        self._ending = False
        self._batch = 1
        self._seen: Entry = {}  # the newest head's state
        self._paces, self._servers = Paces(), ServerReading()
        self.timeline.paces = self._paces.by_worker
        self._now = 0.0

    def head(self, reader: JournalReader) -> None:
        """Read the head of a segment."""
        timeline, head = self.timeline, reader.head
        timeline.run_id, timeline.values = head["run_id"], head["values"]
        self._batch = int(timeline.values["training"]["batchSize"])
        if reader.begins:
            timeline.masters += 1
            self._offset = None
        elif self._offset is None:  # the oldest existing segment continues a deleted one
            self._restore(head["state"])

    def note(self, entry: Entry) -> None:
        """Read a line with an event and its effects."""
        event = entry["event"]
        if self._offset is None:
            past = event.get("active_seconds", 0.0) if event["type"] == "Adopted" else self._now
            self._offset = past - entry["now"]
        now = self._now = max(entry["now"] + self._offset, self._now)
        self._servers.note(event, now)
        handle = _EVENTS.get(event["type"])
        if handle is not None:
            handle(self, event, now)
        for effect in entry["effects"]:
            act = _EFFECTS.get(effect["type"])
            if act is not None:
                act(self, effect, now)

    def timeline_now(self) -> Timeline:
        """Return the timeline with open intervals closed now.

        Other threads may draw it while later lines are read.
        """
        now, found = self._now, self.timeline
        self._paces.settle()
        workers = {number: worker.until(now) for number, worker in self._workers.items()}
        servers = {index: server.until(now) for index, server in self._servers.servers.items()}
        return replace(
            found,
            ends=now,
            workers=workers,
            servers=servers,
            changes=[*found.changes],
            checkpoints=[*found.checkpoints],
            notices=[*found.notices],
            loss={**found.loss},
            trained={name: {**values} for name, values in found.trained.items()},
            held_out={name: {**values} for name, values in found.held_out.items()},
            paces={**found.paces},
            waits=[*found.waits, *([] if self._waits is None else [(self._waits[0], now, self._waits[1])])],
        )

    def _restore(self, kept: Any) -> None:
        """Begin with the state at a head: the time, the ring and its workers."""
        with suppress(LookupError, TypeError, ValueError):
            job = kept["Job"]
            lived = job["lifetime"]["Lifetime"]
            self._offset = float(lived.get("before", 0.0)) - float(lived["began_at"])
            self.timeline.begins = self._now = float(job["now"]) + self._offset
            self._ring = tuple(job["ring"]["Ring"]["members"]["tuple"])
            self._generation = int(job["ring"]["Ring"]["generation"])
            for number, record in job["pool"]["Pool"]["_workers"]["map"]:
                told = record["WorkerRecord"]["state"]["WorkerState"]
                state, now = _STATES[WorkerState(told)], self._now
                runs = None if told == WorkerState.PENDING else now
                self._workers[number] = Worker(number, state=state, since=now, runs_since=runs)
            layout = job["train"]["TrainTask"]["layout"]["Layout"]
            self.timeline.steps = Steps(int(layout["records"]), self._batch)
        if self._offset is None:
            self._offset = 0.0

    # --- workers

    def _worker(self, number: int, now: float) -> Worker:
        if number not in self._workers:
            self._workers[number] = Worker(number, since=now)
        return self._workers[number]

    def _adopted(self, event: Entry, now: float) -> None:
        for number, handle in event.get("workers", ()):
            self._seen_worker({"worker": number, "handle": handle}, now)

    def _seen_worker(self, event: Entry, now: float) -> None:
        worker = self._worker(event["worker"], now)
        worker.handle = event["handle"]
        worker.runs(now)

    def _hello(self, event: Entry, now: float) -> None:
        if not event.get("resumes"):
            self._worker(event["worker"], now).become(State.INITIALIZING, now)

    def _ready(self, event: Entry, now: float) -> None:
        self._worker(event["worker"], now).become(State.READY, now)
        if self.timeline.steps is None:
            self.timeline.steps = Steps(int(event["layout"]["records"]), self._batch)

    def _resume(self, event: Entry, now: float) -> None:
        inside = event.get("joined") and not event.get("left")
        self._worker(event["worker"], now).become(State.MEMBER if inside else State.READY, now)
        if inside and not self._ring:
            self._ring, self._generation = tuple(event["members"]), event["generation"]
        if self.timeline.steps is None:
            self.timeline.steps = Steps(int(event["layout"]["records"]), self._batch)

    def _joined(self, event: Entry, now: float) -> None:
        self._worker(event["worker"], now).become(State.MEMBER, now)
        if (change := self._change(event)) is not None and change.connected is None:
            change.connected = now

    def _leaving(self, event: Entry, now: float) -> None:
        worker = self._worker(event["worker"], now)
        worker.become(State.DRAINING, now)
        worker.ordered = True
        self._notice(event["worker"], now)

    def _left_ring(self, event: Entry, now: float) -> None:
        if event["generation"] != self._generation:
            return
        self._notice(event["worker"], now)
        self._wait_ends(now)
        self._left = now
        self._broken = self._broken or event.get("broken", "")

    def _silent(self, event: Entry, now: float) -> None:
        self._notice(event["worker"], now)

    def _failed(self, event: Entry, now: float) -> None:
        self._worker(event["worker"], now).failed = one_line(event["why"])
        self._notice(event["worker"], now)

    def _closed(self, event: Entry, now: float) -> None:
        worker = self._worker(event["worker"], now)
        worker.end(now)
        worker.lost = not worker.ordered and not self._ending
        worker.why = worker.failed or worker.why or (event.get("why", "") if worker.lost else "")
        self._notice(event["worker"], now)

    def _gone(self, event: Entry, now: float) -> None:
        worker = self._worker(event["worker"], now)
        worker.end(now)
        code, signal = event.get("code"), event.get("signal", "")
        worker.lost = not worker.ordered and not self._ending
        if worker.lost:
            worker.why = (
                worker.failed or event.get("why") or signal or (f"exit code {code}" if code else worker.why)
            )
        self._notice(event["worker"], now)

    def _notice(self, worker: int, now: float) -> None:
        """Remember when the master first heard of the cause of the next change."""
        if self._noticed is None and worker in self._ring:
            self._noticed = now

    # --- the ring

    def _change(self, event: Entry) -> Change | None:
        """The newest change, if the event is about it."""
        found = self.timeline.changes[-1] if self.timeline.changes else None
        return found if found is not None and found.generation == event["generation"] else None

    def _leave(self, effect: Entry, now: float) -> None:
        self._orders.add(effect["type"])
        if self._noticed is None:
            self._noticed = now

    def _cut(self, effect: Entry, now: float) -> None:
        self._orders.add(effect["type"])

    def _form(self, effect: Entry, now: float) -> None:
        members = tuple(effect["members"])
        self._wait_ends(now)
        noticed = now if self._noticed is None or not self._ring else self._noticed
        self.timeline.changes.append(
            Change(
                effect["generation"],
                members,
                self._ring,
                noticed,
                self._left if self._ring else None,
                now,
                broken=self._broken,
                planned=self._orders == {"Leave"} and not self._broken,
            )
        )
        stays = set(members)  # a ring may have thousands
        for number in self._ring:
            if number not in stays and (worker := self._workers.get(number)) is not None:
                worker.become(State.READY if worker.state is State.MEMBER else worker.state, now)
        # With mode=ps, workers do not wait for each other; a script of Horovod divides no records over them.
        if self.timeline.values.get("mode") not in ("ps", HOROVOD):
            self._paces.form(members, tuple(effect["shares"]), self._batch, effect.get("step", 0))
        self._ring, self._generation = members, effect["generation"]
        self._noticed, self._left, self._broken = None, None, ""
        self._orders.clear()

    def _stepped(self, event: Entry, now: float) -> None:
        if (change := self._change(event)) is None or event["worker"] in change.steppers:
            return  # a member repeats its report to each new master
        change.steppers.add(event["worker"])
        if change.stepped is None or event.get("stall_seconds", 0.0) > change.stall:
            change.stepped, change.stall = now, event.get("stall_seconds", 0.0)
        change.redone += event.get("redone_records", 0)
        self.timeline.redone_seconds += event.get("wasted_seconds", 0.0)

    def _stalled(self, event: Entry, now: float) -> None:
        if event["generation"] == self._generation:
            self._waits = now - event["seconds"], event["kind"]

    def _stall_ended(self, event: Entry, now: float) -> None:
        self._wait_ends(now)

    def _wait_ends(self, now: float) -> None:
        if self._waits is not None:
            self.timeline.waits.append((self._waits[0], now, self._waits[1]))
            self._waits = None

    def _stop(self, effect: Entry, now: float) -> None:
        worker = self._worker(effect["worker"], now)
        worker.ordered = True
        worker.become(State.DRAINING, now)

    def _fence(self, effect: Entry, now: float) -> None:
        worker = self._worker(effect["worker"], now)
        worker.end(now)
        worker.lost, worker.why = True, effect["why"]
        self._notice(effect["worker"], now)

    def _create(self, effect: Entry, now: float) -> None:
        self._worker(effect["worker"], now)

    def _export(self, effect: Entry, now: float) -> None:
        self._ending = True

    # --- training

    def _progress(self, event: Entry, now: float) -> None:
        if (loss := event.get("loss")) is not None:
            self.timeline.loss[event["step"]] = loss
        speeds = {int(number): speed for number, speed in (event.get("speeds") or {}).items()}
        for number, speed in speeds.items():
            self._worker(number, now).speed = speed
        if event["generation"] == self._generation:
            self._paces.reach(event["step"], speeds)

    def _epoch(self, event: Entry, now: float) -> None:
        if self.timeline.steps is None:
            return
        step = event["epochs"] * self.timeline.steps.per_epoch
        if event.get("loss"):
            self.timeline.trained.setdefault("loss", {})[step] = event["loss"]["mean"]
        for name, value in (event.get("metrics") or {}).items():
            if value is not None:
                self.timeline.trained.setdefault(name, {})[step] = value

    def _evaluated(self, event: Entry, now: float) -> None:
        for name, value in (event.get("metrics") or {}).items():
            if value is not None:
                self.timeline.held_out.setdefault((event["split"], name), {})[event["step"]] = value

    def _checkpointed(self, event: Entry, now: float) -> None:
        self.timeline.checkpoints.append((now, event["step"], event.get("nbytes", 0)))

    def _assigned(self, effect: Entry, now: float) -> None:
        self._servers.release(effect["servers"], now)

    def _told(self, effect: Entry, now: float) -> None:
        if effect["reason"] in _IMPORTANT:
            self.timeline.notices.append((now, effect["reason"], effect["text"]))
        elif effect["reason"] in (Reason.Stopped, Reason.Failed, Reason.Succeeded, Reason.Stopping):
            self._ending = True
        elif effect["reason"] in _CHANGES and self.timeline.changes:
            # "ring 2 -> 2 in 0.21 s, 0 records redone (parameter servers 2 -> 3)"
            self.timeline.changes[-1].cause = effect["text"].partition(" (")[2].removesuffix(")")


_CHANGES = (Reason.RingFormed, Reason.RingReshaped, Reason.RingBroken)
# Notices that are listed in the report. Changes of the ring are listed with their own numbers.
_IMPORTANT = frozenset(
    {
        Reason.StateLost,
        Reason.ReplicaDivergence,
        Reason.RolledBack,
        Reason.Restored,
        Reason.IncompatibleResume,
        Reason.WarmStarted,
        Reason.FailedOver,
        Reason.WorkerFailed,
        Reason.WorkerUnreachable,
        Reason.RestartBackOff,
        Reason.ServerExited,
        Reason.ServerUnavailable,
        Reason.ServerRemoved,
        Reason.ServerRestarted,
        Reason.Resharded,
        Reason.ReshardFailed,
        Reason.ModelWarning,
        Reason.BadRecord,
        Reason.CheckpointsOff,
        Reason.DeadlineExceeded,
        Reason.Scaled,
        Reason.EpochsChanged,
        Reason.Suspended,
        Reason.Resumed,
        Reason.Degraded,
        Reason.SaveFailed,
    }
)


_EVENTS = {
    "Adopted": _Reading._adopted,
    "Seen": _Reading._seen_worker,
    "Hello": _Reading._hello,
    "Ready": _Reading._ready,
    "Resume": _Reading._resume,
    "JoinedRing": _Reading._joined,
    "Leaving": _Reading._leaving,
    "LeftRing": _Reading._left_ring,
    "Silent": _Reading._silent,
    "Closed": _Reading._closed,
    "Failed": _Reading._failed,
    "Gone": _Reading._gone,
    "Stepped": _Reading._stepped,
    "Progress": _Reading._progress,
    "Stalled": _Reading._stalled,
    "StallEnded": _Reading._stall_ended,
    "EpochEnded": _Reading._epoch,
    "Evaluated": _Reading._evaluated,
    "Checkpointed": _Reading._checkpointed,
}


_EFFECTS = {
    "Assigned": _Reading._assigned,
    "Create": _Reading._create,
    "Cut": _Reading._cut,
    "Form": _Reading._form,
    "Leave": _Reading._leave,
    "Stop": _Reading._stop,
    "Fence": _Reading._fence,
    "Export": _Reading._export,
    "Notice": _Reading._told,
}
