# SPDX-License-Identifier: Apache-2.0
"""From steps to batches, read once and ahead; and the control vector."""

from __future__ import annotations

import threading
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

import edl
from edl.contract.layout import Layout, StepSlice
from edl.errors import DataError
from edl.trainer.agreement import control
from edl.trainer.records.batches import Batch, Batches
from edl.trainer.records.records import Records

ALONE = StepSlice.even(0, 1)


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


def a_source(
    reader: Any,
    layout: Layout | None = None,
    feed: Any = lambda r: (r["n"], r["pair"][0]),
    shuffle: bool = True,
) -> Records:
    source = Records(reader, feed, "mine", seed=3, shuffle=shuffle)
    source.lay_out(layout or Layout(len(reader), 8, 4))
    return source


def epoch_of(sources: list[Records], size: int, batch: int, number: int = 0) -> list[list[int]]:
    """The records of each step, as a ring of these reads them."""
    found = []
    for start in range(number * size, (number + 1) * size, batch):
        stop, step = min(start + batch, (number + 1) * size), []
        for rank, source in enumerate(sources):
            part = source.batch(start, stop, StepSlice.even(rank, len(sources)))
            if part is not None:
                assert (part.y == part.x * 2).all()
                assert part.x.tolist() == part.indices.tolist()
                step += part.x.tolist()
        found.append(sorted(step))
    return found


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_steps_are_the_same_for_any_ring_and_an_epoch_is_every_record_once(shuffle: bool) -> None:
    layout = Layout(500, 8, 16)
    rings = {n: [a_source(Counting(500), layout, shuffle=shuffle) for _ in range(n)] for n in (1, 2, 3, 5)}
    steps = {n: epoch_of(sources, 500, 48) for n, sources in rings.items()}
    assert all(found == steps[1] for found in steps.values())
    assert sorted(record for step in steps[1] for record in step) == list(range(500))
    assert (steps[1][0] == list(range(48))) is not shuffle


@pytest.mark.parametrize("ring", [1, 3, 6])
def test_each_block_is_read_once_in_an_epoch_and_again_only_where_the_ring_has_changed(ring: int) -> None:
    size = 20_000
    layout = Layout.fitting(size, record_bytes=100, buffer_bytes=500_000, ranks=ring)
    readers = [Counting(size) for _ in range(ring + 1)]
    sources = [a_source(reader, layout) for reader in readers]
    epoch_of(sources[:ring], size, 96)
    read = sum(b - a for reader in readers for a, b in reader.reads)
    assert read <= 1.1 * size
    # The ring grows by one in the middle of an epoch: at most the open block of each shard is read again.
    for part in (StepSlice.even(0, ring), StepSlice.even(0, ring + 1)):
        sources[0].batch(size + 9600, size + 9696, part)
    before = len(readers[0].reads)
    sources[0].batch(size + 9696, size + 9792, StepSlice.even(0, ring + 1))
    assert len(readers[0].reads) - before <= layout.shards / ring


def test_a_reader_with_random_access_is_asked_for_just_the_records() -> None:
    class Indexed(Counting):
        def __init__(self, size: int):
            super().__init__(size)
            self.taken: list[int] = []

        def take(self, indices: np.ndarray) -> dict[str, Any]:
            self.taken += indices.tolist()
            return {"n": indices, "pair": (indices * 2,)}

    reader = Indexed(50)
    source = a_source(reader, Layout(50))
    source.choose_layout(1, 4)
    assert source.layout == Layout(50)
    found = epoch_of([source], 50, 7)
    assert sorted(reader.taken) == list(range(50)) and not reader.reads
    assert found[0] != list(range(7)), "shuffled over all records"


def test_the_layout_is_found_from_how_large_a_record_is() -> None:
    reader = Counting(10_000)
    source = a_source(reader)
    source.choose_layout(buffer_bytes=64 * 16 * 10, ranks=1)  # 16 bytes a record: ten of them for each shard
    assert source.layout == Layout(10_000, 10, 64)
    small = a_source(Counting(10))
    small.choose_layout(buffer_bytes=1e9, ranks=1)
    assert sorted(r for step in epoch_of([small], 10, 4) for r in step) == list(range(10))


