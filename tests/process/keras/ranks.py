# SPDX-License-Identifier: Apache-2.0
"""A ring of several ranks in this process: a thread each, and real sums between them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import tensorflow as tf

from edl.trainer.ring.local import InProcessGroup, LocalRing

T = TypeVar("T")
SECONDS = 60

# A sum inside a graph blocks a thread of TensorFlow's pool, which all ranks share here. To be said before
# TensorFlow computes anything.
tf.config.threading.set_inter_op_parallelism_threads(16)


def on_ranks(rings: list[LocalRing], work: Callable[..., T]) -> list[T]:
    """What `work` returns on each rank; they meet in a new ring before, and leave it afterwards.

    Its first error is raised; one that raises has cut the ring for the others.
    """
    group = InProcessGroup(len(rings))
    for ring in rings:
        ring.open(group)

    def one(rank: int) -> T:
        try:
            rings[rank].form(rank, len(rings))
            return work(rank)
        except BaseException:
            rings[rank].cut()
            raise

    with ThreadPoolExecutor(len(rings)) as threads:
        parts = [threads.submit(one, rank) for rank in range(len(rings))]
        try:
            return [part.result(SECONDS) for part in parts]
        finally:
            for ring in rings:
                ring.close()
