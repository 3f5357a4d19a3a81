# SPDX-License-Identifier: Apache-2.0
"""The workers' processes: they start, send and receive messages, and end. Includes the backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from greenlet import greenlet

from edl.contract.exit_codes import WorkerExit
from edl.contract.heartbeats import Usage
from edl.contract.ids import WorkerId
from edl.contract.proto import edl_pb2 as pb
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core import facts
from edl.master.core.silence import BUSY_SECONDS
from edl.master.rpc.messages import event_of
from edl.trainer.agreement.metric_values import Value
from edl.trainer.ring.base import RingBroken
from edl.trainer.session.state import Session
from edl.trainer.worker import ReplicaDivergence
from tests.simulator.worker import FLIP, Bell, Sim

if TYPE_CHECKING:
    from tests.simulator.world import World

SAMPLE_LOSS = pb.SampleLoss(loss=0.5, tolerance=0.01)  # as each worker reports it


class Fleet:
    """All workers of a run, past and present."""

    def __init__(self, world: World) -> None:
        self.world, self.random, self.clock = world, world.random, world.clock
        self.workers: dict[WorkerId, Sim] = {}

    def does(self, w: Sim, seconds: float, action: Callable[[], None]) -> None:
        """Schedule an action of a worker. A dead worker skips it, and a frozen one does it after the thaw."""

        def now() -> None:
            if w.alive and w.frozen:
                w.to_do.append(now)
            elif w.alive:
                action()

        self.clock.later(seconds, now)

    def met(self, form: ef.Form, master: int) -> bool:
        """Whether the members of this ring have found each other."""
        return True

    # --- streams

    def session(self, w: Sim) -> Session:
        return Session(w.id, lambda message: self.send(w, message), Bell(w))

    def send(self, w: Sim, message: pb.FromWorker) -> None:
        """Send a message as the stream does: record it for a later master, and send it to the present one."""
        self.world.checks.says_the_truth(w, message)
        w.session.state.note(message)
        self.say(w, message)

    def say(self, w: Sim, what: pb.FromWorker | ev.Event | facts.Heartbeat) -> None:
        """Send a worker's message to the master; messages arrive a little later, in order."""
        event = event_of(w.id, what) if isinstance(what, pb.FromWorker) else what
        part = what if isinstance(what, pb.FromWorker) and what.HasField("checkpoint_part") else None
        master = w.master
        at = w.outbox_at = max(self.clock.now + self.random.expovariate(200), w.outbox_at, w.audible_at)

        def arrives() -> None:
            if w.fenced or master != self.world.master.number:
                return
            said = event if part is None else self.world.master.parts.hear(w.id, part)
            if said is not None:
                self.world.master.hear(said)

        self.clock.later(at - self.clock.now, arrives)

    def order_to(self, worker: WorkerId, act: Callable[[Sim], None]) -> None:
        """Send a master's order to a worker; orders arrive a little later, in order."""
        if w := self.workers.get(worker):
            master = self.world.master.number
            at = w.inbox_at = max(self.clock.now + self.random.expovariate(200), w.inbox_at)
            self.does(w, at - self.clock.now, lambda: act(w) if w.master == master else None)

    def lose_the_master(self) -> None:
        """Break all streams, and lift all fences."""
        for w in self.workers.values():
            w.fenced = False
            if w.greeted:
                self.does(w, self.random.uniform(0.001, 0.05), lambda w=w: self.seek(w))  # type: ignore[misc]

    def seek(self, w: Sim) -> None:
        """Let a worker look for a master and greet it."""
        if w.stopping or w.failed or w.session.ended or w.master == self.world.master.number:
            return
        if not self.world.master.lives:
            self.does(w, 0.5 * self.random.random(), lambda: self.seek(w))
            return
        self.greets(w)

    def greets(self, w: Sim) -> None:
        """Open a worker's stream to the master, and send its greeting."""
        w.greeted, w.master, w.greeted_at = True, self.world.master.number, self.clock.now
        for message in w.session.greeting():
            self.say(w, message)

    # --- a life

    def create(self, worker: WorkerId) -> None:
        w = self.workers[worker] = Sim(worker, self)
        fate = self.random.random() if self.clock.now < self.world.faults.calm_at else 1.0
        placed = self.random.uniform(0.01, 3) if fate > 0.9 else 0.01
        takes = self.random.uniform(0.1, 2)
        if fate < 0.03:  # about the startup time limit
            takes = self.random.uniform(9.9, 10.1)
            self.world.faults.to_blame.add(worker)
        self.clock.later(placed, lambda: self.place(w) if w.alive else None)
        if fate < 0.06:
            self.world.faults.to_blame.add(worker)
            self.does(w, placed + takes / 2, lambda: self.exit(w, code=1, own=True))
        if 0.06 < fate < 0.09:
            self.world.faults.to_blame.add(worker)
            return  # it hangs before its first message
        self.does(w, placed + takes / 3, lambda: self.greet(w))
        if 0.09 < fate < 0.12:
            self.world.faults.to_blame.add(worker)
            return  # it hangs, and is never ready
        if 0.12 < fate < 0.15:
            self.does(w, placed + takes, lambda: self.fail(w, ConnectionError("no such host")))
        self.does(w, placed + takes, lambda: self.ready(w))

    def place(self, w: Sim) -> None:
        w.placed = True
        self.world.master.hear(ev.Seen(w.id, "pid"))

    def greet(self, w: Sim) -> None:
        if not self.world.master.lives:
            self.does(w, 0.1, lambda: self.greet(w))
            return
        self.greets(w)
        self.world.faults.moment("starting")

    def ready(self, w: Sim) -> None:
        if not w.greeted:
            self.does(w, 0.1, lambda: self.ready(w))
            return
        w.is_ready = True
        ready = w.worker.ready()
        ready.sample_loss.CopyFrom(SAMPLE_LOSS)
        w.has_state = False
        w.session.say(ready=ready)
        self.beats(w)
        w.go_on()

    def live(self, w: Sim) -> None:
        """Run the main thread of a ready worker: the real loop, with errors as in trainer/__main__.py."""
        try:
            code = WorkerExit.LOST if w.worker.train().lost else 0
        except ReplicaDivergence as error:  # without a checkpoint
            if not self.world.faults.kinds[FLIP]:
                raise
            self.world.faults.ends.add("Failed")
            w.session.fail(error)
            code = WorkerExit.FAILED
        except Exception as error:
            if error is not w.blow:
                raise
            w.session.fail(error)
            code = WorkerExit.FAILED
        self.ends(w, code)

    def ends(self, w: Sim, code: int) -> None:
        """Exit as soon as the worker's last message has arrived."""
        self.does(w, max(w.outbox_at - self.clock.now, 0.0), lambda: self.exit(w, code=code))

    def evaluates(self, w: Sim) -> None:
        """Simulate a forward pass over held-out records."""
        w.evaluating = True
        try:
            self.works(w)
        finally:
            w.evaluating = False

    def works(self, w: Sim) -> None:
        """Simulate the time of a forward pass, and sometimes that of a call that no cut ends."""
        w.waits(seconds=self.random.uniform(0.5, 1.5) * self.world.pace)
        busy, session = self.world.busy, w.session
        if busy is not None and self.clock.now < self.world.faults.calm_at and busy.random() < 0.2:
            w.waits(lambda: session.stopped or session.ended, BUSY_SECONDS + busy.choice((-1.0, 1.0)))
            self.world.faults.last = self.clock.now

    def export(self, w: Sim, final_metrics: Mapping[str, Value] | None) -> None:
        """Save the model, then evaluate it; the worker may be lost during either."""
        self.world.checks.exports(w, final_metrics)
        if self.world.servers is not None and self.world.size:
            w.pulls()
            while not self.world.servers.judge(w):
                w.waits(seconds=0.1)
                w.pulls()
        w.waits(seconds=self.random.uniform(0.05, 1))
        w.session.say(saved=pb.Saved(model="model.keras"))
        w.waits(seconds=self.random.uniform(0.05, 1))
        w.session.say(finished=pb.Finished(metrics={"loss": 0.5}, model="model.keras"))

    def keeps(self, w: Sim, step: int) -> None:
        """Save a copy of the model before the last evaluation."""
        w.waits(seconds=self.random.uniform(0.05, 0.5))
        w.session.say(saved=pb.Saved(model="model.keras", step=step))

    def writes(self, w: Sim, work: Callable[[], None]) -> None:
        """Write a checkpoint part or a manifest beside the training, for a short or a long time."""
        at = w.writes_until = (
            max(w.writes_until, self.clock.now) + self.random.choice((0.01, 0.3, 3)) * self.random.random()
        )
        self.world.faults.moment("writing")
        self.does(w, at - self.clock.now, lambda: greenlet(work).switch())

    def beats(self, w: Sim) -> None:
        w.session.heartbeat(0.0, Usage())
        self.does(w, self.world.silence / 6, lambda: self.beats(w))

    # --- orders

    def fence(self, w: Sim, fence: ef.Fence) -> None:
        if fence.reason is ef.FenceReason.HeartbeatTimeout:
            self.world.checks.was_silent(w, fence.why)
        self.world.checks.differs(w, fence)
        w.fenced = True
        self.order_to(w.id, lambda w: self.is_given_up(w, fence.why))

    def is_given_up(self, w: Sim, why: str) -> None:
        """End a worker's stream from the master's side."""
        w.session.end(why)
        self.must_end(w)

    def must_end(self, w: Sim, halves: int = 4) -> None:
        """Check that the worker ends after at most `halves` half seconds of running."""
        assert halves or not w.is_ready or w.done, f"worker {w.id} was to end, but goes on"
        if halves:
            self.does(w, 0.5, lambda: self.must_end(w, halves - 1))

    def stop(self, w: Sim) -> None:
        """Stop a worker: its warm-up may break off, or continue unnoticed."""
        if not w.is_ready and self.random.random() < 0.3:
            self.fail(w, RingBroken("hvd.init: the generation was called off"), blame=False)

    def delete(self, w: Sim, grace: float) -> None:
        """Delete a worker as the backend does: SIGTERM, and SIGKILL after the grace period."""
        if grace > 0:
            self.clock.later(self.random.uniform(0, 0.05), lambda: self.terminate(w))
        self.clock.later(grace + self.random.uniform(0, 0.05), lambda: self.exit(w, signal="SIGKILL"))

    # --- an end

    def terminate(self, w: Sim) -> None:
        if not w.greeted:
            self.does(w, 0, lambda: self.exit(w, signal="SIGTERM"))
        else:
            self.does(w, 0, lambda: self._leaves(w))

    def _leaves(self, w: Sim) -> None:
        w.asked_at = self.clock.now if w.asked_at is None else w.asked_at
        w.session.say(leaving=pb.Leaving(why="SIGTERM"))

    def fail(self, w: Sim, error: Exception, blame: bool = True) -> None:
        """Report the error, and exit once it has arrived. An error during an evaluation ends only that."""
        if w.evaluating:
            self.world.checks.evaluation_failed = True
            w.hit(error)
            return
        if blame:
            self.world.faults.to_blame.add(w.id)
        w.failed = True
        if w.is_ready:
            w.hit(error)
        else:
            w.session.fail(error)
            self.ends(w, WorkerExit.FAILED)

    def exit(
        self, w: Sim, signal: str = "", code: int | None = None, free: bool = False, own: bool = False
    ) -> None:
        if not w.alive:
            return
        w.alive, w.own_end, self.world.faults.last = False, own, self.clock.now
        gone = ev.Gone(w.id, code=code, signal=signal, free=free)
        self.clock.later(self.random.uniform(0.001, 0.3), lambda: self.world.master.hear(gone))
        if w.greeted:
            w.audible_at = 0.0  # delayed messages are released
            self.say(w, ev.Closed(w.id, "its stream ended"))
        if (group := w.group) is not None:
            self.clock.later(self.random.uniform(0.0001, 0.03), lambda: group.cut(f"worker {w.id} has died"))

    # --- a pause

    def freeze(self, w: Sim, seconds: float) -> None:
        if not w.is_ready:  # it may exceed its startup time limit
            self.world.faults.to_blame.add(w.id)
        w.frozen = True
        w.silent_since, w.audible_at = self.clock.now, max(w.audible_at, self.clock.now + seconds)
        self.clock.later(seconds, lambda: self.thaw(w))

    def thaw(self, w: Sim) -> None:
        w.frozen, self.world.faults.last = False, self.clock.now
        to_do, w.to_do = w.to_do, []
        for action in to_do:
            action()
