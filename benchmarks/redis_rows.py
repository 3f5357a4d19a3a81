# SPDX-License-Identifier: Apache-2.0
"""Rows in Redis, in the way of ElasticDL's first versions: MGET before a step, the optimizer in the worker,
MSET after it. Prints samples/s of DeepFM with it.

    python -m benchmarks.redis_rows SOCKET

As fast as it can be made in Python: requests and answers are arrays of numpy, whole tables at once, and the
step is edl's own. There is no log, and nothing that would keep a step from counting twice or never.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks import timed_deepfm
from benchmarks.ps_training import BATCH, SECONDS, WARM_STEPS

BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-7


class Wire:
    """A connection to a redis-server."""

    def __init__(self, path: str):
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._file = self._socket.makefile("rb", 1 << 20)

    def get(self, table: int, ids: np.ndarray, width: int) -> np.ndarray:
        """Their values, float32 [n, width]; zeros for those that are not there."""
        command = np.empty(len(ids), [("head", "V4"), ("key", "V9"), ("end", "V2")])
        command["head"], command["end"] = np.void(b"$9\r\n"), np.void(b"\r\n")
        command["key"] = _keys(table, ids)
        self._socket.sendall(b"*%d\r\n$4\r\nMGET\r\n" % (len(ids) + 1) + command.tobytes())
        assert self._file.readline() == b"*%d\r\n" % len(ids)
        found = np.zeros((len(ids), width), np.float32)
        for at in range(len(ids)):
            size = int(self._file.readline()[1:])
            if size >= 0:
                found[at] = np.frombuffer(self._file.read(size + 2), np.float32, width)
        return found

    def put(self, table: int, ids: np.ndarray, values: np.ndarray) -> None:
        size = b"$%d\r\n" % values[0].nbytes
        fields = [
            ("head", "V4"),
            ("key", "V9"),
            ("between", f"V{2 + len(size)}"),
            ("value", f"V{values[0].nbytes}"),
            ("end", "V2"),
        ]
        command = np.empty(len(ids), fields)
        command["head"] = np.void(b"$9\r\n")
        command["key"] = _keys(table, ids)
        command["between"], command["end"] = np.void(b"\r\n" + size), np.void(b"\r\n")
        command["value"] = np.ascontiguousarray(values).view(f"V{values[0].nbytes}")[:, 0]
        self._socket.sendall(b"*%d\r\n$4\r\nMSET\r\n" % (2 * len(ids) + 1) + command.tobytes())
        assert self._file.readline() == b"+OK\r\n"


def _keys(table: int, ids: np.ndarray) -> np.ndarray:
    keys = np.empty(len(ids), [("table", "u1"), ("id", "<i8")])
    keys["table"], keys["id"] = table, ids
    return keys.view("V9")


class RedisRows:
    """The rows of a model (trainer/embedding/interfaces.py, Rows), and Adam, as Keras has it."""

    def __init__(self, wire: Wire, dims: Sequence[int]):
        self._wire, self._dims = wire, dims
        self._pulled: list[tuple[np.ndarray, np.ndarray]] = []
        self._staged: Sequence[tuple[np.ndarray, np.ndarray]] = ()

    def pull(self, step: int, ids: Sequence[np.ndarray]) -> list[np.ndarray]:
        self._pulled = [
            (some, self._wire.get(table, some, 3 * dim))  # and the optimizer's two
            for table, (some, dim) in enumerate(zip(ids, self._dims, strict=True))
        ]
        return [
            np.ascontiguousarray(v[:, :dim]) for (_, v), dim in zip(self._pulled, self._dims, strict=True)
        ]

    def stage(self, step: int, rank: int, gradients: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        self._staged = gradients

    def apply(self, scale: float, rate: float, iteration: int) -> None:
        turn = iteration + 1
        alpha = np.float32(rate * np.sqrt(1 - BETA_2**turn) / (1 - BETA_1**turn))
        for table, ((ids, values), (_, gradients)) in enumerate(zip(self._pulled, self._staged, strict=True)):
            dim, g = self._dims[table], gradients * np.float32(scale)
            row, m, v = values[:, :dim], values[:, dim : 2 * dim], values[:, 2 * dim :]
            m += (g - m) * np.float32(1 - BETA_1)
            v += (g * g - v) * np.float32(1 - BETA_2)
            row -= m * alpha / (np.sqrt(v) + np.float32(EPSILON))
            self._wire.put(table, ids, values)


def main() -> int:
    from edl.layers.row_location import keep_rows_elsewhere
    from edl.trainer.agreement import control
    from edl.trainer.records.batches import Batch
    from edl.trainer.step.learner import KerasLearner

    keep_rows_elsewhere()
    numbers, ids, clicked = timed_deepfm.drawn("train")

    def batch(step: int) -> Batch:
        some = np.arange(step * BATCH, (step + 1) * BATCH) % len(ids)
        x: dict[str, Any] = {"numbers": numbers[some], "ids": ids[some]}
        return Batch(some, x, clicked[some], None)

    learner = KerasLearner(timed_deepfm.model(), batch(0), [batch(1)], lambda v: v, "allow")
    rows = RedisRows(Wire(sys.argv[1]), [table.dim for table in learner.tables])
    learner.use(rows)
    began, step = 0.0, 0
    while step <= WARM_STEPS or time.monotonic() - began < SECONDS:
        if step == WARM_STEPS:
            began = time.monotonic()
        sums = learner.allreduce_step(batch(step), control.write(step, in_sync=True), step, 0, BATCH)
        commit = learner.commit(step, sums)
        rows.apply(commit.scale, commit.learning_rate, commit.iteration)
        learner.apply(sums)
        step += 1
    print((step - WARM_STEPS) * BATCH / (time.monotonic() - began), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
