# SPDX-License-Identifier: Apache-2.0
"""Weights that count how often each step was applied, for tests of mode=ps.

Step k has the gradient -1 at position k of the dense variable, and in the rows of its ids, with SGD at rate
1. So if every value is one, every step was applied once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from edl.contract.proto import ps_pb2 as pb
from edl.contract.rows.buckets import server_of
from tests.support.ps.requests import RUN

DIM = 8  # of a dense row
ZEROS = json.dumps({"class_name": "Zeros", "config": {}})
SGD = json.dumps({"class_name": "SGD", "config": {"learning_rate": 1.0}})


def tables(optimizer: str = SGD, **asynchronous: Any) -> pb.Tables:
    return pb.Tables(
        run_id=RUN,
        seed=7,
        asynchronous=pb.Asynchronous(**asynchronous),
        tables=[
            pb.Table(name="edl/dense", dim=DIM, initializer=ZEROS, optimizer=optimizer),
            pb.Table(name="user", dim=1, initializer=ZEROS, optimizer=optimizer),
        ],
    )


def begin(steps: int, index: int = 0, servers: int = 1) -> pb.BeginRequest:
    """A BeginRequest with dense positions for `steps` steps."""
    ids = np.arange(-(-steps // DIM))
    ids = ids[server_of(ids, servers) == index]
    values = [gradients(0, ids, np.zeros((len(ids), DIM)))]
    return pb.BeginRequest(run_id=RUN, values=values)


def push(
    incarnation: str, step: int, steps: int, version: int = 0, index: int = 0, servers: int = 1, **more: Any
) -> pb.PushRequest:
    dense = np.arange(-(-steps // DIM))
    change = np.zeros((len(dense), DIM))
    change.reshape(-1)[step] = -1
    mine = server_of(dense, servers) == index
    ids = ids_of(step)
    ids = ids[server_of(ids, servers) == index]
    found = [gradients(0, dense[mine], change[mine]), gradients(1, ids, -np.ones((len(ids), 1)))]
    return pb.PushRequest(
        **{
            "run_id": RUN,
            "incarnation": incarnation,
            "step": step,
            "version": version,
            "learning_rate": 1.0,
            "loss": 2.0,
            "records": 3,
            "gradients": found,
            **more,
        }
    )


def ids_of(step: int) -> np.ndarray:
    """The ids of this step; no other step has them."""
    return np.array([3 * step, 3 * step + 1, 3 * step + 2])


def gradients(table: int, ids: np.ndarray, values: Any) -> pb.Gradients:
    return pb.Gradients(
        table=table, ids=ids.astype("<i8").tobytes(), values=np.asarray(values).astype("<f4").tobytes()
    )


def pull(steps: int, index: int = 0, servers: int = 1) -> pb.PullRequest:
    asked = []
    for table, ids in ((0, np.arange(-(-steps // DIM))), (1, np.arange(3 * steps))):
        mine = ids[server_of(ids, servers) == index]
        asked.append(pb.Ids(table=table, ids=mine.tobytes()))
    return pb.PullRequest(run_id=RUN, ids=asked)


def counts(steps: int, answers: Sequence[Sequence[Any]]) -> tuple[np.ndarray, np.ndarray]:
    """Count how often each step is in the dense variable, and how often in its ids' rows.

    Args:
        answers: the pulled rows of all servers (`Rows.rows`, or arrays).
    """
    servers = len(answers)
    found = []
    for table, (count, dim) in enumerate(((-(-steps // DIM), DIM), (3 * steps, 1))):
        ids = np.arange(count)
        rows = np.full((count, dim), np.nan, np.float32)
        for index, answer in enumerate(answers):
            values = np.frombuffer(bytes(memoryview(answer[table]).cast("B")), np.float32)
            rows[server_of(ids, servers) == index] = values.reshape(-1, dim)
        found.append(rows.reshape(-1))
    return found[0][:steps], found[1]
