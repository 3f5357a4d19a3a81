# SPDX-License-Identifier: Apache-2.0
"""A simulated worker: the real loop of trainer/worker.py, and the events of its process.

The main thread is a greenlet. Where a real thread would block (in a collective, in the forward pass, while
waiting for an order), it returns control to the simulation, which resumes it at the right time.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np
from greenlet import getcurrent, greenlet

from edl.contract.evaluation import EvaluationPlan
from edl.contract.ids import WorkerId
from edl.trainer.checkpoint.checkpointing import Checkpointing
from edl.trainer.evaluation.evaluation import RingEvaluation
from edl.trainer.parts.async_loop import AsyncLoop
from edl.trainer.parts.restore import Restore
from edl.trainer.records.batches import Batches, nothing
from edl.trainer.ring.local import InProcessGroup, LocalRing
from edl.trainer.session.telemetry import Telemetry
from edl.trainer.start.assembly import assemble
from edl.trainer.state import State
from tests.support.models.counting import AtOnce, CountingLearner, CountingMetrics, Positions
from tests.support.models.counting_rows import CountingRows
from tests.support.models.counting_served import CountingServed

if TYPE_CHECKING:
    from tests.simulator.fleet import Fleet

FLIP = "flip"  # the fault of a member whose state silently differs
MAX_EPOCHS = 5  # the largest number of requested epochs


class Sim:
    """One simulated worker of a fleet."""

    def __init__(self, worker: WorkerId, fleet: Fleet):
        world = fleet.world
        self.id, self.fleet, self.clock = worker, fleet, world.clock
        self.session = fleet.session(self)
        self.servers = world.servers.of(self) if world.servers is not None else None
        self.learner = self._learner(world.size * MAX_EPOCHS)
        self.ring = LocalRing()
        self.learner.joins(self.ring)
        self.session.cuts(self._cut)
        reading = AtOnce() if world.reads is None else SlowReads(self, world.reads)
        batches = Batches(Positions(world.size, world.bad), world.batch, reading=reading)
        evaluation = None
        if world.held_out:
            of, size = world.config.evaluation, world.held_out
            split: str = of.split
            plan = EvaluationPlan(batches.steps, of.batch_size, of.steps, of.epochs, split, {split: size})
            held_out = {split: Batches(Positions(size), of.batch_size, reading=AtOnce())}
            metrics = CountingMetrics(size, lambda: fleet.evaluates(self))
            evaluation = RingEvaluation(plan, held_out, metrics, AtOnce())
        self.checkpoints = None
        if world.config.checkpoint.dir:
            beside = lambda work: fleet.writes(self, work)  # noqa: E731
            self.checkpoints = Checkpointing(
                world.config,
                self.session,
                self.learner,
                world.store,
                "a-run",
                beside,
                lambda: world.clock.now,
                self.servers,
            )
        report = Telemetry(self.session, batches.steps, lambda: world.clock.now, log=lambda line: None)
        self.async_loop = None
        if self.servers is not None and isinstance(self.learner, CountingServed):
            now = lambda: world.clock.now  # noqa: E731
            self.async_loop = AsyncLoop(
                world.config, self.session, self.learner, self.servers, batches, report, now
            )
            self.learner.rows = self.async_loop
        state = State(self.learner, batches.steps)
        first = self.learner.parts() if self.servers is not None else ()
        self.worker = assemble(
            world.config,
            self.session,
            self.ring,
            state,
            batches,
            report,
            Restore(state, self.checkpoints, None, first),
            lambda final_metrics: fleet.export(self, final_metrics),
            servers=self.servers,
            async_loop=self.async_loop,
            evaluation=evaluation,
            keep=lambda step: fleet.keeps(self, step),
        )
        self._main = greenlet(lambda: fleet.live(self))
        self._hub = getcurrent()
        self._beside: list[greenlet] = []  # waiting background work
        # its process
        self.alive = True
        self.placed = False
        self.frozen = False
        self.greeted = False  # its stream is open
        self.is_ready = False
        self.stopping = False
        self.asked_at: float | None = None  # when it received SIGTERM
        self.greeted_at = 0.0  # when it greeted its present master
        self.evaluating = False
        self.failed = False  # it has reported its failure
        self.own_end = False  # it ended by its own fault
        self.fenced = False  # the master ignores all its messages
        self.silent_since: float | None = None  # its messages are delayed since then, until `audible_at`
        self.audible_at = 0.0
        self.writes_until = 0.0  # the end of its pending checkpoint writes
        self.to_do: list[Callable[[], None]] = []  # actions for the thaw
        self.blow: Exception | None = None  # the error thrown into the main thread
        # its streams, both ordered
        self.master = 0  # the number of the master that it is connected to
        self.inbox_at = 0.0
        self.outbox_at = 0.0
        # the simulator's own records, independent of the worker's reports
        self.has_state = False  # it has had the ring's state

    def _learner(self, positions: int) -> CountingLearner:
        world, fleet = self.fleet.world, self.fleet
        works, now = lambda: fleet.works(self), lambda: world.clock.now
        if self.servers is None:
            return CountingLearner(positions, works, world.sums, now)
        if world.config.asynchronous:
            return CountingServed(
                positions,
                works,
                exact=world.config.ps.grads_to_wait == 1 and not world.config.ps.scale_rate_by_staleness,
            )
        learner = CountingRows(positions, works, world.sums, now)
        learner.rows = self.servers
        return learner

    def pulls(self) -> None:
        """Pull all rows of the worker's state from the servers, as saving the model does."""
        if self.async_loop is not None:
            self.async_loop.all_rows(0)
        elif self.servers is not None:
            self.servers.all_rows(0)

    def _cut(self) -> None:
        """Cut the ring and the calls to servers, as in trainer/start/startup.py."""
        self.ring.cut()
        if self.servers is not None:
            self.servers.cut()

    @property
    def step(self) -> int:
        return self.worker.state.step

    @property
    def weights(self) -> np.ndarray:
        return self.learner.weights

    @property
    def group(self) -> InProcessGroup | None:
        """The ring that the worker is in, or will enter."""
        return self.ring.group

    # --- its main thread

    def go_on(self) -> None:
        """Resume the main thread to check its condition. Must not be called from a main thread."""
        assert getcurrent() is self._hub
        beside, self._beside = self._beside, []
        for work in beside:
            work.switch()
        if not self._main.dead:
            self._main.switch()

    def hit(self, error: Exception) -> None:
        """Raise an error in the main thread, wherever it is."""
        self.blow = error
        if not self._main.dead:
            self._main.throw(error)

    def waits(self, until: Callable[[], object] = lambda: False, seconds: float | None = None) -> None:
        """Let the main thread wait until the condition is true, or for some seconds.

        Code that makes the condition true must call `go_on`.
        """
        end = None if seconds is None else self.clock.now + seconds
        if seconds is not None:
            self.fleet.does(self, seconds, self.go_on)
        while not until() and (end is None or self.clock.now < end):
            self._hub.switch()

    def waits_beside(self, until: Callable[[], object]) -> None:
        """Wait for the condition in the main thread or in background work."""
        if getcurrent() is self._main:
            self.waits(until)
        while not until():
            self._beside.append(getcurrent())
            self._hub.switch()

    @property
    def done(self) -> bool:
        """Whether the main thread has ended."""
        return bool(self._main.dead)

    def buried(self) -> None:
        """End the main thread after the run."""
        if not self._main.dead:
            self._main.throw()


class SlowReads(AtOnce):
    """Reads at once. But when the worker leaves a ring, a further read has sometimes not returned."""

    def __init__(self, w: Sim, chance: random.Random):
        self._w, self._chance = w, chance
        w.session.waiting.leave = lambda: True  # type: ignore[method-assign]  # wait no real time for it

    def submit(self, read: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        if read is not nothing or self._chance.random() > 0.3:
            return super().submit(read, *arguments, **named)
        returned: Future[Any] = Future()
        seconds = self._chance.choice((0.001, 0.3, 5.0))
        self._w.fleet.does(self._w, seconds, lambda: returned.set_result(None))
        return returned


class Bell:
    """Wakes the main thread of a simulated worker."""

    def __init__(self, w: Sim):
        self._w, self._rung = w, False

    def set(self) -> None:
        self._rung = True
        if self._w.is_ready:
            self._w.go_on()

    def clear(self) -> None:
        self._rung = False

    def wait(self, timeout: float | None = None) -> None:
        self._w.waits(lambda: self._rung, timeout)
