"""What a worker's loop is given: a model, the servers of its rows, the evaluation of it, and the user's
callbacks, as it sees them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from edl.checkpoints import Part as FilePart
from edl.contract.evaluation import Pass
from edl.contract.layout import Part
from edl.contract.rows.placement import ShardAssignment
from edl.errors import CheckpointError
from edl.trainer.agreement import control
from edl.trainer.agreement.epochs import Epochs, Turn
from edl.trainer.agreement.metric_values import Value
from edl.trainer.model.data import Batch
from edl.trainer.model.variable_spec import Described
from edl.trainer.ring.base import RingBroken


@dataclass(frozen=True, slots=True)
class Table:
    """A table of embeddings whose rows are on parameter servers (ps.proto, Table)."""

    name: str
    dim: int
    initializer: str  # JSON, as `keras.initializers.serialize` has it
    optimizer: str  # JSON, as `keras.optimizers.serialize` has it
    own_learning_rate: bool = False  # its optimizer's; else that of the model's
    min_count: int = 0
    ttl_steps: int = 0


@dataclass(frozen=True, slots=True)
class Commit:
    """What became of the step that was taken at `step` (ps.proto, Commit)."""

    step: int
    skipped: bool  # it was left out: its gradients are dropped
    scale: float  # what the sum of all ranks' gradients is multiplied with
    learning_rate: float  # of the model's optimizer in this step
    iteration: int  # updates of the model before it
    generation: int = 0  # of the servers, in which its gradients were staged


@dataclass(frozen=True, slots=True)
class SampleLoss:
    """The loss of the first records with fixed weights (trainer/step/sample_loss.py)."""

    loss: float
    tolerance: float  # the relative difference that rounding can explain


@dataclass(frozen=True, slots=True)
class StepGradients:
    """What a step has to teach, where all weights are on servers (ps.proto, PushRequest)."""

    step: int
    gradients: Sequence[tuple[np.ndarray, np.ndarray]]  # of each table: ids int64 [n], float32 [n, dim]
    loss: float  # mean over its records
    records: int
    learning_rate: float  # of the model's optimizer in this step
    skipped: bool = False  # it was not finite: it counts as made, and changes nothing


@dataclass(frozen=True, slots=True)
class Whole:
    """How far the job is, as the coordinator of its servers has it."""

    step: int = 0  # all steps below it are in all weights
    loss: float = 0.0  # of the steps since something was kept: the sum over their records
    records: int = 0
    version: int = 0  # updates
    repeated: int = 0  # steps that came again after they were taken


@dataclass(frozen=True, slots=True)
class Pulled:
    """Rows, and how many updates they have on each server."""

    rows: list[np.ndarray]  # of each table, float32 [n, dim]
    versions: Mapping[int, int]  # by the server's index


@dataclass(frozen=True, slots=True)
class Start:
    """The rows that a training begins with, which another one has learned.

    Args:
        directory: of that one's checkpoints, or an address; empty: all rows are in `rows`.
        step, attempt: of the checkpoint.
        everything: what the optimizer keeps, too.
        tables: by name, that the servers read there themselves.
        rows: of other tables, by number: ids int64 [n], each once, and rows float32 [n, dim].
    """

    directory: str = ""
    step: int = 0
    attempt: str = ""
    everything: bool = False
    tables: tuple[str, ...] = ()
    rows: Mapping[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)

    def digest(self) -> str:
        """Of which rows they are."""
        found = hashlib.sha256(repr((self.step, self.attempt, self.tables)).encode())
        for number, of_table in sorted(self.rows.items()):
            found.update(number.to_bytes(4, "little"))
            for values in of_table:
                found.update(np.ascontiguousarray(values).data)
        return found.hexdigest()


class Rows(Protocol):
    """The rows of a model's tables, as its step sees them."""

    def pull(self, step: int, ids: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Rows of the state at `step`.

        Args:
            ids: of each table, int64 [n], each once; they may be none.

        Returns:
            of each table, float32 [n, dim].

        Raises:
            RingBroken: the ring was cut before they were here.
        """
        ...

    def stage(self, step: int, rank: int, gradients: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        """This rank's gradients for the step that is taken at `step`: before it takes part in the step's
        sums, so that they are there when these have come back anywhere.

        Args:
            gradients: of each table, ids int64 [n], each once, and values float32 [n, dim].

        Raises:
            RingBroken: the ring was cut before all servers had them.
        """
        ...


class Begun(Protocol):
    """A call that was begun, and is answered while something else is done."""

    def result(self) -> Any:
        """As if the call had been made now, with all that it raises."""
        ...

    def forget(self) -> None:
        """Nobody waits for it any more."""
        ...


@runtime_checkable
class RowsAhead(Rows, Protocol):
    """Rows that can be asked for before they are needed."""

    def begin_pull(self, step: int, ids: Sequence[np.ndarray], last: Commit | None = None) -> Begun:
        """`pull`, of which the result comes later.

        Args:
            last: what became of the step before, if that is not in this worker's state yet.
        """
        ...

    def begin_stage(self, step: int, rank: int, gradients: Sequence[tuple[np.ndarray, np.ndarray]]) -> Begun:
        """`stage`, which is done when this has a result."""
        ...

    @property
    def generation(self) -> int:
        """Of the ring. What was begun in another one is of no use."""
        ...


class Servers(Rows, Protocol):
    """The same, as the loop sees them."""

    def follow(self, tables: Sequence[Table], last: Callable[[], Commit | None]) -> None:
        """Whose rows they have, and what tells with each call which step has led to this worker's state."""
        ...

    def enter(self, addresses: Sequence[str] = (), servers: int = 0) -> None:
        """This worker is to be in a new ring: from now on it may be cut.

        Args:
            addresses: of the servers, host:port by index; none: those that are known.
            servers: how many of them are to have the rows; 0: all.
        """
        ...

    @property
    def generation(self) -> int:
        """Of which all calls are."""
        ...

    def claim(self, worker: int) -> int:
        """The root of a new ring asks all servers for a generation of theirs that is newer than all before.

        The master's will not do: a master that finds no worker begins to count anew.

        Raises:
            RingBroken: the ring was cut before all of them had answered.
        """
        ...

    def speak_of(self, generation: int) -> None:
        """The generation that the root has claimed: all calls are of it from now on."""
        ...

    def leave(self) -> None:
        """It has left it. What was cut is over: calls for the state that it has are possible again."""
        ...

    def start_generation(self, step: int) -> str:
        """The root of a new ring tells all servers where the ring is.

        Returns:
            why the ring has to go back, and the servers with it; empty: they are there too.

        Raises:
            RingBroken: the ring was cut before all of them had answered.
        """
        ...

    def restore(self, step: int, attempt: str) -> None:
        """All servers go back to the checkpoint of this step, or on to it; 0: they begin anew.

        Raises:
            RingBroken: as above.
        """
        ...

    @property
    def assignment(self) -> ShardAssignment:
        """In which the servers have the rows."""
        ...

    @property
    def moves(self) -> bool:
        """Whether rows are elsewhere than where they are to be, as the root knows after
        `start_generation`."""
        ...

    def move(self, step: int) -> str:
        """The root has the rows moved to where they are to be. All who hold the state have that of this step.

        Returns:
            why they stay where they are; empty: they do not.

        Raises:
            RingBroken: as above. One assignment is complete then, and the next root finds it.
        """
        ...

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where they listen, host:port by index, as far as is known."""
        ...

    def adopt(self, assignment: ShardAssignment, addresses: Sequence[str] = ()) -> None:
        """All calls go to the servers of this assignment from now on, at these addresses."""
        ...

    def cut(self) -> None:
        """The ring is called off, from any thread: no call waits any more."""
        ...


class TrainedOn(RingBroken):
    """The servers have taken steps of another epoch, which is to be trained to its end."""


class PartNotWritten(CheckpointError):
    """A server went away before its part of a checkpoint was written: it may write it when it is back."""


class PartsOfServers(Protocol):
    """What of the servers is in a checkpoint."""

    @property
    def count(self) -> int:
        """How many there are."""
        ...

    def take_parts(
        self, step: int, attempt: str, first: int
    ) -> AbstractContextManager[Callable[[], Sequence[FilePart]]]:
        """Have each server take its part of a checkpoint of this step, and write it beside the training. When
        this returns, all of them have taken it.

        Args:
            first: how many parts there are before theirs.

        Returns:
            a block to be entered once. Inside, call its value to wait until all parts are written. When the
            block ends, parts that are not written are given up.

        Raises:
            CheckpointError: one of them could not. The value of the block raises it, too.
            PartNotWritten: one of them went away before it had. The value of the block raises it, too.
        """
        ...

    def answer_within(self, seconds: float) -> bool:
        """Whether all of them answer, also one that is away now and is back within so many seconds.

        Raises:
            RingBroken: it is called off.
        """
        ...

    def committed(self, step: int, attempt: str) -> None:
        """That checkpoint is whole. Fails silently: the next one says more."""
        ...


class Learner(Protocol):
    """A model, as two halves of a step: its sums over the ring, and what they change."""

    def sums(
        self, batch: Batch | None, contribution: np.ndarray, step: int, rank: int, records: int
    ) -> control.Sums:
        """Take part in all sums of a step. Changes nothing.

        Args:
            batch: this rank's part; None: it has none, and takes part with weight zero.
            contribution: the control vector of this rank; what depends on the batch is added here.
            records: of the whole step, on all ranks, bad ones included.

        Raises:
            RingBroken: one of the sums did not come back here.
        """
        ...

    def apply(self, sums: control.Sums) -> None:
        """Apply what the sums have given to the model."""
        ...

    @property
    def tables(self) -> tuple[Table, ...]:
        """Whose rows are on servers."""
        ...

    def commit(self, step: int, sums: control.Sums) -> Commit:
        """What the servers have to know of the step that was taken at `step`, before it is applied."""
        ...

    def take_metrics(self) -> dict[str, Value]:
        """The compiled metrics over the epoch that has ended; the next one begins with none."""
        ...

    @property
    def has_loss(self) -> bool:
        """Whether the mean loss of an epoch is in its history, if it is not among these metrics."""
        ...

    @property
    def follows(self) -> bool:
        """Whether sums can be applied later than they are made, in another state."""
        ...

    @property
    def nbytes(self) -> int:
        """How large the state is."""
        ...

    def parts(self) -> list[np.ndarray]:
        """Everything that `apply` changes, uint8 [bytes] for each variable: as it is now, whatever is applied
        later."""
        ...

    def prepared(self, parts: list[np.ndarray]) -> Any:
        """Another worker's `parts`, for `take_over`: what takes time, on any thread. Changes nothing; each
        part is dropped from the list as soon as it is used."""
        ...

    def take_over(self, values: Any) -> None:
        """Take over what was prepared."""
        ...

    def change(self, values: Mapping[int, np.ndarray]) -> None:
        """Give some of the variables of `parts` other values."""
        ...

    def described(self) -> list[Described]:
        """The variables of `parts`."""
        ...

    def fingerprint(self) -> str:
        """Of how the model is made: equal on two workers that can share a ring."""
        ...

    def digest(self) -> str:
        """Of the state: equal on two workers when their models are equal, bit for bit."""
        ...


class Evaluation(Protocol):
    """The held-out data, and how the model is evaluated on them."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """The records of each split that there is."""
        ...

    def after(self, step: int, epochs: int) -> tuple[Pass, ...]:
        """What is to be evaluated when so many steps are done, in a job that trains so many epochs."""
        ...

    @property
    def is_whole(self) -> bool:
        """Whether nothing is left to find out about a trained model."""
        ...

    def take(self, part: Part) -> None:
        """From now on this worker evaluates this part of each round."""
        ...

    def nothing(self, split: str) -> np.ndarray:
        """What no records add, float32 [values]."""
        ...

    def part(self, now: Pass, round: int) -> tuple[np.ndarray, int]:
        """What this rank's part of a round adds, float32 [values], and how many records it has. Changes
        nothing.

        Raises:
            anything: of the user's code, or of the data.
        """
        ...

    def results(self, split: str, totals: np.ndarray) -> dict[str, Value]:
        """The loss and the metrics that these sums over all rounds mean, float64 [values]."""
        ...


class Callbacks(Protocol):
    """The user's callbacks."""

    def turn(self, epochs: Epochs, whole: int, task: int, facts: Mapping[str, float]) -> Turn:
        """Call what is due when so many epochs are whole. Changes nothing.

        Args:
            task: epochs to be trained.
            facts: of the ring.

        Raises:
            EdlError: one of them raises, or changes what it must not.
        """
        ...
