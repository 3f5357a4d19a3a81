# SPDX-License-Identifier: Apache-2.0
"""Asynchronous SGD (mode=ps), from one worker's side: the loop over leased steps.

    lease ─▶ pull ─▶ gradients ─▶ push    until all steps below the limit of the async phase are accepted
    then: drain, keep, and all workers pull the same weights

Between two boundaries (the ends of epochs, evaluations, checkpoints) workers do not wait for each other. One
server, the coordinator, leases steps, and each worker computes its steps alone. At a boundary all workers
have the same weights, and the ring evaluates and runs callbacks as in the other modes. So a ring is formed as
in the other modes, but has nothing to all-reduce during the async phase.

**The state is on the servers.** The servers also store the ledger, the job's state beside the weights, at
each boundary. New workers continue from it, so no state is lost with any worker, or with all of them.

**Every record counts once in every weight**: a server accepts each step once. If a worker dies during a step,
or a server loses its log, the step is computed again and counts on the servers that lack it. Weights on two
servers may then have learned from two computations of the same step; such duplicates are counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import numpy as np

from edl.config import Config
from edl.contract.steps import Steps
from edl.trainer.agreement.checks import NonFinite
from edl.trainer.agreement.ledger import Ledger
from edl.trainer.embedding.interfaces import Table
from edl.trainer.ps_client.client import PsClient
from edl.trainer.ps_client.interfaces import StepGradients
from edl.trainer.records.batches import Batch, Batches
from edl.trainer.ring.base import RingBroken
from edl.trainer.runtime.log import log
from edl.trainer.runtime.serialization import decode, encode
from edl.trainer.runtime.watchdog import Computing, uncounted
from edl.trainer.session.state import Session
from edl.trainer.session.telemetry import Telemetry

AT_ONCE = 2  # leased steps per worker: one in progress, and one whose records are read ahead
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.002, 0.1  # between two lease requests when no step is left
MAX_BATCHES = 1 << 20  # greater than the number of batches of an evaluation


class Learner(Protocol):
    """A model whose weights are on servers (trainer/step/ps_learner.py)."""

    @property
    def server_tables(self) -> tuple[Table, ...]:
        """All tables, dense ones included; always the same."""
        ...

    @property
    def tables(self) -> tuple[Table, ...]:
        """The tables of embedding rows; they come first among `server_tables`."""
        ...

    def dense_values(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return all dense rows of this process: of each table ids int64 [n], rows float32 [n, dim]."""
        ...

    def dense_ids(self, whole: bool) -> list[np.ndarray]:
        """Return the row ids of the two dense tables, int64 [n]: all, or only those that steps change."""
        ...

    def put(self, whole: bool, rows: Sequence[np.ndarray]) -> None:
        """Set the dense weights to these rows, float32 [n, dim] for each id of `dense_ids(whole)`."""
        ...

    def gradients(
        self, step: int, batch: Batch, of_rows: Callable[[], Sequence[tuple[np.ndarray, np.ndarray]]]
    ) -> StepGradients:
        """Compute the gradients of one step.

        Args:
            of_rows: called after the gradients were computed; returns the gradients of embedding rows: ids
                and values of each table.
        """
        ...

    def at(self, step: int) -> None:
        """Record the number of steps in the weights."""
        ...

    def beside(self) -> bytes:
        """Return the part of the state that is on no server."""
        ...

    def take_beside(self, data: bytes) -> None:
        """Set the part of the state that is on no server.

        Raises:
            ModelError: it belongs to a different model.
        """
        ...

    def refuse_changed(self, changed: Mapping[int, np.ndarray]) -> None:
        """Check what callbacks have changed, by index in `parts`.

        Raises:
            ModelError: they have changed weights, which are on servers.
        """
        ...


