"""Steps in any order, where all weights are on parameter servers (mode=ps): from one worker's side.

    take ─▶ pull ─▶ gradients ─▶ push    until all steps below the stretch's limit are taken
    then: drain, keep, and all pull the same weights

Between two boundaries (the ends of epochs, and where the model is evaluated or written) workers do not wait
for each other: one server, the coordinator, hands out steps, and each worker makes them alone. At a boundary
all have the same weights, and the ring evaluates and calls callbacks as ever. So the ring is formed as ever,
and only has nothing to sum inside a stretch.

**The state is on the servers.** What the job has to know beside the weights, the ledger, is kept by the
servers at each boundary: whoever comes goes on from it. Nothing is lost with any worker, or with all of them.

**Every record counts once in every weight**: a server takes each step once. A step that was in the making
when a worker died, or a server lost its log, is made again and counts where it is missing. So weights on two
servers may have learned from gradients of two makings of that step; how many steps came again is counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias

import numpy as np

from edl.config import Config
from edl.contract.rows.placement import Arrangement
from edl.contract.steps import Steps
from edl.trainer.agreement.checks import NonFinite
from edl.trainer.agreement.ledger import Ledger
from edl.trainer.embedding.interfaces import Table
from edl.trainer.model.data import Batch, Batches
from edl.trainer.ps_client.interfaces import Pulled, StepGradients, Whole
from edl.trainer.ring.base import RingBroken
from edl.trainer.runtime.log import log
from edl.trainer.runtime.serialization import decode, encode
from edl.trainer.runtime.watchdog import Computing, uncounted
from edl.trainer.session.state import Session
from edl.trainer.session.telemetry import Telemetry

Values: TypeAlias = Sequence[tuple[np.ndarray, np.ndarray]]  # of each table: ids, and rows
AT_ONCE = 2  # steps that a worker holds: one that it makes, and one whose records are read meanwhile
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.002, 0.1  # between two questions for a step, when none is left
ROUNDS = 1 << 20  # more than an evaluation has


class Learner(Protocol):
    """A model whose weights are on servers (trainer/step/ps_learner.py)."""

    @property
    def server_tables(self) -> tuple[Table, ...]:
        """All tables, dense ones included; always the same."""
        ...

    @property
    def tables(self) -> tuple[Table, ...]: ...

    def dense_values(self) -> list[tuple[np.ndarray, np.ndarray]]: ...

    def dense_ids(self, whole: bool) -> list[np.ndarray]: ...

    def put(self, whole: bool, rows: Sequence[np.ndarray]) -> None: ...

    def gradients(
        self, step: int, batch: Batch, of_rows: Callable[[], Sequence[tuple[np.ndarray, np.ndarray]]]
    ) -> StepGradients: ...

    def at(self, step: int) -> None: ...

    def beside(self) -> bytes: ...

    def take_beside(self, data: bytes) -> None: ...

    def refuse_changed(self, changed: Mapping[int, np.ndarray]) -> None: ...


class Servers(Protocol):
    """The servers of a job (trainer/ps_client/async_client.py)."""

    @property
    def progress(self) -> Whole:
        """As the coordinator has told it last."""
        ...

    @property
    def count(self) -> int: ...

    @property
    def furthest(self) -> int: ...

    @property
    def arrangement(self) -> Arrangement: ...

    def enter(self, addresses: Sequence[str] = (), servers: int = 0) -> None: ...

    def leave(self) -> None: ...

    def declare(self, tables: Sequence[Table]) -> None: ...

    def look(self, patient: bool = False) -> dict[int, Any]: ...

    def begin(self, values: Values, only: Iterable[int] | None = None) -> None: ...

    @property
    def coordinator(self) -> int: ...

    def take_charge(self, worker: int, step: int = 0) -> bool: ...

    def moves_at(self) -> int: ...

    def move_rows(self, worker: int) -> tuple[int, str]: ...

    @property
    def addresses(self) -> tuple[str, ...]: ...

    def adopt(self, arrangement: Arrangement, addresses: Sequence[str] = ()) -> None: ...

    def restart_as(self, servers: int) -> None: ...

    def go_back(self, step: int, attempt: str) -> None: ...

    def bring_back(self, lost: Sequence[int], step: int, attempt: str) -> None: ...

    def introduce(self) -> None: ...

    def keep(self, step: int, order: int, ledger: bytes) -> None: ...

    def kept(self) -> bytes: ...

    def take(self, worker: int, most: int, limit: int) -> list[int]: ...

    def rows_now(self, ids: Sequence[np.ndarray]) -> Pulled: ...

    def push(self, made: StepGradients, worker: int, versions: Mapping[int, int]) -> bool: ...

    def drain(self, step: int) -> None: ...

    def find(self) -> None: ...

    def pause(self, seconds: float) -> None: ...

    def all_rows(self, table: int, step: int = 0) -> tuple[np.ndarray, np.ndarray]: ...


class Stretch:
    """The steps of one worker.

    Args:
        clock: seconds, never going back.
        computing: limits the time that this worker computes in a step.
    """

    def __init__(
        self,
        config: Config,
        session: Session,
        learner: Learner,
        servers: Servers,
        batches: Batches,
        report: Telemetry,
        clock: Callable[[], float] = time.monotonic,
        computing: Computing = uncounted,
    ):
        self._computing = computing
        self._config, self._session, self._learner = config, session, learner
        self.servers, self._batches, self._report, self._clock = servers, batches, report, clock
        self._steps: Steps = batches.steps
        self._held: list[int] = []  # steps that this worker is to make
        self._kept_order = -1
        self.has_steps = False  # a server has taken some, when this worker looked last
        self.reached = 0  # all steps below it are in all weights, as far as this worker knows
        self.furthest = 0  # of those that any server has taken, the one after the last; as the ring knows it
        self.at_boundary = True  # its weights are those of one, and not of a moment after it
        # Of the step in progress:
        self._versions: Mapping[int, int] = {}  # of the weights that it is made with, by server
        self._with_rows = False  # the dense weights are still to be pulled, together with its rows
        self._staged: Sequence[tuple[np.ndarray, np.ndarray]] = ()
        self._since_pull = 0  # steps that were made since the dense weights were pulled
        self._dense_versions: Mapping[int, int] = {}
        self._saved = 0  # the model that is saved has the steps below it; 0: none is

    # --- where the job is

    def take_charge(self, step: int) -> bool:
        """As the root of a new ring, and before anything else: no root before it is heard any more. Returns
        whether rows are lost that were on two servers: then all servers are to go back.

        Args:
            step: that the ring before had reached.
        """
        self.servers.declare(self._learner.server_tables)
        return self.servers.take_charge(self._session.worker, step)

    def look(self, patient: bool = False) -> list[int]:
        """Declare the tables, and find out which servers have nothing.

        Args:
            patient: one that is away is waited for, also if others have its rows.
        """
        self.servers.declare(self._learner.server_tables)
        self._since_pull = 0
        found = self.servers.look(patient)
        self.has_steps = any(len(told.taken.bounds) for told in found.values())
        return [index for index, told in found.items() if told.position.empty]

    def refuse_changed(self, changed: Mapping[int, np.ndarray]) -> None:
        """Raises ModelError if callbacks have changed what servers have."""
        self._learner.refuse_changed(changed)

    def begin(self, only: Sequence[int] | None = None) -> None:
        """The job begins on servers that have nothing, with the weights that are here."""
        self.servers.begin(self._learner.dense_values(), only)

    def keep(self, ledger: Ledger) -> None:
        """Have the servers keep this, unless they have it. By one worker, while nobody makes a step."""
        order = _order(ledger)
        if order > self._kept_order:
            self.servers.keep(ledger.step, order, self.packed(ledger))
            self._kept_order = order

    def packed(self, ledger: Ledger) -> bytes:
        return encode([ledger.pack(), self._learner.beside()])

    def take_over(self, kept: bytes) -> Ledger:
        """What somebody has kept: with all weights as they are now, and with them the state."""
        packed, beside = decode(kept)
        self._learner.take_beside(beside)
        ledger = Ledger.unpack(packed)
        self._kept_order = _order(ledger)
        self.pull_all(ledger.step)
        self.at_boundary, self._saved = True, 0
        return ledger

    def pull_all(self, step: int) -> None:
        """All dense weights as they are now."""
        ids = [np.zeros(0, np.int64) for _ in self._learner.tables]
        pulled = self.servers.rows_now([*ids, *self._learner.dense_ids(whole=True)])
        self._learner.put(True, pulled.rows[len(ids) :])
        self._learner.at(step)
        self._since_pull = 0

    def find_progress(self) -> int:
        """How far the servers are."""
        self.servers.find()
        self.reached = self.servers.progress.step
        return self.reached

    def boundary(self, step: int, end: int) -> int:
        """Where the stretch ends that begins at `step`."""
        per_epoch = self._steps.per_epoch
        each = (self._config.evaluation.steps, self._config.checkpoint.steps, per_epoch)
        return min([end, *((step // n + 1) * n for n in each if n)])

    # --- the stretch

    def run(self, generation: int, rank: int, limit: int, now_and_then: Callable[[], None]) -> bool:
        """Make steps until all below `limit` are taken; False: this worker is to leave the ring before.

        Args:
            now_and_then: is called between two steps.

        Raises:
            RingBroken: the ring was cut, or a server has lost what it had.
        """
        pause = FIRST_PAUSE_SECONDS
        self._held = [step for step in self._held if step < limit]
        while True:
            if self._session.was_cut(generation):
                raise RingBroken("the ring was cut")
            if self._session.must_leave(generation):
                return False
            if not self._held:
                self._held = self.servers.take(self._session.worker, AT_ONCE, limit)
                self.reached = self.servers.progress.step
            if self._held:
                pause = FIRST_PAUSE_SECONDS
                self._make(generation, rank, self._held[0], self._held[1:])
                self._held.pop(0)
            elif self.reached >= limit:
                return True
            else:  # others make what is left
                self.servers.pause(pause)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            now_and_then()

    def forget(self) -> None:
        """The servers have gone back: what was held is not."""
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
                raise NonFinite(
                    f"the loss or a gradient is not finite at step {step + 1}, on worker "
                    f"{self._session.worker}, in the {batch}"
                )
            computed = self._clock() - began
            if self.servers.push(made, self._session.worker, self._versions):
                break
            self._since_pull = 0  # the weights were too old: once more, with new ones
            if self._session.was_cut(generation):
                raise RingBroken("the ring was cut")
        if made.skipped:
            self._session.warn(f"step {step + 1} is left out: its loss or a gradient is not finite")
        progress = self.servers.progress
        self.reached = progress.step
        missed = max(0, progress.version - 1 - self._versions[self.servers.coordinator])
        self._report.step_pushed(
            generation, rank, self.reached, step, len(batch), computed, made.loss, made.records,
            missed, progress.repeated,
        )  # fmt: skip

    def _gradients(self, step: int, batch: Batch) -> StepGradients:
        due = self._since_pull % self._config.ps.pull_steps == 0
        self._since_pull, self.at_boundary = self._since_pull + 1, False
        self._staged, self._versions = (), {}
        self._with_rows = due and bool(self._learner.tables)
        if due and not self._with_rows:
            pulled = self.servers.rows_now(self._learner.dense_ids(whole=False))
            self._learner.put(False, pulled.rows)
            self._dense_versions = pulled.versions
        self._versions = self._dense_versions
        return self._learner.gradients(step, batch, lambda: self._staged)

    # --- rows of embeddings, as the learner asks for them (trainer/embedding/lookups.py)

    def pull(self, step: int, ids: Sequence[np.ndarray]) -> list[np.ndarray]:
        """As they are now; with the first ones of a step come the dense weights."""
        more = self._learner.dense_ids(whole=False) if self._with_rows else []
        pulled = self.servers.rows_now([*ids, *more])
        if more:
            self._with_rows = False
            self._learner.put(False, pulled.rows[len(ids) :])
            self._versions = self._dense_versions = pulled.versions
        return pulled.rows[: len(ids)]

    def stage(self, step: int, rank: int, gradients: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        self._staged = gradients

    def saves(self, step: int) -> None:
        """From now on `all_rows` is asked for a model with the steps below this one: a server that has lost
        its log may have others by now, and one whose late worker has come back, too."""
        self._saved = step

    def all_rows(self, table: int) -> tuple[np.ndarray, np.ndarray]:
        """Raises: RingBroken, if a server has other steps than the model that is saved."""
        return self.servers.all_rows(table, self._saved)

    # --- for people

    def tell(self) -> None:
        """How old the weights of this worker's last steps were, and how many steps came again."""
        if (found := self._report.stretch_done(self.servers.progress.repeated)) is not None:
            log.info(
                f"the weights of the last {found.steps} steps that were made here were {found.median:g} "
                f"updates old (median; at most {found.most}); {found.repeated} steps of the job came again "
                "after they were taken"
            )


def _named(step: int, batch: Batch) -> str:
    return f"step {step + 1}, with the {batch},"


def _order(ledger: Ledger) -> int:
    """A later one is greater."""
    return (ledger.step * ROUNDS + ledger.round) * 2 + ledger.turn