class Slices:
    """A reader of one's own whose read() gives views of the user's arrays."""

    def __init__(self) -> None:
        self.x = np.arange(60.0, dtype=np.float32).reshape(30, 2)
        self.lists = np.array([None] * 30, object)
        for n in range(30):
            self.lists[n] = np.full(2, n, np.float32)

    def __len__(self) -> int:
        return 30

    def read(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        return self.x[start:stop], self.lists[start:stop]


class Taken(Slices):
    """The same, with its arrays for every index."""

    def take(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self.x[: len(indices)], self.lists[: len(indices)]


@pytest.mark.parametrize("reader", [Slices, Taken])
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_feed_that_changes_its_records_in_place_is_refused_with_its_line(
    reader: type[Slices], shuffle: bool
) -> None:
    def halving(records: Any) -> Any:
        x, _ = records
        x /= 2
        return x, x

    ours = reader()
    source = a_source(ours, feed=halving, shuffle=shuffle)
    line = halving.__code__.co_firstlineno + 2
    for read in (
        lambda: source.batch(0, 8, ALONE),
        lambda: source.consecutive(0, 8),
        lambda: source.batch_at([3]),
    ):
        with pytest.raises(
            DataError, match=rf"in place \(.*test_batches\.py, line {line}\).*x = x\.copy\(\)"
        ):
            read()
    assert (ours.x == reader().x).all()


@pytest.mark.parametrize("reader", [Slices, Taken])
def test_a_feed_has_a_copy_of_what_lies_within_an_array_of_objects(reader: type[Slices]) -> None:
    def halving(records: Any) -> Any:
        for row in records[1]:
            row /= 2
        return np.stack(list(records[1])), None

    ours = reader()
    for _ in range(2):
        source = a_source(ours, feed=halving, shuffle=False)
        assert source.consecutive(2, 4).x.tolist() == [[1, 1], [1.5, 1.5]]
        source.batch(0, 8, ALONE)
    assert [row[0] for row in ours.lists] == list(range(30))


def test_feed_may_change_the_dict_of_its_records_and_copies_of_them() -> None:
    kept = {"x": np.ones((30, 2)), "y": np.zeros(30), "text": np.array(["a"] * 30, object)}

    class Kept(Slices):
        def read(self, start: int, stop: int) -> Any:
            return kept

    def feed(records: dict[str, Any]) -> Any:
        y, x = records.pop("y"), records["x"].copy()
        x += 1
        return x, y

    source = a_source(Kept(), feed=feed, shuffle=False)
    for _ in range(2):
        assert (source.consecutive(0, 30).x == 2).all()
    assert set(kept) == {"x", "y", "text"}


@pytest.mark.parametrize(
    ("when", "words"),
    [
        (
            np.array(["2026-01-05"] * 3, "M8[s]"),
            r"labels\['when'\] is an array of datetime64\[s\], which cannot",
        ),
        (
            np.array([Decimal(1)] * 3, object),
            r"labels\['when'\] is an array of Decimal objects, which cannot",
        ),
        (np.array([["a"], ["b", "c"], "d"], object), r"labels\['when'\] is an array of list objects"),
        (np.array([(1, 2.0)] * 3, "i4,f4"), r"labels\['when'\] is an array of \[\('f0'"),
    ],
)
def test_an_array_that_no_tensor_can_be_made_of_is_named(when: Any, words: str) -> None:
    pytest.importorskip("tensorflow")  # only a worker that has it makes tensors
    source = Records(edl.arrays(np.zeros(3)), lambda r: (r[0], {"y": np.ones(3), "when": when}), "mine")
    with pytest.raises(DataError, match=rf"mine: feed\(records\): {words}"):
        source.consecutive(0, 3)


def test_records_of_different_types_are_not_put_together() -> None:
    class Changing(Counting):
        def read(self, start: int, stop: int) -> Any:
            kind = np.float64 if start >= 16 else np.int64  # as pandas gives a block that has a gap
            return {"n": np.arange(start, stop, dtype=kind), "pair": (np.arange(start, stop).astype(str),)}

    with pytest.raises(DataError, match="arrays of float64 and int64 for different records"):
        epoch_of([a_source(Changing(30), feed=lambda r: (r["n"], r["n"] * 2))], 30, 10)


class Slow:
    """A source whose batches come when a test lets them."""

    def __init__(self) -> None:
        self.layout = Layout(100)
        self.asked: list[tuple[int, int, StepSlice]] = []
        self.changed = threading.Condition()

    def lay_out(self, layout: Layout) -> None:
        self.layout = layout

    def batch(self, start: int, stop: int, part: StepSlice) -> Batch:
        with self.changed:
            self.asked.append((start, stop, part))
            self.changed.notify_all()
        return Batch(np.arange(start, stop), None, None, None, nbytes=1000)

    def until(self, happens: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(happens, 10), self.asked


def test_batches_are_read_ahead_as_far_as_the_bytes_go_and_not_beyond_the_end() -> None:
    source = Slow()
    batches = Batches(source, 10, ahead_bytes=3000)
    assert batches.of(0, end=10).indices.tolist() == list(range(10))
    source.until(lambda: [a for a, _, _ in source.asked] == [0, 10, 20, 30])
    batches.of(0, end=10)
    batches.of(1, end=10)
    source.until(lambda: [a for a, _, _ in source.asked] == [0, 10, 20, 30, 40])
    batches.of(8, end=10)
    source.until(lambda: source.asked[-1][0] == 90)
    batches.of(9, end=10)
    assert source.asked[-1][0] == 90


def test_another_part_or_layout_is_read_anew() -> None:
    source = Slow()
    batches = Batches(source, 10)
    batches.of(0, end=10)
    batches.take(Layout(100), StepSlice(1, (1, 1)))
    batches.of(1, end=2)
    assert source.asked[-1] == (10, 20, StepSlice(1, (1, 1)))
    batches.take(Layout(100, 5, 4), StepSlice(1, (1, 1)))
    assert source.layout == batches.layout == Layout(100, 5, 4)


def test_another_part_from_a_step_on_is_read_while_the_step_before_it_is_made() -> None:
    source = Slow()
    batches = Batches(source, 10, ahead_bytes=3000)
    batches.of(0, end=10)
    source.until(lambda: [a for a, _, _ in source.asked] == [0, 10, 20, 30])
    half = StepSlice(1, (1, 1))
    batches.take_from(2, half)
    assert batches.of(1, end=3).indices.tolist() == list(range(10, 20))
    source.until(lambda: source.asked[-1] == (20, 30, half))
    batches.of(2, end=3)
    assert [a for a in source.asked if a[2] == half] == [(20, 30, half)]
    batches.take(source.layout, half)
    batches.of(2, end=3)
    assert source.asked[-1] == (20, 30, half) and len(source.asked) == 5, "it is its part already"


@pytest.mark.parametrize(
    ("feed", "words"),
    [
        (lambda r: r["n"], "mine: feed(records) must give (features, labels)"),
        (lambda r: (1, 2, 3, 4), "not tuple of 4"),
    ],
)
def test_a_feed_that_gives_something_else_is_named(feed: Any, words: str) -> None:
    with pytest.raises(DataError) as refused:
        a_source(Counting(20), feed=feed).batch(0, 4, ALONE)
    assert words in str(refused.value)


def test_a_dict_without_a_feed_is_features_without_labels() -> None:
    batch = a_source(Counting(20), feed=None).batch(0, 4, ALONE)
    assert batch is not None
    assert sorted(batch.x["n"].tolist()) == sorted(batch.indices.tolist())
    assert (batch.y, batch.weights) == (None, None)


def test_a_reader_that_gives_too_few_records_is_named() -> None:
    class Short(Counting):
        def read(self, start: int, stop: int) -> Any:
            return super().read(start, stop - 1)

    with pytest.raises(DataError, match=r"mine: read\(\d+, \d+\) gave 7 records, not 8"):
        a_source(Short(16)).batch(0, 4, ALONE)


def test_a_reader_that_gives_lists_of_single_values_is_told_to_make_arrays() -> None:
    class Texts(Counting):
        def read(self, start: int, stop: int) -> Any:
            return {"text": [f"text {i}" for i in range(start, stop)], "y": super().read(start, stop)}

    with pytest.raises(DataError, match=r"read\(\d+, \d+\) must give .* single values of type str"):
        a_source(Texts(16)).batch(0, 4, ALONE)


def lacking(reader: type[Counting], bad: set[int]) -> Counting:
    """A reader of that kind, of 30 records, that raises where it would give a bad one."""

    class Lacking(reader):  # type: ignore[misc, valid-type]
        def read(self, start: int, stop: int) -> Any:
            if found := bad & set(range(start, stop)):
                raise OSError(f"block {min(found)} is damaged")
            return super().read(start, stop)

    return Lacking(30)


def test_bad_records_are_found_one_by_one_and_the_others_are_there() -> None:
    def feed(records: dict[str, Any]) -> Any:
        if 20 in records["n"]:
            raise KeyError("label")
        return records["n"], records["pair"][0]

    source = Records(lacking(Counting, {0, 9}), feed, "mine", seed=3, shuffle=True, lenient=True)
    source.choose_layout(1000, 1)
    found: list[int] = []
    bad: dict[int, str] = {}
    for start in range(0, 30, 4):
        batch = source.batch(start, min(start + 4, 30), ALONE)
        assert batch is not None and batch.x.tolist() == batch.indices.tolist()
        assert (batch.y == batch.x * 2).all()
        found += batch.x.tolist()
        bad |= {record.index: record.why for record in batch.bad}
    assert sorted(found) == [i for i in range(30) if i not in (0, 9, 20)]
    assert bad == {
        0: "OSError: block 0 is damaged",
        9: "OSError: block 9 is damaged",
        20: "KeyError: 'label'",
    }
    assert source.first(10) == [1, 2, 3, 4, 5, 6, 7, 8, 10, 11], "to try the model with"


def test_records_that_lie_apart_are_not_taken_for_those_between_the_first_and_the_last() -> None:
    source = a_source(Counting(30))
    for indices in ([7, 1, 9], [7, 8, 9], [9, 8, 7], [3]):
        assert source.batch_at(indices).x.tolist() == indices


def test_a_batch_of_which_all_are_bad_has_no_records() -> None:
    source = Records(lacking(Counting, set(range(30))), None, "mine", lenient=True)
    batch = source.batch(0, 4, ALONE)
    assert batch is not None
    assert (len(batch), [record.index for record in batch.bad]) == (0, [0, 1, 2, 3])
    with pytest.raises(OSError, match="block 29 is damaged"):
        source.first(8)


def test_a_bad_record_raises_where_none_may_be_left_out() -> None:
    source = Records(lacking(Counting, {9}), None, "mine")
    with pytest.raises(OSError, match="block 9 is damaged"):
        source.batch(8, 12, ALONE)


def test_the_control_vector_is_exact_for_many_ranks_and_steps() -> None:
    step, ranks = 10**12 + 4095, 4000
    vectors = [control.write(step, leave=r == 7, epochs=0 if r else 2**24 - 1) for r in range(ranks)]
    total = np.stack(vectors).sum(axis=0, dtype=np.float32)
    agreed = control.read(total)
    assert agreed.all_at(step, 0, ranks)
    assert not agreed.all_at(step + 1, 0, ranks)
    assert (agreed.leave, agreed.epochs, agreed.records) == (True, 2**24 - 1, 0)
    mixed = control.read(control.write(5) + control.write(6))
    assert not mixed.all_at(5, 0, 2) and not mixed.all_at(6, 0, 2)