class AsyncLoop:
    """The async phases of one worker.

    Args:
        clock: monotonic seconds.
        computing: limits the time that this worker computes in a step.
    """

    def __init__(
        self,
        config: Config,
        session: Session,
        learner: Learner,
        servers: PsClient,
        batches: Batches,
        report: Telemetry,
        clock: Callable[[], float] = time.monotonic,
        computing: Computing = uncounted,
    ):
        self._computing = computing
        self._config, self._session, self._learner = config, session, learner
        self.servers, self._batches, self._report, self._clock = servers, batches, report, clock
        self._steps: Steps = batches.steps
        self._held: list[int] = []  # steps leased to this worker
        self._kept_order = -1
        self.has_steps = False  # whether a server had accepted any step at the last `look`
        self.reached = 0  # all steps below it are in all weights, as of the last report
        self.furthest = 0  # one more than the last step that any server has accepted, as agreed in the ring
        self.at_boundary = True  # whether its weights are those of a boundary
        # About the step in progress:
        self._versions: Mapping[int, int] = {}  # of the weights that the step uses, by server
        self._with_rows = False  # pull the dense weights together with the rows of the step
        self._staged: Sequence[tuple[np.ndarray, np.ndarray]] = ()
        self._since_pull = 0  # steps computed since the dense weights were pulled
        self._dense_versions: Mapping[int, int] = {}
        self._saved = 0  # the model being saved has the steps below it; 0: none is being saved
        servers.declare(learner.server_tables)

    # --- state of the job

    def look(self, wait_forever: bool = False) -> list[int]:
        """Declare the tables; returns the servers without rows.

        Args:
            wait_forever: wait for every server, even if others hold its rows.
        """
        self._since_pull = 0
        found = self.servers.look(wait_forever)
        self.has_steps = any(len(told.accepted.bounds) for told in found.values())
        return [index for index, told in found.items() if told.position.empty]

    def refuse_changed(self, changed: Mapping[int, np.ndarray]) -> None:
        """Raise ModelError if callbacks have changed weights that are on servers."""
        self._learner.refuse_changed(changed)

    def begin(self, only: Sequence[int] | None = None) -> None:
        """Start the job on servers without rows, with this worker's weights."""
        self.servers.begin(self._learner.dense_values(), only)

    def keep(self, ledger: Ledger) -> None:
        """Store the ledger on the servers, unless they have it.

        One worker calls this, between async phases.
        """
        order = _order(ledger)
        if order > self._kept_order:
            self.servers.keep(ledger.step, order, self.packed(ledger))
            self._kept_order = order

    def packed(self, ledger: Ledger) -> bytes:
        return encode([ledger.pack(), self._learner.beside()])

    def take_over(self, kept: bytes) -> Ledger:
        """Take over a stored ledger and pull all weights: together they are the state."""
        packed, beside = decode(kept)
        self._learner.take_beside(beside)
        ledger = Ledger.unpack(packed)
        self._kept_order = _order(ledger)
        self.pull_all(ledger.step)
        self.at_boundary, self._saved = True, 0
        return ledger

    def pull_all(self, step: int) -> None:
        """Pull all current dense weights."""
        ids = [np.zeros(0, np.int64) for _ in self._learner.tables]
        pulled = self.servers.pull_current([*ids, *self._learner.dense_ids(whole=True)])
        self._learner.put(True, pulled.rows[len(ids) :])
        self._learner.at(step)
        self._since_pull = 0

    def pull_newest(self, step: int) -> int:
        """Pull all weights, and return their step: `step`, or a later one if the servers are further."""
        try:
            step = max(step, self.find_progress())
            self.pull_all(step)
        except RingBroken as error:  # of a server: a checkpoint of it fails then, with the reason
            log.warning(str(error))
        return step

    def find_progress(self) -> int:
        """Refresh and return `reached`."""
        self.reached = self.servers.find_progress().step
        return self.reached

    def boundary(self, step: int, end: int) -> int:
        """The end of the async phase that starts at `step`."""
        per_epoch = self._steps.per_epoch
        each = (self._config.evaluation.steps, self._config.checkpoint.steps, per_epoch)
        return min([end, *((step // n + 1) * n for n in each if n)])

    # --- the async phase

    def run(self, generation: int, rank: int, limit: int, now_and_then: Callable[[], None]) -> bool:
        """Compute leased steps until all below `limit` are accepted.

        Args:
            now_and_then: called between two steps.

        Returns:
            False if this worker must leave the ring before.

        Raises:
            RingBroken: the ring was cut, or a server has lost its state.
        """
        pause = FIRST_PAUSE_SECONDS
        self._held = [step for step in self._held if step < limit]
        while True:
            if self._session.was_cut(generation):
                raise RingBroken("the ring was cut")
            if self._session.must_leave(generation):
                return False
            if not self._held:
                self._held = self.servers.lease_steps(self._session.worker, AT_ONCE, limit)
                self.reached = self.servers.progress.step
            if self._held:
                pause = FIRST_PAUSE_SECONDS
                self._make(generation, rank, self._held[0], self._held[1:])
                self._held.pop(0)
            elif self.reached >= limit:
                return True
            else:  # other workers hold the remaining leases
                self.servers.pause(pause)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            now_and_then()

    def forget(self) -> None:
        """Drop the leases: the servers have rolled back."""
        self._held, self._kept_order = [], -1

    def _make(self, generation: int, rank: int, step: int, ahead: Sequence[int]) -> None:
        self._report.step_begins()
        batch = self._batches.any(step, ahead)
        assert batch is not None and len(batch), "a step without records"
        while True:
            began = self._clock()
            with self._computing("step", partial(_named, step, batch), len(batch)):
                made = self._gradients(step, batch)
            if made.skipped and self._config.training.on_non_finite == "stop":
                raise NonFinite(batch, step, self._session.worker)
            computed = self._clock() - began
            if self.servers.push(made, self._session.worker, self._versions):
                break
            self._since_pull = 0  # the weights were too old: repeat the step with new ones
            if self._session.was_cut(generation):
                raise RingBroken("the ring was cut")
        if made.skipped:
            self._session.warn(f"step {step + 1} is left out: its loss or a gradient is not finite")
        progress = self.servers.progress
        self.reached = progress.step
        missed = max(0, progress.version - 1 - self._versions[self.servers.coordinator])
        self._report.step_pushed(
            generation,
            rank,
            self.reached,
            step,
            len(batch),
            computed,
            made.loss,
            made.records,
            missed,
            progress.repeated,
        )

    def _gradients(self, step: int, batch: Batch) -> StepGradients:
        due = self._since_pull % self._config.ps.pull_steps == 0
        self._since_pull, self.at_boundary = self._since_pull + 1, False
        self._staged, self._versions = (), {}
        self._with_rows = due and bool(self._learner.tables)
        if due and not self._with_rows:
            pulled = self.servers.pull_current(self._learner.dense_ids(whole=False))
            self._learner.put(False, pulled.rows)
            self._dense_versions = pulled.versions
        self._versions = self._dense_versions
        return self._learner.gradients(step, batch, lambda: self._staged)

    # --- rows of embeddings, as the learner asks for them (trainer/embedding/lookups.py)

    def pull(self, step: int, ids: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Pull current rows; the first pull of a step may include the dense weights."""
        more = self._learner.dense_ids(whole=False) if self._with_rows else []
        pulled = self.servers.pull_current([*ids, *more])
        if more:
            self._with_rows = False
            self._learner.put(False, pulled.rows[len(ids) :])
            self._versions = self._dense_versions = pulled.versions
        return pulled.rows[: len(ids)]

    def stage(self, step: int, rank: int, gradients: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        self._staged = gradients

    def saves(self, step: int) -> None:
        """Make `all_rows` require exactly the steps below this one, for a model that is being saved.

        A server that has lost its log may have other steps meanwhile, or one that a late worker pushed.
        """
        self._saved = step

    def all_rows(self, table: int) -> tuple[np.ndarray, np.ndarray]:
        """Read all rows of a table.

        Raises:
            RingBroken: a server has other steps than the model being saved.
        """
        return self.servers.all_rows(table, self._saved)

    # --- reporting

    def tell(self) -> None:
        """Log the staleness of this worker's last steps, and the job's number of duplicate steps."""
        if (found := self._report.async_phase_done(self.servers.progress.repeated)) is not None:
            log.info(
                f"staleness of the last {found.steps} steps of this worker: {found.median:g} updates "
                f"(median), at most {found.most}; {found.repeated} steps of the job were pushed again after "
                "they were accepted"
            )


def _named(step: int, batch: Batch) -> str:
    return f"step {step + 1}, with the {batch},"


def _order(ledger: Ledger) -> int:
    """A number that grows with the ledger."""
    return (ledger.step * MAX_BATCHES + ledger.round) * 2 + ledger.callbacks_done
