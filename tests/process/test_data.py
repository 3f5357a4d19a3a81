"""From positions to batches, and the control vector that says which."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edl.contract.ranges import RangeSet
from edl.contract.shuffle import Order
from edl.errors import DataError
from trainer import control
from trainer.data import HeldLeases
from trainer.records import Records


class Counting:
    """A reader that remembers what it was asked for."""

    def __init__(self, size: int):
        self.size = size
        self.reads: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return self.size

    def read(self, start: int, stop: int) -> dict[str, Any]:
        self.reads.append((start, stop))
        return {"n": np.arange(start, stop), "pair": (np.arange(start, stop) * 2,)}


def a_source(reader: Any, block: int = 8, feed: Any = lambda r: (r["n"], r["pair"][0])) -> Records:
    return Records(reader, Order(len(reader), seed=3, block=block), feed, "mine")


def test_an_epoch_of_batches_is_every_record_once_and_structure_is_kept() -> None:
    reader = Counting(50)
    source = a_source(reader)
    seen: list[int] = []
    for start in range(0, 50, 6):
        batch = source.batch((start, min(start + 6, 50)))
        assert (batch.y == batch.x * 2).all()
        seen += batch.x.tolist()
    assert sorted(seen) == list(range(50))
    assert seen != list(range(50))
    assert len(reader.reads) == 7, "each block is read once in an epoch"


@pytest.mark.parametrize(
    ("feed", "words"),
    [
        (lambda r: r["n"], "mine: feed(records) must give (features, labels)"),
        (lambda r: (1, 2, 3, 4), "not tuple of 4"),
        (None, "mine: data(split).read() must give (features, labels)"),
    ],
)
def test_a_feed_that_gives_something_else_is_named(feed: Any, words: str) -> None:
    with pytest.raises(DataError) as refused:
        a_source(Counting(20), feed=feed).batch((0, 4))
    assert words in str(refused.value)


def test_a_reader_that_gives_too_few_records_is_named() -> None:
    class Short(Counting):
        def read(self, start: int, stop: int) -> Any:
            return super().read(start, stop - 1)

    with pytest.raises(DataError, match=r"mine: read\(\d+, \d+\) gave 7 records, not 8"):
        a_source(Short(16)).batch((0, 4))


def test_what_is_left_of_a_lease_is_the_lease_minus_the_applied() -> None:
    leases = HeldLeases()
    leases.add((10, 20))
    assert leases.peek(4, epoch_size=100) == (10, 14)
    assert leases.peek(4, epoch_size=100, after=14) == (14, 18)
    assert len(leases) == 10, "looking takes nothing"
    leases.applied(RangeSet(((8, 13), (15, 16))))
    assert leases.peek(4, epoch_size=100) == (13, 15)


def test_a_batch_never_spans_two_epochs() -> None:
    leases = HeldLeases()
    leases.add((95, 105))
    assert leases.peek(20, epoch_size=100) == (95, 100)


def test_the_control_vector_is_exact_for_the_largest_positions() -> None:
    start = (1 << 40) + 12_345_678
    vectors = [control.write(0, 3, (start, start + 999), leave=False), control.write(1, 3, None, leave=True)]
    vectors.append(control.write(2, 3, (0, control.LARGEST_BATCH), leave=False))
    agreed = control.read(np.sum(vectors, axis=0, dtype=np.float32))
    assert agreed.batches == ((start, start + 999), (0, control.LARGEST_BATCH))
    assert agreed.leave
    assert not agreed.idle
    nothing = control.read(np.sum([control.write(r, 2, None, leave=False) for r in range(2)], axis=0))
    assert nothing.idle
    assert nothing.batches == ()
