# SPDX-License-Identifier: Apache-2.0
"""A state that all ranks take from one, in pieces: `trainer.ring.base.broadcast_parts`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from edl.trainer.ring.base import broadcast_parts
from edl.trainer.ring.local import InProcessGroup, LocalRing

RANKS, ROOT, TOGETHER = 3, 1, 10


class Counted(LocalRing):
    """Knows how long each of its broadcasts was."""

    def __init__(self, group: InProcessGroup):
        super().__init__()
        self.open(group)
        self.lengths: list[int] = []

    def broadcast(self, data: np.ndarray, root: int) -> np.ndarray:
        self.lengths.append(len(data))
        return super().broadcast(data, root)


@pytest.mark.parametrize(
    ("sizes", "lengths"),
    [
        ([], []),
        ([4], [4]),
        ([4, 6, 1], [10, 1]),
        ([25, 0, 4, 3, 3], [10, 10, 5, 10]),
        ([1, 25, 20], [1, 10, 10, 5, 10, 10]),
    ],
)
def test_all_have_the_parts_of_the_root_and_a_little_travels_at_once(
    sizes: list[int], lengths: list[int]
) -> None:
    group = InProcessGroup(RANKS)
    rings = [Counted(group) for _ in range(RANKS)]

    def take_part(rank: int) -> list[list[int]]:
        ring = rings[rank]
        ring.form(rank, RANKS)
        parts = [np.full(n, 10 * rank + i, np.uint8) for i, n in enumerate(sizes)]
        return [part.tolist() for part in broadcast_parts(ring, parts, ROOT, rank, TOGETHER)]

    with ThreadPoolExecutor(RANKS) as ranks:
        found = list(ranks.map(take_part, range(RANKS)))
    assert found == [[[10 * ROOT + i] * n for i, n in enumerate(sizes)]] * RANKS
    assert [ring.lengths for ring in rings] == [lengths] * RANKS
