# SPDX-License-Identifier: Apache-2.0
"""A job's records, read and fed in reader processes (data.workers).

Which records a step has is arithmetic. The worker computes it, and a request names its records. So a request
can be made again in any process, and batches are returned in the order in which they were asked for.

**Random access.** One request makes a batch: it reads the records and feeds them. Any idle process answers
it.

**Blocks.** Each block of a file is to be read once, and to be in memory once. So each process owns some of
the shards (edl/contract/order.py), and picks the records of these for each batch; `feed` then has the whole
batch, in any process. Pieces go from process to process in shared memory. Without shuffling there is one
shard.

**A process that dies** during a request is reported and started again, and the request is made again. After a
second death the records of the request are read one by one. A record that kills its process twice, alone, is
a bad record: left out and counted where the job allows bad records (data.maxBadRecords), else the end of the
job. A process that does not answer is ended, and counts as one that has died.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from edl.contract.layout import Layout, StepSlice
from edl.contract.order import Order
from edl.errors import DataError
from edl.trainer.records.batches import BadRecord, Batch, named, with_place
from edl.trainer.records.processes import ForkServer, ReaderDied, ReaderProcess
from edl.trainer.records.step_part import StepPart
from edl.trainer.records.wire import Packet
from edl.trainer.runtime.log import log

DEATHS = 2  # of a process, with the same records, before these are read one by one
MAX_TOLD = 8  # deaths of processes of one worker that the user is warned of
ROUNDS = 2  # of `DEATHS` in which all records together kill a process, and none does alone


class Killed(Exception):
    """A process has died `DEATHS` times in the same request."""

    def __init__(self, how: str):
        super().__init__(how)
        self.how = how


@dataclass(order=True)
class _Task:
    """A request to make.

    Args:
        number: of the batch; earlier batches first.
        run: makes it, on the thread of the process with this index.
    """

    number: int
    run: Callable[[int], None] = field(compare=False)


@dataclass
class _Wanted:
    """A batch that was asked for."""

    number: int
    step: StepPart
    indices: np.ndarray  # its records
    shards: np.ndarray  # of each record
    ready: Callable[[Batch], Batch]
    future: Future[Batch | None]
    picked: dict[int, np.ndarray] = field(default_factory=dict)  # by process: places of the records it reads
    pieces: dict[int, Packet] = field(default_factory=dict)
    error: Exception | None = None
    pending: int = 0


class ParallelRecords:
    """Batches of records from reader processes.

    Args:
        server: starts the processes.
        count: the number of processes, at least 1.
        layout, seed, shuffle: see `edl.contract.order`.
        random_access: whether the reader can read any record by itself.
        lenient: leave bad records out of a batch, and list them there; otherwise they raise.
        name: the user's module, for messages.
        seconds: the time limit of a request.
        warn: takes a line each time that a process has died.
        place: the file of a record and its number there, empty if unknown.
    """

    def __init__(
        self,
        server: ForkServer,
        count: int,
        layout: Layout,
        seed: int,
        shuffle: bool,
        random_access: bool,
        lenient: bool,
        name: str,
        seconds: float,
        warn: Callable[[str], None],
        place: Callable[[int], str] = lambda index: "",
    ):
        self._place = place
        self._server, self.count, self._lenient = server, count, lenient
        self._seed, self._shuffle, self._random_access = seed, shuffle, random_access
        self._name, self.seconds, self._warn = name, seconds, warn
        self._numbers = itertools.count()
        self._processes: list[ReaderProcess | None] = [None] * count
        self._deadly: dict[int, str] = {}  # records that kill their process, and how
        self._deadly_blocks: set[int] = set()  # blocks that cannot be read as a whole
        self._deaths = 0
        self._changed = threading.Condition()
        self._shared: list[_Task] = []  # for any process
        self._own: list[list[_Task]] = [[] for _ in range(count)]
        self._closed = False
        self.lay_out(layout)
        self._threads = [
            threading.Thread(target=self._run, args=(i,), name=f"read-{i}", daemon=True) for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def layout(self) -> Layout:
        return self._order.layout

    @property
    def pids(self) -> list[int]:
        """The running reader processes."""
        return [process.pid for process in self._processes if process is not None]

    def lay_out(self, layout: Layout) -> None:
        """Use this layout for batches that are asked for from now on."""
        self._order = Order(layout, self._seed, self._shuffle)

    def batch(self, start: int, stop: int, part: StepSlice) -> Batch | None:
        """Read this part of the records at the positions [start, stop), and wait for it. See `submit`."""
        return self.submit(start, stop, part, lambda batch: batch).result()

    def submit(
        self, start: int, stop: int, part: StepSlice, ready: Callable[[Batch], Batch]
    ) -> Future[Batch | None]:
        """Begin to read this part of the records at the positions [start, stop), which lie in one epoch.

        Args:
            ready: what else can be done about the batch; called on a thread that reads.

        Returns:
            The batch; None if the part has no records. Its errors are those of `Records.batch`, and a
            DataError if records kill their process.
        """
        future: Future[Batch | None] = Future()
        indices, shards = self._order.part(start, stop, part)
        if not len(indices):
            future.set_result(None)
            return future
        step = StepPart(self.layout, start, part)
        wanted = _Wanted(next(self._numbers), step, indices, shards, ready, future)
        whole = self._random_access or self.count == 1
        if whole or self._is_deadly(indices):
            self._put(_Task(wanted.number, lambda slot: self._finish(slot, wanted, self._read)))
            return future
        owners = shards % self.count
        wanted.picked = {
            slot: found for slot in range(self.count) if len(found := np.flatnonzero(owners == slot))
        }
        wanted.pending = len(wanted.picked)
        for owner in wanted.picked:
            self._put(_Task(wanted.number, lambda slot: self._pick(slot, wanted)), owner)
        return future

    def idle(self) -> Future[None]:
        """Return a future that is done when all processes are up, and have answered all requests until now.

        A process that has answered nothing yet reads the first record for it: its data are open then, and
        its functions are traced. The future's error is that of a process that cannot be started.
        """
        future: Future[None] = Future()
        errors: list[Exception | None] = []  # by process, in the order of their answers

        def answer(slot: int) -> None:
            error = self._opened(slot)
            with self._changed:
                errors.append(error)
                if len(errors) < self.count:
                    return
            if (found := next(filter(None, errors), None)) is not None:
                future.set_exception(found)
            else:
                future.set_result(None)

        for slot in range(self.count):
            self._put(_Task(next(self._numbers), answer), slot)
        return future

    def _opened(self, slot: int) -> Exception | None:
        """Have the process read the first record, unless it has answered already; returns its error."""
        process = self._processes[slot]
        if process is not None and process.answered:
            return None
        try:
            self._call(slot, "alone", (0, 1), np.arange(1), most=1)
        except Killed:  # the batch with this record reports it
            return None
        except Exception as error:
            return error
        return None

    def close(self) -> None:
        """End all reader processes."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._server.close()
        for thread in self._threads:
            thread.join()
        for process in self._processes:
            if process is not None:
                process.close()

    # --- tasks

    def _put(self, task: _Task, owner: int | None = None) -> None:
        with self._changed:
            heapq.heappush(self._shared if owner is None else self._own[owner], task)
            self._changed.notify_all()

    def _run(self, slot: int) -> None:
        """Do tasks, on the thread of one process. The process opens its data while it waits for the first."""
        with contextlib.suppress(DataError):  # the first request tries again
            self._processes[slot] = self._server.reader()
        while (task := self._next(slot)) is not None:
            task.run(slot)
            del task  # and the batch

    def _next(self, slot: int) -> _Task | None:
        own = self._own[slot]
        with self._changed:
            while not (self._closed or own or self._shared):
                self._changed.wait()
            if self._closed:
                return None
            queue = min((q for q in (own, self._shared) if q), key=lambda q: q[0].number)
            return heapq.heappop(queue)

    def _pick(self, slot: int, wanted: _Wanted) -> None:
        """Have the process pick its records of a batch. The last piece makes the batch."""
        error: Exception | None = None
        piece: Packet | None = None
        if not wanted.future.cancelled():
            places = wanted.picked[slot]
            arguments = wanted.step, wanted.indices[places], wanted.shards[places]
            try:
                piece = self._call(slot, "pick", arguments, wanted.indices)
            except Exception as caught:
                error = caught
        with self._changed:
            if piece is not None:
                wanted.pieces[slot] = piece
            wanted.error = wanted.error or error
            wanted.pending -= 1
            if wanted.pending:
                return
        self._put(_Task(wanted.number, lambda slot: self._finish(slot, wanted, self._feed)))

    def _finish(self, slot: int, wanted: _Wanted, make: Callable[[int, _Wanted], Batch]) -> None:
        """Make a batch, and set the result of its future: also an error."""
        if not wanted.future.set_running_or_notify_cancel():
            return
        try:
            batch = make(slot, wanted)
            found = batch.indices
            if batch.bad:
                found = np.sort([*found.tolist(), *(bad.index for bad in batch.bad)])
            if np.array_equal(found, np.sort(wanted.indices) if batch.bad else wanted.indices):
                wanted.future.set_result(wanted.ready(batch))
            else:
                what = f"a reader process returned the {named(found)} for the {named(wanted.indices)}"
                wanted.future.set_exception(DataError(f"{self._name}: {what}"))
        except BaseException as error:
            wanted.future.set_exception(error)

    def _read(self, slot: int, wanted: _Wanted) -> Batch:
        """Read and feed a batch in one process."""
        if self._is_deadly(wanted.indices):
            return self._alive(slot, wanted.indices, wanted.step.epoch)
        try:
            return self._unpacked(slot, "batch", (wanted.step, wanted.indices, wanted.shards), wanted.indices)
        except Killed as killed:
            return self._one_by_one(slot, wanted, killed.how)

    def _feed(self, slot: int, wanted: _Wanted) -> Batch:
        """Feed a batch whose pieces several processes have read."""
        indices = wanted.indices
        if isinstance(wanted.error, Killed):
            return self._one_by_one(slot, wanted, wanted.error.how)
        if wanted.error is not None:
            if not self._lenient:
                raise wanted.error
            return self._unpacked(slot, "good", (indices, wanted.step.epoch), indices)
        pieces = [wanted.pieces[owner] for owner in wanted.picked]
        back = np.argsort(np.concatenate(list(wanted.picked.values())))
        try:
            return self._unpacked(slot, "feed", (wanted.step, indices, back), indices, pieces)
        except Killed as killed:
            return self._one_by_one(slot, wanted, killed.how)

    # --- calls

    def _unpacked(
        self,
        slot: int,
        method: str,
        arguments: Sequence[Any],
        indices: np.ndarray,
        pieces: Sequence[Packet] = (),
    ) -> Any:
        return self._call(slot, method, arguments, indices, pieces).unpack()

    def _call(
        self,
        slot: int,
        method: str,
        arguments: Sequence[Any],
        indices: np.ndarray,
        pieces: Sequence[Packet] = (),
        most: int = DEATHS,
    ) -> Packet:
        """Call a method in a process, which is started if it is not there.

        Args:
            indices: the records that it handles, for messages.
            most: the number of deaths of the process after which the call is not repeated.

        Raises:
            Killed: the process has died `most` times in this call.
            ReaderDied: the process has ended because this object is closed.
            DataError: it cannot be started.
            others: as the method.
        """
        deaths = 0
        while True:
            process = self._processes[slot]
            try:
                if process is None:
                    process = self._processes[slot] = self._server.reader()
                seconds = self.seconds + (0 if process.answered else self._server.seconds)
                return process.call(method, arguments, pieces, seconds)
            except ReaderDied as death:
                assert process is not None
                self._processes[slot] = None
                if self._closed:
                    raise
                self._tell(process.pid, death.how, indices)
                deaths += death.charged
                if deaths == most:
                    raise Killed(death.how) from None

    def _one_by_one(self, slot: int, wanted: _Wanted, how: str) -> Batch:
        """Find the records that kill their process, and read the others.

        Args:
            how: the process has died twice with all of them.

        Raises:
            DataError: bad records are not allowed; or no record kills its process alone, and all of them do.
        """
        indices, epoch = wanted.indices, wanted.step.epoch
        if len(indices) == 1:
            self._set_aside(int(indices[0]), how)
            return self._alive(slot, indices, epoch)
        self._find_deadly_blocks(slot, indices)
        for _ in range(ROUNDS):
            for index in indices.tolist():
                if index not in self._deadly:
                    try:
                        self._call(slot, "alone", (index, index + 1), np.array([index]))
                    except Killed as killed:
                        self._set_aside(index, killed.how)
            try:
                return self._alive(slot, indices, epoch)
            except Killed as killed:
                how = killed.how
        raise DataError(
            f"{self._name}: the reader process of the {named(indices)} {how}, again and again, and no record "
            "does this alone: they may need too much memory together (training.batchSize, data.workers)"
        )

    def _set_aside(self, index: int, how: str) -> None:
        """Remember a record that kills its process.

        Raises:
            DataError: bad records are not allowed.
        """
        self._deadly[index] = with_place(f"its reader process {how}, twice", self._place(index))
        if not self._lenient:
            raise DataError(
                f"{self._name}: record {index} cannot be read: {self._deadly[index]} "
                "(data.maxBadRecords allows to leave bad records out)"
            )

    def _find_deadly_blocks(self, slot: int, indices: np.ndarray) -> None:
        """Find blocks that kill their process: their good records are then read one by one."""
        block = self.layout.block
        for number in np.unique(indices // block).tolist() if block > 1 else ():
            if number not in self._deadly_blocks:
                start, stop = number * block, min((number + 1) * block, self.layout.records)
                try:
                    self._call(slot, "alone", (start, stop), np.arange(start, stop), most=1)
                except Killed:
                    self._deadly_blocks.add(number)

    def _is_deadly(self, indices: np.ndarray) -> bool:
        """Whether some of the records are known to kill their process, or lie in blocks that do."""
        if not self._deadly and not self._deadly_blocks:
            return False
        blocks = set((indices // self.layout.block).tolist())
        return not (
            self._deadly_blocks.isdisjoint(blocks) and self._deadly.keys().isdisjoint(indices.tolist())
        )

    def _tell(self, pid: int, how: str, indices: np.ndarray) -> None:
        """Report that a process has died; after the first few times, only in the log of this worker."""
        what = f"reader process {pid} {how} while it read the {named(indices)}"
        line = f"{self._name}: {what}; it is started again"
        self._deaths += 1
        (self._warn if self._deaths <= MAX_TOLD else log.warning)(line)

    def _alive(self, slot: int, indices: np.ndarray, epoch: int) -> Batch:
        """Read the records at `indices` without those that kill their process.

        Raises:
            Killed: the others do, too.
        """
        bad = tuple(BadRecord(i, self._deadly[i]) for i in indices.tolist() if i in self._deadly)
        rest = np.array([i for i in indices.tolist() if i not in self._deadly], np.int64)
        if not len(rest):
            return Batch(rest, None, None, None, bad=bad)
        batch = self._unpacked(slot, "good", (rest, epoch), rest)
        return replace(batch, bad=(*batch.bad, *bad))
