# SPDX-License-Identifier: Apache-2.0
"""One training job: the only entry point for events, and the reconciliation after each.

`Job.handle(event, now)` records the event, then reconciles: it returns the effects that the new state needs.
Reconciliation depends on the state only, not on the event, so duplicate and late events are harmless.

The life of a job, and the modules of its parts:

    workers are created and get ready       membership.scale, admission.ready
    ready workers form a ring               rendezvous.form; its members: quorum
    its members train, step by step         training.progress
    workers join or leave: re-rendezvous    rendezvous.regroup: at a step boundary
    a lost worker breaks the ring           membership.lose, timeouts: the ring is cut and formed again
    a silent worker is awaited or removed   silence
    failures are charged or excused         membership.charge, failures
    a member saves the complete model       completion.export, completion.saved
    a user stops the job early              stopping
    all workers are stopped                 completion.shut_down_workers

All modules work on one `State`. The ring is authoritative for progress (the step number is part of the state
that is synced); the master copies it from the root at each re-rendezvous and keeps nothing that could
contradict it. So a new master can continue from the reports of the workers: `failover`, `takeover`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from edl.master.core import (
    admission,
    checkpoint_events,
    completion,
    membership,
    ps,
    rendezvous,
    reports,
    requests,
    ring_events,
    silence,
    stopping,
    takeover,
    training,
)
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core.state import DEADLINES, State
from edl.master.core.workers import AWAY, WorkerRecord

# The handler of each event. `_reconcile` follows, whichever it was.
OF_THE_JOB: Mapping[type, Callable[[State, Any], None]] = {
    # of users and time
    ev.Begin: requests.begin,
    ev.Scale: requests.scale,
    ev.Live: requests.live,
    ev.Refused: requests.refused,
    ev.StopAsked: stopping.asked,
    ev.CheckpointAsked: requests.checkpoint,
    ev.Tick: lambda job, event: None,  # the reconciliation does the rest
    # of the master and its backend
    ev.Adopted: takeover.adopted,
    ev.Seen: admission.seen,
    ev.Delayed: admission.delayed,
    ev.Gone: membership.gone,
    ev.Terminating: membership.terminating,
    ev.Degraded: reports.degraded,
    # of heartbeats
    ev.Progress: ring_events.progress,
    ev.Stalled: ring_events.stalled,
    ev.StallEnded: ring_events.stall_ended,
    ev.Silent: silence.begins,
    ev.Heard: silence.ends,
    # of parameter servers
    ev.ServerListens: ps.listens,
    ev.ServerRecovered: ps.answers,
    ev.ServersReady: ps.ready,
    ev.ServerAway: ps.away,
    ev.ProbeUnanswered: ps.unanswered,
    ev.ServersGivenUp: ps.given_up,
    ev.ServerExited: ps.exited,
}
# Messages of a worker that is in the job; those of others are stale.
OF_A_WORKER: Mapping[type, Callable[[State, WorkerRecord, Any], None]] = {
    ev.Hello: admission.hello,
    ev.Built: admission.built,
    ev.Ready: admission.ready,
    ev.Resume: admission.resume,
    ev.Leaving: membership.leaving,
    ev.Failed: membership.failed,
    ev.Closed: membership.closed,
    ev.Saved: completion.saved,
    ev.Finished: completion.finished,
    ev.RowsLost: completion.rows_lost,
    ev.History: reports.history,
    ev.RecordsRead: membership.records_read,
    ev.Warned: reports.warned,
    ev.WarmStarted: reports.warm_started,
    ev.PartsWritten: checkpoint_events.parts_written,
    ev.Checkpointed: checkpoint_events.complete,
    ev.CheckpointFailed: checkpoint_events.failed,
}
# Messages of a member of the current ring about that ring; others are stale.
OF_THE_RING: Mapping[type, Callable[[State, WorkerRecord, Any], None]] = {
    ev.JoinedRing: ring_events.joined,
    ev.Stepped: ring_events.stepped,
    ev.BadRecords: training.left_out,
    ev.Evaluated: training.evaluated,
    ev.EpochEnded: training.epoch_ended,
    ev.LeftRing: ring_events.left,
}
# Events about a state that may be void. LeftRing is not among them: it is valid in any case.
CLAIMS = (ev.JoinedRing, ev.EpochEnded, ev.Evaluated)


class Job(State):
    """One job. `handle` is the only way to change it."""

    def handle(self, event: ev.Event, now: float) -> list[ef.Effect]:
        """Apply `event` at time `now` (monotonic seconds) and return the effects.

        Raises:
            ImpossibleStep: a state table lacks the transition.
            InvalidState: the state after it contradicts itself.
        """
        if now - self.now > self.config.elastic.heartbeat_timeout_seconds / 2:
            self.timeouts.excuse(now)
            silence.excuse(self, now)
        self.now, self.effects = now, []
        if (of_the_job := OF_THE_JOB.get(type(event))) is not None:
            of_the_job(self, event)
        else:
            self._on_message(event)
        self._reconcile()
        ps.tell(self)
        self.validate()
        return self.effects

    def _on_message(self, event: Any) -> None:
        """Handle a worker's message. A message of a removed worker changes nothing."""
        if (w := self.pool.get(event.worker)) is None:
            self.stale += not isinstance(event, ev.Closed)  # Closed adds nothing once the worker is lost
            if isinstance(event, ev.Hello):
                why = f"worker {event.worker} was removed from the job"
                self.do(ef.Fence(event.worker, why, ef.FenceReason.NotInJob))
        elif (of_a_worker := OF_A_WORKER.get(type(event))) is not None:
            of_a_worker(self, w, event)
        else:
            self._on_ring_message(w, event)

    def _on_ring_message(self, w: WorkerRecord, event: Any) -> None:
        """Handle an event of a ring; ignore it unless it is from a member and about the current ring."""
        if isinstance(event, ev.LeftRing):
            training.stopped(self, event)
            if w.place == AWAY and event.generation == w.away_from:
                silence.comes_back(self, w, event)
                return
        if not w.in_ring or event.generation != self.ring.generation:
            self.stale += 1
        elif event.generation > self.divergence.untrusted_up_to or not isinstance(event, CLAIMS):
            OF_THE_RING[type(event)](self, w, event)

    def next_deadline(self) -> float | None:
        """Time at which a `Tick` is due if no other event arrives; None: no timeout is running."""
        times = [at for due in DEADLINES if (at := due(self)) is not None and at > self.now]
        if (timeout := self.timeouts.next()) is not None:  # one without a grace period is due at once
            times.append(timeout)
        return min(times, default=None)

    # --- reconciliation

    def _reconcile(self) -> None:
        membership.expire_timeouts(self)
        membership.expire_cut(self)
        silence.decide(self)
        known = self.ending is None and takeover.adopt_ring(self)
        stopping.enforce_deadline(self)
        if known:
            stopping.proceed(self)
        if self.ending is not None:
            completion.shut_down_workers(self)
            return
        if self.stop_request.pending is not None:
            return
        membership.scale(self)
        if known:
            rendezvous.regroup(self)
            rendezvous.form(self)
            # No worker holds the state that was to be saved, and no further event may come.
            if self.ending is not None:
                completion.shut_down_workers(self)
                return
            on_servers = self.config.asynchronous
            if not (on_servers or self.pool.any(lambda kind: kind.stays and kind.has_state)):
                self.checkpoints.hurry(self.ring, self.now)
            self.do(
                *self.checkpoints.replace_the_lost(self.pool), *self.checkpoints.order(self.ring, self.now)
            )
            membership.release(self)
        completion.end_script(self)
        if self.ending is not None:
            completion.shut_down_workers(self)
