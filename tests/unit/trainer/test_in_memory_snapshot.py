# SPDX-License-Identifier: Apache-2.0
"""The copy of a state in memory that outlives the process: what is found there after a crash, whenever."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from edl.contract.ranges import RangeSet
from edl.trainer.agreement.epochs import Epochs
from edl.trainer.agreement.ledger import Ledger
from edl.trainer.checkpoint.in_memory_snapshot import LEDGER, InMemorySnapshot

SIZES = [3, 0, 5000]


@pytest.fixture
def path() -> Iterator[str]:
    """Unused memory."""
    memory = os.memfd_create("a-test")
    yield f"/proc/self/fd/{memory}"
    os.close(memory)


def state(step: int) -> list[np.ndarray]:
    return [np.full(size, step % 251, np.uint8) for size in SIZES]


def opened(path: str, run: str = "a-run", model: str = "m", sizes: list[int] = SIZES) -> InMemorySnapshot:
    memory = InMemorySnapshot(path)
    memory.open(run, model, sizes)
    return memory


def found(path: str) -> int | None:
    """The step of what the next process finds, which is whole."""
    newest = opened(path).newest()
    if newest is None:
        return None
    ledger, parts = newest
    for part, expected in zip(parts, state(ledger.step), strict=True):
        np.testing.assert_array_equal(part, expected)
    return ledger.step


def test_the_next_process_finds_the_last_state(path: str) -> None:
    assert not InMemorySnapshot(path).is_there and found(path) is None
    memory = opened(path)
    skipped, bad = RangeSet.of([(3, 5), (9, 10)]), {0: 2, 4: 1}
    for step in range(1, 6):
        memory.put(Ledger(step, skipped, bad), state(step))
        assert InMemorySnapshot(path).is_there
        assert found(path) == step
    newest = opened(path).newest()
    assert newest is not None and newest[0] == Ledger(5, skipped, bad)
    opened(path).put(Ledger(6), state(6))  # the next process goes on
    assert found(path) == 6


def test_what_was_found_is_not_written_over(path: str) -> None:
    memory = opened(path)
    memory.put(Ledger(1), state(1))
    newest = memory.newest()
    assert newest is not None
    for step in (2, 3):
        memory.put(Ledger(step), state(step))
    np.testing.assert_array_equal(newest[1][2], state(1)[2])


def test_a_process_that_dies_in_a_copy_leaves_the_one_before(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its death comes after each write in turn."""

    class Killed(Exception):
        pass

    memory = opened(path)
    memory.put(Ledger(1), state(1))
    memory.put(Ledger(2), state(2))
    for dies_after in range(len(SIZES)):
        copied = 0

        def copy(to: np.ndarray, part: np.ndarray, dies_after: int = dies_after) -> None:
            nonlocal copied
            to[: len(part) // 2] = 99  # half of it
            if copied == dies_after:
                raise Killed
            to[:] = part
            copied += 1

        monkeypatch.setattr(np, "copyto", copy)
        with pytest.raises(Killed):
            memory.put(Ledger(3), state(3))
        monkeypatch.undo()
        assert found(path) == 2


@pytest.mark.parametrize(
    "other", [{"run": "another"}, {"model": "another"}, {"sizes": [3, 1, 4999]}, {"sizes": [3, 0]}]
)
def test_what_is_of_another_run_or_model_is_not_taken(path: str, other: dict[str, object]) -> None:
    opened(path).put(Ledger(1), state(1))
    assert opened(path, **other).newest() is None  # type: ignore[arg-type]
    assert opened(path).newest() is None, "and it is gone"


def test_a_ledger_that_has_no_room_leaves_no_copy_at_all(path: str) -> None:
    memory = opened(path)
    memory.put(Ledger(1), state(1))
    memory.put(Ledger(2, epochs=Epochs(memory=bytes(LEDGER + sum(SIZES)))), state(2))
    assert found(path) is None, "an old one would be taken for the newest"
    memory.put(Ledger(3), state(3))
    assert memory.full and found(path) is None
