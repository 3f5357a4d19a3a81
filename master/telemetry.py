# SPDX-License-Identifier: Apache-2.0
"""Telemetry: reduces heartbeats to the few events that the core needs.

The loop passes all events and heartbeats to `Telemetry.hears` first. Heartbeats are not passed on: the newest
of each worker is kept for the status. The core receives events that may need a decision or belong in the
journal:

    Progress    the progress of the ring: every few seconds, and before events that may change the ring
    Stalled     the ring makes no step, and members wait for parameter servers or for records
    StallEnded  it has made a step again
    Silent      a worker has sent nothing for the heartbeat timeout
    Heard       a silent worker has sent a message again

The cost of a heartbeat does not depend on the number of workers. Time is an argument, so the simulator runs
the same code.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate

from edl.config import Config
from edl.contract.heartbeats import Staleness
from edl.contract.ids import WorkerId
from edl.master.core import events as ev
from edl.master.core.facts import Heartbeat
from edl.master.core.goodput import RECORDS, SERVERS
from edl.master.core.latest import later_loss

PROGRESS_SECONDS = 10.0  # between two reports to the core
STALL_SECONDS = 1.0  # a shorter wait is a part of a slow step
NO_WORKER = WorkerId(-1)
NOTABLE = 0.1  # relative change of a speed that is reported
# Before one of these events the core needs the ring's progress, because the ring may end with it.
TURNS = (ev.LeftRing, ev.Failed, ev.Closed, ev.Gone, ev.Live, ev.StopAsked)

SAID = Heartbeat | ev.WorkerMessage | ev.RingMessage  # messages of workers


class Telemetry:
    """The telemetry of one master's workers."""

    def __init__(self, config: Config) -> None:
        self._silence = config.elastic.heartbeat_timeout_seconds
        self.beats: dict[WorkerId, Heartbeat] = {}  # the last heartbeat of each worker
        self.ahead: ev.Progress | None = None  # progress that is not reported to the core yet
        self._staleness: dict[WorkerId, Staleness] = {}  # as last reported by each worker
        self._generation = 0  # of the newest known ring
        self._reached, self._reached_at = (0, 0), float("-inf")  # step and round of that ring, and since when
        self._stalled = False  # whether the core knows that it makes no step
        self._told: ev.Progress | None = None
        self._told_at = float("-inf")
        self._speeds: dict[WorkerId, float] = {}  # as reported to the core
        self._heard = OrderedDict[WorkerId, float]()  # time of each worker's last message, oldest first
        self._silent = set[WorkerId]()  # workers that were reported as silent
        self._listened = float("-inf")

    def hears(self, said: ev.Event | Heartbeat, now: float) -> Iterator[ev.Event]:
        """Process an event or a heartbeat; yield the events for the core, in order."""
        self._listens(now)
        speaker: WorkerId = getattr(said, "worker", NO_WORKER)
        if speaker in self._silent and isinstance(said, SAID) and not isinstance(said, ev.Closed):
            self._silent.discard(speaker)
            self._heard[speaker] = now
            yield ev.Heard(speaker)
        match said:
            case Heartbeat(worker):
                self._note(said, now)
                yield from self._stalls(said, now)
                if now >= self._told_at + PROGRESS_SECONDS:
                    yield from self._tell(now)
            case ev.Ready(worker) | ev.Resume(worker):  # from now on it sends heartbeats
                self._heard[worker] = now
            case ev.Closed(worker) | ev.Gone(worker) | ev.Failed(worker):
                self._heard.pop(worker, None)
                self._silent.discard(worker)
                self.beats.pop(worker, None)
                self._speeds.pop(worker, None)
                self._staleness.pop(worker, None)
        if speaker in self._heard and isinstance(said, SAID):  # others speak about a worker, too
            self._heard[speaker] = now
            self._heard.move_to_end(speaker)
        if isinstance(said, Heartbeat):
            return
        if isinstance(said, TURNS):
            yield from self._tell(now)
        yield said

    # --- silence

    def next_deadline(self) -> float | None:
        """Return when the next heartbeat timeout passes.

        If all workers have fallen silent at about the same time, wait until it has passed for all of them:
        they may hold the state together, and the core must not take one for the successor of the others.
        """
        if not self._heard:
            return None
        oldest, newest = next(iter(self._heard.values())), next(reversed(self._heard.values()))
        return (newest if newest - oldest < self._silence / 4 else oldest) + self._silence

    def passes(self, now: float) -> list[ev.Event]:
        """Return the events of heartbeat timeouts that have passed without a message up to `now`."""
        self._listens(now)
        found: list[ev.Event] = []
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            also = [worker for worker, heard in self._heard.items() if heard + self._silence <= now][1:]
            worker, heard = self._heard.popitem(last=False)
            self._silent.add(worker)
            found += [*self._tell(now), ev.Silent(worker, now - heard, () if found else tuple(also))]
        return found

    def _listens(self, now: float) -> None:
        """Extend heartbeat timeouts after a stall of the master, as messages of workers wait to be read.

        Heartbeats come every sixth of the timeout. If nothing was received for half of it, the master was
        stalled, or all workers are silent; then a moment more costs little.
        """
        if now - self._listened > self._silence / 2:
            for worker, heard in self._heard.items():  # assignment keeps their order
                self._heard[worker] = max(heard, now - self._silence * 3 / 4)
        self._listened = now

    # --- progress

    def _note(self, beat: Heartbeat, now: float) -> None:
        self.beats[beat.worker] = beat
        if beat.staleness is not None:
            self._staleness[beat.worker] = beat.staleness
        if beat.generation == 0 or beat.generation < self._generation:
            return  # the worker is in no ring, or in an earlier one
        if beat.generation > self._generation:
            self._generation, self.ahead = beat.generation, None
            self._reached, self._reached_at, self._stalled = (beat.step, beat.round), now, False
        before = self.ahead or ev.Progress(beat.generation, 0)
        told = self._speeds.get(beat.worker, 0.0)
        if beat.speed > 0 and abs(beat.speed - told) > NOTABLE * told:
            before.speeds[beat.worker] = beat.speed
        step, round = max((before.step, before.round), (beat.step, beat.round))
        self.ahead = replace(
            before,
            step=step,
            round=round,
            loss=before.loss if beat.loss is None else beat.loss,
            epoch_loss=later_loss(before.epoch_loss, beat.epoch_loss),
        )

    def _stalls(self, beat: Heartbeat, now: float) -> Iterator[ev.Event]:
        """Report that the ring makes no step because members wait, or that it makes steps again."""
        if beat.generation == 0 or beat.generation < self._generation:
            return
        if (beat.step, beat.round) > self._reached:
            self._reached, self._reached_at = (beat.step, beat.round), now
            if self._stalled:
                self._stalled = False
                yield ev.StallEnded(beat.generation)
        elif not self._stalled:
            kind, waited = _awaited(beat)
            seconds = min(waited, now - self._reached_at)
            if seconds >= STALL_SECONDS:
                self._stalled = True
                yield ev.Stalled(beat.generation, kind, seconds)

    def _tell(self, now: float) -> Iterator[ev.Progress]:
        ahead = self.newest
        if ahead is not None and ahead != self._told:  # else the ring made no progress
            self._told, self._told_at = replace(ahead, speeds={}), now
            self._speeds.update(ahead.speeds)
            yield ahead
        self.ahead = None

    @property
    def newest(self) -> ev.Progress | None:
        """Progress that is not reported to the core yet, with the staleness over all workers."""
        if self.ahead is None or not (told := self._staleness.values()):
            return self.ahead
        return replace(self.ahead, staleness=_together(sorted(told, key=lambda one: one.median)))


def _awaited(beat: Heartbeat) -> tuple[str, float]:
    """Return what a member waits for, as a kind of the goodput, and for how many seconds.

    Code of the user is not awaited: it is a part of a step, or of what comes between two.
    """
    if beat.waits is not None:
        return SERVERS, beat.waits.seconds
    if beat.activity is not None and beat.activity.awaits:
        return RECORDS, beat.activity.seconds
    return "", 0.0


def _together(told: list[Staleness]) -> Staleness:
    """Combine the staleness of all workers' last steps.

    Args:
        told: sorted by median. The combined median is the weighted one: that of the worker at which half of
            all steps are reached.
    """
    steps = list(accumulate(one.steps for one in told))
    middle = next(one for one, so_far in zip(told, steps, strict=True) if 2 * so_far >= steps[-1])
    most, repeated = max(one.most for one in told), max(one.repeated for one in told)
    return Staleness(steps[-1], middle.median, most, repeated)
