"""The rows of embedding tables, as a training step uses them: by number, wherever they are stored."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np


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
