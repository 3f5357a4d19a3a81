# SPDX-License-Identifier: Apache-2.0
"""Embedding rows, as a training step uses them, wherever they are stored."""

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
    own_learning_rate: bool = False  # True: that of its own optimizer; False: that of the model's
    min_count: int = 0
    ttl_steps: int = 0


@dataclass(frozen=True, slots=True)
class Commit:
    """The outcome of the step that was made at `step` (ps.proto, Commit)."""

    step: int
    skipped: bool  # the step was left out: its gradients are dropped
    scale: float  # factor for the sum of all ranks' gradients
    learning_rate: float  # of the model's optimizer in this step
    iteration: int  # updates of the model before it
    generation: int = 0  # of the servers, when its gradients were staged


@dataclass(frozen=True, slots=True)
class Start:
    """The rows that a training begins with, which another training has learned.

    Args:
        directory: the directory or URL of that training's checkpoints; empty if all rows are in `rows`.
        step, attempt: the step and attempt of the checkpoint.
        everything: whether the optimizer's state is loaded, too.
        tables: names of the tables that the servers load from there themselves.
        rows: rows of other tables, by number: ids int64 [n], without duplicates, and float32 [n, dim].
    """

    directory: str = ""
    step: int = 0
    attempt: str = ""
    everything: bool = False
    tables: tuple[str, ...] = ()
    rows: Mapping[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)

    def digest(self) -> str:
        """A digest that identifies these rows."""
        found = hashlib.sha256(repr((self.step, self.attempt, self.tables)).encode())
        for number, of_table in sorted(self.rows.items()):
            found.update(number.to_bytes(4, "little"))
            for values in of_table:
                found.update(np.ascontiguousarray(values).data)
        return found.hexdigest()


class Rows(Protocol):
    """The rows of a model's tables."""

    def pull(self, step: int, ids: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return rows of the state at `step`.

        Args:
            ids: for each table, int64 [n], without duplicates; may be empty.

        Returns:
            for each table, float32 [n, dim].

        Raises:
            RingBroken: the ring was cut before the rows arrived.
        """
        ...

    def stage(self, step: int, rank: int, gradients: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        """Send this rank's gradients for the step that is made at `step` to the servers.

        It is called before the step's all-reduce, so that the servers have the gradients of all ranks once
        the all-reduce has come back anywhere.

        Args:
            gradients: for each table, ids int64 [n], without duplicates, and values float32 [n, dim].

        Raises:
            RingBroken: the ring was cut before all servers had them.
        """
        ...


class Begun(Protocol):
    """A call in progress, whose result is fetched later."""

    def result(self) -> Any:
        """Wait for the result; raises as the call itself would."""
        ...

    def forget(self) -> None:
        """Drop the call: its result is not needed any more."""
        ...


@runtime_checkable
class RowsAhead(Rows, Protocol):
    """Rows that can be requested before they are needed."""

    def begin_pull(self, step: int, ids: Sequence[np.ndarray], last: Commit | None = None) -> Begun:
        """Begin a `pull`.

        Args:
            last: the outcome of the step before, if that is not in this worker's state yet.
        """
        ...

    def begin_stage(self, step: int, rank: int, gradients: Sequence[tuple[np.ndarray, np.ndarray]]) -> Begun:
        """Begin a `stage`."""
        ...

    @property
    def generation(self) -> int:
        """The ring's generation. A call begun in a different generation is of no use."""
        ...
