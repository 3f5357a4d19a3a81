"""One training job: the only entry point for events, and the reconciliation after each.

`Job.handle(event, now)` records the event, then reconciles: it returns the effects that the new state needs.
Reconciliation depends on the state only, not on the event, so duplicate and late events are harmless.

The life of a job, and the modules of its parts:

    workers are created and get ready       membership.scale, `_on_ready`
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
contradict it. So a new master can continue from the reports of the workers: `failover`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from edl.contract.phases import Phase, WorkerState
from edl.contract.reasons import Reason
from edl.master.core import (
    completion,
    consistency,
    facts,
    membership,
    past,
    ps,
    rendezvous,
    sample_loss,
    silence,
    stopping,
    training,
)
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core.state import State
from edl.master.core.workers import UP, WorkerRecord

# Events about a state that may be void. LeftRing is not among them: it is valid in any case.
CLAIMS = (ev.JoinedRing, ev.EpochEnded, ev.Evaluated)
CHECKPOINTS = "writing checkpoints"  # a subsystem in the status, which may be degraded
CHECKPOINTS_OFF_WITH_SERVERS = (
    "checkpoints are off; if a parameter server loses its log, training restarts from scratch. Turn them on "
    "with --set checkpoint.dir=DIR"
)
CHECKPOINTS_OFF_WITH_COPIES = (
    "checkpoints are off; if both parameter servers with a row lose their logs, training restarts from "
    "scratch. Turn them on with --set checkpoint.dir=DIR"
)
CHECKPOINTS_OFF = (
    "checkpoints are off; if all workers die, training restarts from scratch. Turn them on with --set "
    "checkpoint.dir=DIR"
)


class Job(State):
    """One job. `handle` is the only way to change it."""

    # --- events

    def handle(self, event: ev.Event, now: float) -> list[ef.Effect]:
        """Apply `event` at time `now` (monotonic seconds) and return the effects."""
        if now - self.now > self.config.elastic.heartbeat_timeout_seconds / 2:
            self.timeouts.excuse(now)
        self.now, self.effects = now, []
        match event:
            case ev.Begin():
                self.began_at = now
                self.goodput.turn(self.goodput.kind, now)
                if not self.checkpoints.enabled and self.config.trains:
                    off = CHECKPOINTS_OFF
                    if self.config.asynchronous:
                        copies = self.config.ps.replicas > 1
                        off = CHECKPOINTS_OFF_WITH_COPIES if copies else CHECKPOINTS_OFF_WITH_SERVERS
                    self.notice(Reason.CheckpointsOff, off)
            case ev.Scale():
                self.notice(Reason.Scaled, f"workers {self.target} -> {event.workers}")
                self.target = event.workers
            case ev.Live():
                self._on_live(event)
            case ev.Refused():
                self.notice(Reason.SpecRefused, event.why)
            case ev.StopAsked():
                stopping.asked(self, event)
            case ev.CheckpointAsked():
                self._on_checkpoint_asked()
            case ev.Adopted():
                self._on_adopted(event)
            case ev.Tick():
                pass
            case ev.Progress():
                self._on_progress(event)
            case ev.Silent():
                if w := self.pool.get(event.worker):
                    silence.begins(self, w, event.seconds)
            case ev.Heard():
                if w := self.pool.get(event.worker):
                    silence.ends(self, w)
            case ev.Gone():
                membership.gone(self, event)
            case ev.Seen():
                self._on_seen(event)
            case ev.Delayed():
                self._on_delayed(event)
            case ev.Degraded():
                self._on_degraded(event)
            case ev.ServerListens():
                again = " again" if event.again else ""
                said = f"parameter server {event.server} listens{again} after {event.seconds:.1f} s"
                self.notice(Reason.ServerReady, said)
                ps.answers(self, event.server)
            case ev.ServerRecovered():
                ps.answers(self, event.server)
            case ev.ServersReady():
                ps.ready(self, event)
            case ev.ServerAway():
                ps.away(self, event)
            case ev.ProbeUnanswered():
                ps.unanswered(self, event)
            case ev.ServersGivenUp():
                ps.given_up(self, event)
            case ev.ServerExited():
                self._on_server_exited(event)
            case _:
                self._on_message(event)
        self._reconcile()
        ps.tell(self)
        return self.effects

    def next_deadline(self) -> float | None:
        """Time at which a `Tick` is due if no other event arrives; None: no timeout is running."""
        checkpoint = self.checkpoints.next_deadline()
        copies = self.copies_until if self.copies_awaited else None
        waits = (
            self.regroup_at,
            self.join_at,
            self.judge_at,
            self.backoff.until,
            self.backoff.ring_until,
            self.failover.until,
            checkpoint,
            copies,
            silence.next_deadline(self),
            *stopping.deadlines(self),
        )
        times = [at for at in waits if at is not None and at > self.now]
        if (timeout := self.timeouts.next()) is not None:
            times.append(timeout)
        return min(times, default=None)

    # --- events of users and the backend

    def _on_live(self, event: ev.Live) -> None:
        if event.workers != self.target:
            self.notice(Reason.Scaled, f"workers {self.target} -> {event.workers}")
        if event.suspended != self.suspended:
            if event.suspended:
                self.notice(Reason.Suspended, "suspended: the workers leave the ring and keep their state")
            else:
                self.notice(Reason.Resumed, "resumed: the workers form a ring and train on")
        self.target, self.min_size, self.suspended = event.workers, event.min_workers, event.suspended
        self.regroup_at = self.now
        if event.active_deadline_seconds is not None:
            self.active_deadline = event.active_deadline_seconds
        if self.config.trains:
            training.change_epochs(self, event.epochs)

    def _on_adopted(self, event: ev.Adopted) -> None:
        self.safe_before, self.active_before = event.safe, event.active_seconds
        self.began_with = event.began_with
        if event.past is not None or event.active_seconds:
            unknown = facts.Past({}, "useful")
            past.restore(self, event.past or unknown, event.active_seconds)
        for w in self.failover.begin(event, self.now):
            self.timeouts.watch(w)
        if event.workers:
            count = len(event.workers)
            self.notice(Reason.FailedOver, f"this master took over from an earlier one: {count} workers")

    def _on_delayed(self, event: ev.Delayed) -> None:
        w = self.pool.get(event.worker)
        if w is None or w.delay == event.why:
            return
        if self.pool.delay(w, event.why):  # once for all workers with the same reason
            self.notice(Reason.WorkerPending, f"worker {w.id} is pending: {event.why}")

    def _on_degraded(self, event: ev.Degraded) -> None:
        if self.degraded.get(event.part, "") == event.why:
            return
        if event.why:
            self.degraded[event.part] = event.why
            self.notice(Reason.Degraded, f"{event.part}: {event.why}")
        else:
            del self.degraded[event.part]
            self.notice(Reason.Recovered, f"{event.part} works again")

    def _on_server_exited(self, event: ev.ServerExited) -> None:
        """Handle the exit of a server: its rows are in its log and in checkpoints, and workers wait."""
        self.servers.unanswered.pop(event.server, None)
        how = f"parameter server {event.server} exited: {event.why}"
        if event.fatal:
            self.end(Phase.Failed, how)
            return
        when = f" in {event.pause_seconds:.0f} s" if event.pause_seconds else ""
        self.notice(Reason.ServerExited, f"{how}; another one is started in its place{when}")

    def _on_seen(self, event: ev.Seen) -> None:
        if w := self.pool.get(event.worker):
            w.handle = event.handle
            self.pool.delay(w, "")
            if w.state == WorkerState.PENDING:
                self._runs(w, "seen")

    def _runs(self, w: WorkerRecord, event: str) -> None:
        """Start the startup timeout of a worker."""
        self.pool.change(w, event)
        w.since = self.now
        self.timeouts.watch(w)

    # --- events of workers

    def _on_message(self, event: ev.WorkerMessage | ev.RingMessage) -> None:
        w = self.pool.get(event.worker)
        if w is None:
            if not isinstance(event, ev.Closed):  # Closed adds nothing once the worker is lost
                self.stale += 1
            if isinstance(event, ev.Hello):
                why = f"worker {event.worker} was removed from the job"
                self.do(ef.Fence(event.worker, why, ef.FenceReason.NotInJob))
            return
        match event:
            case ev.Hello():
                if w.state == WorkerState.PENDING:
                    self._runs(w, "hello")
                elif w.state == WorkerState.STARTING:
                    self.pool.change(w, "hello")
                if not event.resumes:
                    self._told_its_state(w)
                if event.brings_state and w.is_starting and not self.divergence.untrusted_up_to:
                    self.pool.bringing.add(w.id)
                    self.copies_awaited = max(self.copies_awaited - 1, 0)
                if w.stopped:  # it was not connected then, and process 1 of a container ignores SIGTERM
                    self.do(ef.Stop(w.id, f"worker {w.id} is not needed any more"))
            case ev.Built():
                self._fits(w, event.tables)
            case ev.Ready():
                self._on_ready(w, event)
            case ev.Resume():
                self._on_resume(w, event)
            case ev.Leaving():
                membership.drain(self, w, event.why)
            case ev.Failed():
                membership.failed(self, w, event)
            case ev.Saved():
                completion.saved(self, w, event)
            case ev.Finished():
                completion.finished(self, w, event)
            case ev.RowsLost():
                completion.rows_lost(self, w, event)
            case ev.History():
                self.result.history = event.epochs
            case ev.Warned():
                self._on_warned(event)
            case ev.WarmStarted():
                self.began_with = event.text
                self.notice(Reason.WarmStarted, event.text)
            case ev.PartsWritten():
                if consistency.at_checkpoint(self, event):
                    self.do(*self.checkpoints.parts_written(event))
            case ev.CheckpointFailed():
                self._on_checkpoint_failed(w, event)
            case ev.Checkpointed():
                self._on_checkpointed(event)
            case ev.Closed():
                membership.lose(self, w, "exited as requested" if w.stopped else event.why)
            case _:
                self._on_ring_message(w, event)

    def _on_ring_message(self, w: WorkerRecord, event: ev.RingMessage) -> None:
        """Handle an event of a ring; ignore it unless it is from a member and about the current ring."""
        if isinstance(event, ev.LeftRing):
            training.stopped(self, event)
        if not w.in_ring or event.generation != self.ring.generation:
            self.stale += 1
            return
        if event.generation <= self.divergence.untrusted_up_to and isinstance(event, CLAIMS):
            return
        match event:
            case ev.JoinedRing():
                self._on_joined(w, event)
            case ev.Stepped():
                self._on_stepped(event)
            case ev.BadRecords():
                training.left_out(self, event)
            case ev.Evaluated():
                training.evaluated(self, event)
            case ev.EpochEnded():
                training.epoch_ended(self, event)
            case ev.LeftRing():
                if event.generation <= self.divergence.untrusted_up_to:
                    event = replace(event, has_state=False)
                self.pool.left(w, event)
                self.ring.stops(self.now)
                if event.broken:
                    self.ring.errors[event.broken] += 1
                why = f"worker {w.id}: {event.broken}" if event.broken else "left together"
                self.close(why, planned=not event.broken)

    def _on_ready(self, w: WorkerRecord, event: ev.Ready) -> None:
        if not w.is_starting:
            return
        if w.state != WorkerState.INITIALIZING:
            self.pool.change(w, "hello")
        self.checkpoints.step = max(self.checkpoints.step, event.checkpoint)
        if self._admit(w, event):
            if event.held is not None and not self.divergence.untrusted_up_to:
                self.pool.copies[w.id] = event.held
                rendezvous.count_a_late_copy(self, w)
            self.notice(Reason.WorkerReady, f"worker {w.id} is ready after {self.now - w.since:.1f} s")

    def _on_warned(self, event: ev.Warned) -> None:
        if event.text not in self.warnings:  # a replacement may report the same
            self.warnings.append(event.text)
            self.notice(Reason.ModelWarning, event.text)

    def _on_resume(self, w: WorkerRecord, event: ev.Resume) -> None:
        """Handle the state that a worker of an earlier master reports."""
        if w.state != WorkerState.INITIALIZING:
            self.stale += 1
            return
        self._told_its_state(w)
        if event.left_ring is not None:
            training.stopped(self, event.left_ring)
        if self._admit(w, event):
            known = self.ring.generation
            outdated_ones = self.failover.place(w, event, self.now)
            if self.ring.generation != known:
                self.servers.ordered = None
            for outdated in outdated_ones:
                why = "it was in a ring that the others have left"
                membership.give_up(self, outdated, ef.FenceReason.OutdatedRing, why)

    def _told_its_state(self, w: WorkerRecord) -> None:
        w.expected = False
        self.failover.awaits_no_longer(w)

    def _admit(self, w: WorkerRecord, event: ev.Ready | ev.Resume) -> bool:
        """Check a ready worker. Returns False if its model or data differ from the job's."""
        layout = event.layout
        for words in event.forced:
            if words not in self.forced:
                self.forced.append(words)
                self.notice(Reason.IncompatibleResume, f"forced: {words}")
        self.pool.change(w, "ready")
        w.ready_at = self.now
        self.backoff.got_ready()
        if self.train is None:
            training.open_task(self, layout, event.held_out)
            self.held_out = event.held_out
        elif self.train.layout.records != layout.records:
            has = self.train.layout.records
            why = f"worker {w.id} found {layout.records} records in the data; the job has {has}"
            membership.failed(self, w, ev.Failed(w.id, why))
            return False
        if self.held_out != event.held_out:
            expected, found = _in_words(self.held_out), _in_words(event.held_out)
            why = f"worker {w.id} found {found} in the held-out data; the job has {expected}"
            membership.failed(self, w, ev.Failed(w.id, why))
            return False
        if not self._fits(w, event.tables):
            return False
        self.model = self.model or event.model
        if self.model != event.model:
            why = (
                f"worker {w.id} made another model than the workers before it: its layers, variables, loss "
                "or optimizer differ. model() must return the same in each process; does it depend on a "
                "random number, the time, or the machine?"
            )
            membership.failed(self, w, ev.Failed(w.id, why))
            return False
        if why := sample_loss.why_refused(self, w, event.sample_loss):
            membership.failed(self, w, ev.Failed(w.id, why))
            return False
        if self.regroup_at is None:
            self.regroup_at = self.now + self.config.elastic.join_delay_seconds
        return True

    def _fits(self, w: WorkerRecord, tables: int) -> bool:
        """Check the number of tables against the mode, which the first worker decides if it is auto."""
        if why := ps.decide(self, w, tables):
            membership.failed(self, w, ev.Failed(w.id, why))
        return not why

    def _on_joined(self, w: WorkerRecord, event: ev.JoinedRing) -> None:
        change = self.ring.changes[-1]
        # The outage of a server is no cost of a change: new workers would wait for many times its length.
        since = change.formed_at if change.stopped_at is None else change.stopped_at
        if w.has_state and not ps.waited_since(self, since):
            self.ring.goes_on(self.now)
        self.pool.change(w, place=UP, has_state=True)
        w.step, w.round, w.turn = event.step, event.round, event.turn
        if self.checkpoints.restoring == event.generation:
            if self.config.asynchronous:
                training.found(self, event)
            else:
                training.restored(self, event.step)
        elif event.went_back and not change.went_back:
            change.went_back = True
            training.went_back(self, event)
        if event.servers:
            ps.have_rows(self, event)
        change.step = max(change.step, event.step)
        if change.up_seconds is None and self.ring.up:
            change.up_seconds = self.now - change.formed_at
            training.all_have(self, change.step)
            self.checkpoints.ring_is_up(self.now)
            if self.ring.running:
                self.goodput.turn("useful", self.now)

    def _on_stepped(self, event: ev.Stepped) -> None:
        self.backoff.stepped()
        change = self.ring.changes[-1]
        if change.note(event):
            self.goodput.redo(event.wasted_seconds / max(len(self.ring.members), 1))
            if len(change.stepped) == len(self.ring.members):
                self.do(*change.tell())

    def _on_progress(self, event: ev.Progress) -> None:
        if event.generation != self.ring.generation or not self.ring.members:
            return
        if event.generation <= self.divergence.untrusted_up_to:
            return
        for worker, speed in event.speeds.items():
            if w := self.pool.get(worker):
                w.speed, self.judge_at = speed, self.now
        self.step = max(self.step, event.step)
        self.loss = event.loss if event.loss is not None else self.loss
        self.epoch_loss = training.latest_loss(self.epoch_loss, event.epoch_loss)
        self.staleness = event.staleness or self.staleness
        training.progress(self, event.step)

    # --- checkpoints

    def _on_checkpoint_asked(self) -> None:
        if self.checkpoints.enabled:
            self.checkpoints.ask(self.now)
        else:
            self.notice(Reason.SpecRefused, f"no checkpoint is written: {CHECKPOINTS_OFF}")

    def _on_checkpointed(self, event: ev.Checkpointed) -> None:
        self.divergence.times = 0
        taken_at = self.checkpoints.ordered_at
        self.kept_useful_seconds = self.useful_seconds(self.now if taken_at is None else taken_at)
        if self.checkpoints.is_whole(event, self.now):
            size = event.nbytes / (1 << 20)
            where = f"in {self.config.checkpoint.dir} ({size:,.1f} MiB)"
            self.notice(Reason.Checkpointed, f"the checkpoint of step {event.step:,} is {where}")
        self._on_degraded(ev.Degraded(CHECKPOINTS, ""))

    def _on_checkpoint_failed(self, w: WorkerRecord, event: ev.CheckpointFailed) -> None:
        if self.checkpoints.fails(event, self.now):
            last = (
                f"the newest one is of step {self.checkpoints.step:,}"
                if self.checkpoints.step
                else "there is none"
            )
            why = f"worker {w.id}: {event.why}; the training goes on, {last}"
            self._on_degraded(ev.Degraded(CHECKPOINTS, why))
            stopping.failed(self, why)

    # --- reconciliation

    def _reconcile(self) -> None:
        membership.expire_timeouts(self)
        silence.decide(self)
        known = self.ending is None and self._take_over()
        stopping.enforce_deadline(self)
        if known:
            stopping.proceed(self)
        if self.ending is not None:
            completion.shut_down_workers(self)
            return
        if self.pending_stop is not None and not stopping.needs_a_ring(self):
            return
        membership.scale(self)
        if known:
            rendezvous.regroup(self)
            rendezvous.form(self)
            if (
                self.ending is not None
            ):  # no worker holds the state that was to be saved, and no further event may come
                completion.shut_down_workers(self)
                return
            on_servers = self.config.asynchronous
            if not (on_servers or self.pool.any(lambda kind: kind.stays and kind.has_state)):
                self.checkpoints.hurry(self.ring, self.now)
            self.do(
                *self.checkpoints.replace_the_lost(self.pool), *self.checkpoints.order(self.ring, self.now)
            )
            membership.release(self)

    def _keep_the_ring(self) -> None:
        """Keep the ring of an earlier master: its members continue to train."""
        ring = self.ring
        ring.changes[-1].up_seconds, ring.shares = 0.0, (1,) * len(ring.members)
        self.reason = f"a new master took over, and the ring of {len(ring.members)} trains on"
        self.notice(Reason.FailedOver, self.reason)
        self.checkpoints.ring_is_up(self.now)
        self.do(ef.Train(ring.generation, ring.members, self.epochs))  # it may not know the last change

    def _take_over(self) -> bool:
        """Adopt the ring of an earlier master if it is whole, else close it. False if it is still unknown."""
        if self.failover.until is None:
            return True
        missing = self.failover.missing(self.now)
        if missing is None:
            return False
        for w in missing:
            why = "it did not reconnect to the new master"
            membership.give_up(self, w, ef.FenceReason.ReconnectTimeout, why)
        if self.ring.members:
            whole = len(self.ring.inside) == len(self.ring.members) and self.ring.up
            if whole and not self.ring.closing:
                self.kept_useful_seconds += self.goodput.without_master  # it is useful time now
                self.goodput.ring_was_kept(self.now)
            # Workers do not report their shares, so loadBalancing=speed needs a new ring.
            if whole and not self.ring.closing and self.config.training.load_balancing == "none":
                self._keep_the_ring()
                return True
            self.ring.lost_member = not whole
            self.close("a new master took over", planned=whole)
            self.do(*self.ring.ask_the_rest())
        return True


def _in_words(sizes: Mapping[str, int]) -> str:
    return " and ".join(f"{records} records of {split!r}" for split, records in sizes.items()) or "no records"
