# SPDX-License-Identifier: Apache-2.0
"""The rows of a model's tables in this process.

They serve where no servers run: in a worker's warm-up, the trial and the preflight, for a model that is
trained in one process, and in tests. They are trained as servers train them: of a table, only the rows that a
step has had.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from edl.trainer.embedding.interfaces import Commit, Table

# Given a table and ids [n], their initial rows, float32 [n, dim].
Initial = Callable[[Table, np.ndarray], np.ndarray]


class LocalRows:
    """The rows of tables in this process, without servers.

    Args:
        seed: the seed of the initial rows.
        initial: gives these instead.
    """

    def __init__(self, tables: Sequence[Table], seed: int = 0, initial: Initial | None = None):
        self._tables = [
            _Rows(table, initial or (lambda table, ids: born(table, ids, seed))) for table in tables
        ]
        self._staged: dict[tuple[int, int], Sequence[tuple[np.ndarray, np.ndarray]]] = {}
        self._lock = threading.Lock()  # ranks of a test are threads

    def pull(self, step: int, ids: Sequence[np.ndarray]) -> list[np.ndarray]:
        with self._lock:
            return [table.of(some) for table, some in zip(self._tables, ids, strict=True)]

    def stage(self, step: int, rank: int, gradients: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        with self._lock:
            self._staged = {key: value for key, value in self._staged.items() if key[0] == step}
            self._staged[step, rank] = gradients

    def all_rows(self, table: int) -> tuple[np.ndarray, np.ndarray]:
        with self._lock:
            return self._tables[table].all()

    def rows_of(self, table: int, ids: np.ndarray) -> np.ndarray:
        """Rows that were never trained are zeros: they stand for others while a model is tried."""
        found = np.zeros((len(ids), self._tables[table].dim), np.float32)
        known, rows = self.all_rows(table)
        there = np.isin(known, ids)
        found[np.searchsorted(ids, known[there])] = rows[there]
        return found

    def took(self, commit: Commit) -> None:
        """Apply the step, or drop it."""
        with self._lock:
            staged = [
                (rank, g)
                for (step, rank), g in sorted(self._staged.items(), key=lambda s: s[0])
                if step == commit.step
            ]
            self._staged.clear()
            if commit.skipped:
                return
            for number, table in enumerate(self._tables):
                table.apply([gradients[number] for _, gradients in staged], commit)


@dataclass
class _Row:
    values: np.ndarray
    slots: list[np.ndarray] = field(default_factory=list)
    steps: int = 0  # that had its id


class _Rows:
    """The rows of one table."""

    def __init__(self, table: Table, initial: Initial):
        self._table, self._initial, self.dim = table, initial, table.dim
        made = json.loads(table.optimizer)
        self._optimizer, self._config = made["class_name"], made["config"]
        self._rows: dict[int, _Row] = {}

    def of(self, ids: np.ndarray) -> np.ndarray:
        """Return the rows of ids [n], float32 [n, dim]; unlearned ids have their initial rows."""
        found = np.zeros((len(ids), self._table.dim), np.float32)
        unknown = [place for place, id_ in enumerate(ids.tolist()) if id_ not in self._rows]
        if unknown:
            found[unknown] = self._initial(self._table, ids[unknown])
        for place, id_ in enumerate(ids.tolist()):
            if (row := self._rows.get(id_)) is not None:
                found[place] = row.values
        return found

    def all(self) -> tuple[np.ndarray, np.ndarray]:
        """Return all ids, int64 [n], and their rows, float32 [n, dim]."""
        ids = np.fromiter(self._rows, np.int64, len(self._rows))
        return ids, self.of(ids)

    def apply(self, of_ranks: Sequence[tuple[np.ndarray, np.ndarray]], commit: Commit) -> None:
        """Apply a step: add up the gradients in the order of the ranks, and update each row once."""
        total: dict[int, np.ndarray] = {}
        for ids, values in of_ranks:  # in the order of the ranks
            for id_, value in zip(ids.tolist(), values, strict=True):
                total[id_] = total[id_] + value if id_ in total else value
        if not total:
            return
        ids = np.fromiter(total, np.int64, len(total))
        new = [id_ not in self._rows for id_ in ids.tolist()]
        for id_, values in zip(ids[new].tolist(), self._initial(self._table, ids[new]), strict=True):
            self._rows[id_] = _Row(np.array(values, np.float32))
        for id_, value in total.items():
            row = self._rows[id_]
            row.steps += 1
            if row.steps >= self._table.min_count:
                self._update(row, value * np.float32(commit.scale), commit)

    def _update(self, row: _Row, gradient: np.ndarray, commit: Commit) -> None:
        """Update rows as the Keras optimizer of this name does."""  # noqa: DOC501 (cannot happen)
        of, one = self._config, np.float32(1)
        own = self._table.own_learning_rate
        rate = np.float32(of["learning_rate"] if own else commit.learning_rate)
        if of.get("clipvalue") is not None:
            gradient = np.clip(gradient, -of["clipvalue"], of["clipvalue"])
        if not row.slots:
            fill = np.float32(of.get("initial_accumulator_value", 0.0))
            row.slots = [np.full_like(gradient, fill), np.zeros_like(gradient)]
        first, second = row.slots
        if self._optimizer == "SGD":
            if momentum := np.float32(of.get("momentum") or 0.0):
                second[:] = momentum * second - rate * gradient
                row.values += momentum * second - rate * gradient if of.get("nesterov") else second
            else:
                row.values -= rate * gradient
        elif self._optimizer == "Adagrad":
            first += gradient * gradient
            row.values -= rate * gradient / np.sqrt(first + np.float32(of["epsilon"]))
        elif self._optimizer == "Adam":
            beta_1, beta_2 = np.float32(of["beta_1"]), np.float32(of["beta_2"])
            nth = np.float32(commit.iteration + 1)
            first += (gradient - first) * (one - beta_1)
            second += (gradient * gradient - second) * (one - beta_2)
            alpha = rate * np.sqrt(one - beta_2**nth) / (one - beta_1**nth)
            row.values -= alpha * first / (np.sqrt(second) + np.float32(of["epsilon"]))
        elif self._optimizer == "Ftrl":
            self._ftrl(row, gradient, rate)
        else:
            raise AssertionError(f"{self._optimizer} is refused")

    def _ftrl(self, row: _Row, gradient: np.ndarray, rate: np.float32) -> None:
        of, (accumulator, linear) = self._config, row.slots
        power = np.float32(of["learning_rate_power"])
        l1, l2 = (np.float32(of[f"l{n}_regularization_strength"]) for n in (1, 2))
        l2 += np.float32(of["beta"]) / (np.float32(2) * rate)
        shrunk = gradient + np.float32(2 * of["l2_shrinkage_regularization_strength"]) * row.values
        new = accumulator + gradient * gradient
        linear += shrunk - (new**-power - accumulator**-power) / rate * row.values
        quadratic = new**-power / rate + np.float32(2) * l2
        row.values[:] = (np.clip(linear, -l1, l1) - linear) / quadratic
        accumulator[:] = new


# --- initial rows


def born(table: Table, ids: np.ndarray, seed: int) -> np.ndarray:
    """Return initial rows, float32 [n, dim], which depend on (seed, name of the table, id) alone.

    They differ from the initial rows that servers draw.
    """
    made = json.loads(table.initializer)
    name, of = made["class_name"], made["config"]
    shape = len(ids), table.dim
    if name in ("Zeros", "Ones", "Constant"):
        value = {"Zeros": 0.0, "Ones": 1.0}.get(name, of.get("value", 0.0))
        return np.full(shape, value, np.float32)
    chance = _chances(table, ids, seed)
    if name == "RandomUniform":
        return (of["minval"] + (of["maxval"] - of["minval"]) * chance).astype(np.float32)
    if name == "RandomNormal":
        return (of["mean"] + of["stddev"] * _normal(chance)).astype(np.float32)
    if name == "TruncatedNormal":
        low, high = 0.022750131948179195, 0.9772498680518208  # of two standard deviations
        return (of["mean"] + of["stddev"] * _normal(low + (high - low) * chance)).astype(np.float32)
    rows = np.zeros(shape, np.float32)
    keys = _words(table, ids, seed, 1)[:, 0] >> np.uint64(34)
    for place, key in enumerate(keys.tolist()):
        initializer = keras.initializers.deserialize(made)
        if hasattr(initializer, "seed"):
            initializer = type(initializer).from_config({**initializer.get_config(), "seed": int(key)})
        rows[place] = np.asarray(initializer((1, table.dim), dtype="float32"))[0]
    return rows


def _normal(chance: np.ndarray) -> Any:
    return tf.math.ndtri(tf.constant(chance)).numpy()


def _chances(table: Table, ids: np.ndarray, seed: int) -> np.ndarray:
    """Return uniform random numbers between 0 and 1, float64 [n, dim]."""
    words = _words(table, ids, seed, table.dim)
    return ((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def _words(table: Table, ids: np.ndarray, seed: int, count: int) -> np.ndarray:
    """Return random words, uint64 [n, count], by counting through SplitMix64."""
    key = int.from_bytes(hashlib.sha256(f"{seed}/{table.name}".encode()).digest()[:8], "little")
    of_ids = _mixed(ids.astype(np.int64).view(np.uint64) ^ np.uint64(key))
    steps = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return _mixed(of_ids[:, None] + steps)


def _mixed(x: np.ndarray) -> np.ndarray:
    """SplitMix64's output function."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
