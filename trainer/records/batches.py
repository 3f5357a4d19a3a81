# SPDX-License-Identifier: Apache-2.0
"""From steps to batches: the records of this rank, read ahead of the step that needs them.

How records are read is trainer/records/records.py; this module knows neither Keras nor files.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np

from edl.contract.layout import Layout, StepSlice
from edl.contract.steps import Steps
from edl.data.nest import leaves

MAX_AHEAD = 64  # batches: more hides no source
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that cannot be read, or that `feed` does not take."""

    index: int
    why: str


@dataclass(frozen=True, slots=True)
class Batch:
    """Records of one step, ready for the model. All of them may be bad: then it has none."""

    indices: np.ndarray  # of the records in the reader
    x: Any
    y: Any
    weights: Any  # None, or one weight per record
    nbytes: int = 0  # in memory
    bad: tuple[BadRecord, ...] = ()  # that would be here, too
    tensors: Any = None  # of the model's graph, where they were made ahead: what x, y and weights are made of
    place: tuple[int, int] | None = None  # of its first record among those of the step, and their number

    def __len__(self) -> int:
        return len(self.indices)

    def __str__(self) -> str:
        return named(self.indices)

    def block_edges(self, blocks: int) -> tuple[int, list[int]]:
        """Return the step's block that this batch begins with, and the edges of its blocks.

        The blocks of a step follow from its number of records: each has the same records in every ring.
        """
        first, records = self.place or (0, len(self))
        edges = sorted({records * nth // blocks for nth in range(blocks + 1)})
        begin, end = edges.index(first), edges.index(first + len(self))
        return begin, [edge - first for edge in edges[begin : end + 1]]

    def not_finite(self) -> str:
        """Name the first value that is not finite, with what to do; empty if all are finite."""
        for what, nest in (("features", self.x), ("labels", self.y), ("weights", self.weights)):
            for path, array in leaves(nest):
                # Arrays, or the tensors that a learner has made of them.
                values: np.ndarray = np.asarray(array) if hasattr(array, "__array__") else np.zeros(0)
                if values.dtype.kind != "f" or np.isfinite(values).all():
                    continue
                at: list[int] = np.argwhere(~np.isfinite(values))[0].tolist()
                where = f", column {at[1]}" if len(at) > 1 and values.shape[1] > 1 else ""
                return (
                    f"{what}{path} is {values[tuple(at)]} in record {int(self.indices[at[0]])}{where}, so "
                    "the loss is not finite: fill missing values, or leave these records out"
                )
        return ""


Following = Callable[[], Batch | None]  # returns the next batch, if it has been read


def nothing_follows() -> None:
    """Return no batch: a `Following` for callers that read nothing ahead."""
    return None  # noqa: RET501


NAMED = 32


def named(indices: np.ndarray) -> str:
    """Records by their index in the reader, for people: `records 17, 4, 203 and 29 others`."""
    first = ", ".join(map(str, indices[:NAMED].tolist()))
    others = len(indices) - NAMED
    return f"records {first}" + (f" and {others} others" if others > 0 else "")


def with_place(why: str, place: str) -> str:
    """The reason why a record is bad, after the file and the number there unless it names the file itself."""
    return f"{place}: {why}" if place and place.partition(": record ")[0] not in why else why


class Source(Protocol):
    """The records of a split."""

    @property
    def layout(self) -> Layout:
        """The records' layout, as this worker has found it."""
        ...

    def lay_out(self, layout: Layout) -> None:
        """Use this layout, which the job's workers have agreed on. Records that were read may stay."""
        ...

    def batch(self, start: int, stop: int, part: StepSlice) -> Batch | None:
        """Read this part of the records [start, stop), which lie in one epoch; None if the part is empty.

        Raises:
            DataError: the records cannot be read, or differ from what was expected.
        """
        ...


@runtime_checkable
class ParallelSource(Source, Protocol):
    """A source that reads several batches at a time."""

    count: int  # of batches that it reads at a time

    def submit(
        self, start: int, stop: int, part: StepSlice, ready: Callable[[Batch], Batch]
    ) -> Future[Batch | None]:
        """Begin to read what `batch` returns. `ready` is called with the batch on a thread that reads."""
        ...

    def idle(self) -> Future[None]:
        """Return a future that is done when each reader has opened its data, and answered all until now."""
        ...


class Wait(Protocol):
    """How a result is awaited (trainer/session/waits.py)."""

    def __call__(self, awaited: Future[T], what: Callable[[], str]) -> T:
        """Return the result of a future, when it is done; an error if the ring ends the wait.

        Args:
            what: names what is awaited.
        """
        ...


def patiently(awaited: Future[T], what: Callable[[], str]) -> T:
    """A `Wait` that nothing ends."""
    return awaited.result()


class Batches:
    """This rank's batches, one for each step.

    While the ring is busy with one, the next ones are read: as many as `ahead_bytes` hold, one at least. A
    parallel source reads at least as many ahead as it reads at a time.

    Args:
        batch: records in a step, over all ranks.
        reading: reads one batch at a time; None to use a separate thread. A parallel source reads by itself.
        ready: what else can be done about a batch before its step, where it is read.
        wait: waits for a batch; the ring may end this.
        blocks: divide a step into so many blocks, and let each part have whole ones; 0: without blocks.
    """

    def __init__(
        self,
        source: Source,
        batch: int,
        ahead_bytes: float = 0,
        reading: Executor | None = None,
        ready: Callable[[Batch], Batch] = lambda batch: batch,
        wait: Wait = patiently,
        blocks: int = 0,
    ):
        self._blocks = blocks
        self._source, self._ahead_bytes, self._ready, self._wait = source, ahead_bytes, ready, wait
        # Found once: isinstance of a Protocol looks at each of its members, which is too slow for each step.
        self._parallel = source if isinstance(source, ParallelSource) else None
        self._reading = reading or ThreadPoolExecutor(1, thread_name_prefix="read")
        self.steps = Steps(source.layout.records, batch)
        self._part = StepSlice.even(0, 1)
        self._then: tuple[int, StepSlice] | None = None  # the part from that step on
        self._read: deque[tuple[int, Future[Batch | None]]] = deque()  # steps in a row
        self._few: dict[int, Future[Batch | None]] = {}  # steps in no order

    @property
    def layout(self) -> Layout:
        return self._source.layout

    def take(self, layout: Layout, part: StepSlice) -> None:
        """Read this part of each step from now on, with this layout."""
        if layout != self._source.layout:
            self._forget()
            laid_out = self._reading.submit(self._source.lay_out, layout)
            self._wait(laid_out, lambda: "the thread that reads records")
        if part != self._part or self._then is not None:
            self._forget()
            self._part, self._then = part, None

    def take_from(self, step: int, part: StepSlice) -> None:
        """Read this part of each step, from `step` on.

        The part of the step before is unchanged, because its records are being read already.
        """
        self._then = step, part
        while self._read and self._read[-1][0] >= step:
            self._read.pop()[1].cancel()

    def begin(self, step: int) -> None:
        """The records of `step` are needed next: they are read from now on."""
        if self._then is not None and step >= self._then[0]:
            self._part, self._then = self._then[1], None
        while self._read and self._read[0][0] < step:
            self._read.popleft()
        if self._read and self._read[0][0] > step:
            self._forget()
        if not self._read:
            self._submit(step)

    def of(self, step: int, end: int) -> Batch | None:
        """The records of `step`; None if this rank's part has none. A second call returns the same.

        Args:
            end: there is nothing to be read from this step on.
        """
        self.begin(step)
        batch = self._await(self._read[0][1], step)
        size = batch.nbytes if batch else 0
        least = 1 if self._parallel is None else self._parallel.count
        most = min(max(int(self._ahead_bytes // max(size, 1)), least), MAX_AHEAD)
        while len(self._read) <= most and (following := self._read[-1][0] + 1) < end:
            self._submit(following)
        return batch

    def following(self, step: int) -> Batch | None:
        """Return the records of the step after this one if they are read already, else None.

        An error of the read is not raised here, but by the step that needs the records.
        """
        for at, reading in self._read:
            if at == step + 1 and reading.done() and not reading.cancelled() and reading.exception() is None:
                return reading.result()
        return None

    def any(self, step: int, ahead: Sequence[int] = ()) -> Batch | None:
        """The records of `step`, in no order of steps.

        Args:
            ahead: steps that are asked for next: read meanwhile.
        """
        reading = {s: self._few.pop(s) if s in self._few else self._begun(s) for s in (step, *ahead)}
        for other in self._few.values():
            other.cancel()
        self._few = reading
        batch = self._await(reading[step], step)
        del reading[step]
        return batch

    def idle(self) -> Future[None]:
        """Begin no read of those that wait for their turn.

        Returns:
            a future that is done when all reads that have begun have returned.
        """
        while self._read and self._read[-1][1].cancel():
            self._read.pop()
        self._few = {step: reading for step, reading in self._few.items() if not reading.cancel()}
        if self._parallel is not None:
            return self._parallel.idle()
        return self._reading.submit(nothing)

    def _await(self, reading: Future[Batch | None], step: int) -> Batch | None:
        return self._wait(reading, lambda: f"records of step {step + 1}")

    def _begun(self, step: int) -> Future[Batch | None]:
        part = self._then[1] if self._then is not None and step >= self._then[0] else self._part
        start, stop = self.steps.positions(step)
        ready = self._ready
        if self._blocks:
            part = part.in_blocks(self._blocks)
            place = part.of(stop - start)[0], stop - start
            ready = lambda batch: self._ready(replace(batch, place=place))  # noqa: E731
        if self._parallel is not None:
            return self._parallel.submit(start, stop, part, ready)
        return self._reading.submit(self._read_one, start, stop, part, ready)

    def _read_one(
        self, start: int, stop: int, part: StepSlice, ready: Callable[[Batch], Batch]
    ) -> Batch | None:
        batch = self._source.batch(start, stop, part)
        return ready(batch) if batch else batch

    def _submit(self, step: int) -> None:
        self._read.append((step, self._begun(step)))

    def _forget(self) -> None:
        for future in (*(future for _, future in self._read), *self._few.values()):
            future.cancel()
        self._read.clear()
        self._few.clear()


def nothing() -> None:
    """Follow the reads before it."""
