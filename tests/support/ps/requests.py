# SPDX-License-Identifier: Apache-2.0
"""Requests of workers to a parameter server, for tests."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from edl.contract.proto import ps_pb2 as pb

RUN = "run"
SGD = json.dumps({"class_name": "SGD", "config": {"learning_rate": 0.5}})
ADAM = json.dumps({"class_name": "Adam", "config": {"learning_rate": 0.01}})
UNIFORM = json.dumps(
    {"class_name": "RandomUniform", "config": {"minval": -0.05, "maxval": 0.05, "seed": None}}
)


def tables(*given: pb.Table, seed: int = 7) -> pb.Tables:
    """A declaration of tables; by default `user` with 4 values a row and SGD, and `item` with 2 and Adam."""
    default = (
        pb.Table(name="user", dim=4, initializer=UNIFORM, optimizer=SGD),
        pb.Table(name="item", dim=2, initializer=UNIFORM, optimizer=ADAM),
    )
    return pb.Tables(run_id=RUN, seed=seed, tables=given or default)


def commit(step: int, skipped: bool = False) -> pb.Commit:
    return pb.Commit(step=step, skipped=skipped, scale=0.5, learning_rate=0.1, iteration=step)


def start_generation(generation: int, step: int, last: pb.Commit | None = None) -> pb.StartGenerationRequest:
    return pb.StartGenerationRequest(run_id=RUN, generation=generation, step=step, last=last)


def batch(step: int, rank: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """A rank's ids and gradients of one step for both tables; a function of step and rank only."""
    rng = np.random.default_rng([step, rank])
    found = []
    for dim in (4, 2):
        ids = np.unique(rng.zipf(1.3, 60) % 1000)
        found.append((ids, rng.normal(size=(len(ids), dim)).astype(np.float32)))
    return found


def stage(generation: int, step: int, rank: int = 0) -> pb.PushRequest:
    gradients = [
        pb.Gradients(table=table, ids=ids.tobytes(), values=values.tobytes())
        for table, (ids, values) in enumerate(batch(step, rank))
    ]
    return pb.PushRequest(run_id=RUN, generation=generation, step=step, rank=rank, gradients=gradients)


def pull(generation: int, step: int, ids: Any = (), last: pb.Commit | None = None) -> pb.PullRequest:
    wanted = np.asarray(ids, np.int64).tobytes()
    asked = [pb.Ids(table=table, ids=wanted) for table in (0, 1)]
    return pb.PullRequest(run_id=RUN, generation=generation, step=step, last=last, ids=asked)
