# SPDX-License-Identifier: Apache-2.0
"""Prediction by a ring: each record's outputs once, in files that are whole or not there.

The records are predicted in batches, like an evaluation (trainer/evaluation/evaluation.py). Each batch
consists of fixed parts of the records, and each part becomes one file. A rank writes the files of its parts
before it takes part in the all-reduce of the batch. So all files of a batch are on disk when its all-reduce
returns. If a rank dies, the other ranks repeat the batch and write the same files again. A restarted job
continues after the last batch whose files are complete.

    part-000000000000-000000001000.npz    the records [0, 1000): `ids`, their places in the data, and outputs
    predictions.json                      the data and the weights used; `complete` when nothing is missing
"""

from __future__ import annotations

import io
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from edl.checkpoints import Store
from edl.checkpoints.place import UNFINISHED, replace, troubles
from edl.contract.evaluation import EvaluationPlan, Pass
from edl.contract.layout import StepSlice
from edl.errors import ConfigError, DataError, EdlError
from edl.trainer.agreement.metric_values import Value
from edl.trainer.records.batches import Batch, ParallelSource, Source, Wait, nothing, patiently

T = TypeVar("T")
BOOK = "predictions.json"
ON_MASTER = "master://predictions"  # in the folder of the run
WHOLE = StepSlice.even(0, 1)  # of the records of a part: one rank has all of them
Outputs = Mapping[str, np.ndarray]


class PredictionError(EdlError):
    """The predictions are not what they should be."""


Predict = Callable[[Batch, Callable[[], Batch | None]], Outputs]


@dataclass(frozen=True)
class Format:
    """A format of predictions' files."""

    suffix: str
    encode: Callable[[np.ndarray, Outputs], bytes]


def _npz(ids: np.ndarray, outputs: Outputs) -> bytes:
    file = io.BytesIO()
    np.savez(file, ids=ids, **outputs)  # type: ignore[arg-type]
    return file.getvalue()


def _parquet(ids: np.ndarray, outputs: Outputs) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns: dict[str, Any] = {"ids": pa.array(ids)}
    for name, values in outputs.items():
        flat = pa.array(values.reshape(-1))
        for size in reversed(values.shape[1:]):
            flat = pa.FixedSizeListArray.from_arrays(flat, size)
        columns[name] = flat
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink)
    written: bytes = sink.getvalue().to_pybytes()
    return written


def _marker(ids: np.ndarray, outputs: Outputs) -> bytes:
    return json.dumps({"records": len(ids)}).encode()


FORMATS = {"npz": Format("npz", _npz), "parquet": Format("parquet", _parquet)}
DONE = Format("done", _marker)  # of a part that the user's write() has kept elsewhere


@dataclass(frozen=True)
class Book:
    """Identifies the data and the model of a directory's predictions."""

    records: int
    part_records: int
    model: str  # the fingerprint, and
    weights: str  # the digest of the model
    format: str


class PredictionFiles:
    """The files of a job.

    Args:
        url: their directory: a path, or an address as for `Store.open`.
        records: the number of records of the data.
        part_records: the number of records of a part.
        again: calls a function until the place is not away; by default, once.

    Raises:
        ConfigError: the address has no folder.
        CheckpointError: the address is invalid, or the client for this kind of store is not installed.
    """

    def __init__(
        self,
        url: str,
        form: Format,
        records: int,
        part_records: int,
        again: Callable[[Callable[[], Any]], Any] = lambda act: act(),
    ):
        self._url, self._form = url, form
        whole = url.rstrip("/") if "://" in url else str(Path(url).resolve())
        above, _, self._directory = whole.rpartition("/")
        if above.endswith(":/"):
            raise ConfigError(f"prediction.dir: {url}: expected a folder in it, such as {whole}/predictions")
        self._place, self._again = Store.open(above or "/").place, again
        self._records, self._size = records, part_records

    @property
    def parts(self) -> int:
        """The number of files."""
        return -(-self._records // self._size)

    def ends(self, part: int) -> tuple[int, int]:
        """The first record of a file, and the one after its last."""
        return part * self._size, min((part + 1) * self._size, self._records)

    def name(self, part: int) -> str:
        """The name of a file. It has the records, so a second attempt writes the same file."""
        start, stop = self.ends(part)
        return f"part-{start:012d}-{stop:012d}.{self._form.suffix}"

    def write(self, part: int, ids: np.ndarray, outputs: Outputs) -> None:
        """Write a part. It is there, whole and durable, when this returns.

        Raises:
            StoreUnavailable: the place is away.
            CheckpointError: it failed permanently.
        """
        self._replace(self.name(part), self._form.encode(ids, outputs))

    def _replace(self, name: str, data: bytes) -> None:
        def act() -> None:
            replace(self._place, self._directory, name, iter([memoryview(data)]))

        self._reach("write the predictions", act)

    def _names(self) -> set[str]:
        return set(self._reach("list the predictions", lambda: self._place.sizes(self._directory)))

    def _book(self) -> dict[str, Any]:
        def act() -> Any:
            with self._place.open(self._directory, BOOK) as file:
                return json.load(file)

        return dict(self._reach("read the predictions", act))

    def _reach(self, doing: str, act: Callable[[], T]) -> T:
        """Act on the place, again while it is away. Raises as `write` does."""

        def tried() -> T:
            with troubles(self._place, doing):
                return act()

        found: T = self._again(tried)
        return found

    def begin(self, book: Book) -> int:
        """Return the first missing part.

        Raises:
            PredictionError: there are predictions of other data or of another model.
        """
        if BOOK in (names := self._names()):
            found = self._book()
            found.pop("complete", None)
            if found != asdict(book):
                differ = ", ".join(key for key, value in asdict(book).items() if found.get(key) != value)
                raise PredictionError(
                    f"{self._url} holds predictions that differ in {differ}: they are of other data, "
                    "or of another model. Choose another output directory, or delete them"
                )
        self._replace(BOOK, f"{json.dumps(asdict(book))}\n".encode())
        return next((part for part in range(self.parts) if self.name(part) not in names), self.parts)

    def end(self) -> None:
        """Check that all parts are there, and no other files.

        Raises:
            PredictionError: it is not so.
        """
        names, expected = self._names(), {self.name(part) for part in range(self.parts)}
        found = {name for name in names if name.startswith("part-")}
        if missing := sorted(expected - found):
            raise PredictionError(
                f"{len(missing)} parts of the predictions are missing, the first: {missing[0]}"
            )
        if others := sorted(found - expected):
            raise PredictionError(f"{self._url} holds other parts, too, e.g. {others[0]}")
        left = [name for name in names if name.endswith(UNFINISHED)]  # of lost workers
        self._reach("remove unfinished predictions", lambda: self._place.remove(self._directory, left))
        self._replace(BOOK, f"{json.dumps({**self._book(), 'complete': True})}\n".encode())


def _if_done(read: Future[Batch | None] | None) -> Batch | None:
    """Return the result if the read is done without an error, else None.

    An error is raised when the records are needed.
    """
    return read.result() if read is not None and read.done() and read.exception() is None else None


class RingPrediction:
    """The prediction by a ring; for the training loop it is an evaluation.

    Args:
        plan: the plan of one pass; its batches consist of whole parts.
        source: the records, in stored order.
        predict: returns the outputs of a batch, by name. Its second argument returns the next batch, or None
            if that is not read yet.
        keep: returns what is stored of a part, from the user's write(); None if write() has stored it itself.
        reading: reads one part ahead; None to use a separate thread. A parallel source reads by itself.
        wait: waits for the records of a part; the ring may end this.
    """

    is_whole = True

    def __init__(
        self,
        plan: EvaluationPlan,
        source: Source,
        predict: Predict,
        files: PredictionFiles,
        keep: Callable[[Outputs, np.ndarray], Outputs | None] = lambda outputs, ids: outputs,
        reading: Executor | None = None,
        wait: Wait = patiently,
    ):
        self._plan, self._source, self._predict, self._files, self._keep = plan, source, predict, files, keep
        self._wait = wait
        self._parallel = source if isinstance(source, ParallelSource) else None
        self._reading = reading or ThreadPoolExecutor(1, thread_name_prefix="read")
        self._part = StepSlice.even(0, 1)

    @property
    def sizes(self) -> Mapping[str, int]:
        """The records of the split."""
        return self._plan.sizes

    def after(self, step: int, epochs: int) -> tuple[Pass, ...]:
        """The pass, before the first step."""
        return self._plan.after(step, epochs)

    def take(self, part: StepSlice) -> None:
        """Set the part of each batch that this worker predicts."""
        self._part = part

    def idle(self) -> list[Future[None]]:
        """Return a future that is done when all reads that have begun until now have returned."""
        return [self._parallel.idle() if self._parallel is not None else self._reading.submit(nothing)]

    def nothing(self, split: str) -> np.ndarray:
        """The contribution of a rank that has written no part, float32 [1]."""
        return np.zeros(1, np.float32)

    def part(self, now: Pass, round: int) -> tuple[np.ndarray, int]:
        """Write this rank's parts of an evaluation batch.

        Returns:
            the number of parts, float32 [1], and their number of records.

        Raises:
            DataError: an output has a different number of rows than there are records.
            Exception: any error of the user's code, of the data, or of the disk.
        """
        records = 0
        for number, batch, following in self._ahead(self._ours(now, round)):
            outputs = self._predict(batch, following)
            for name, values in outputs.items():
                if len(values) != len(batch):
                    raise DataError(f"output {name!r} has {len(values)} rows for {len(batch)} records")
            kept = self._keep(outputs, batch.indices)
            self._files.write(number, batch.indices, kept or {})
            records += len(batch)
        return np.array([len(self._ours(now, round))], np.float32), records

    def results(self, split: str, totals: np.ndarray) -> dict[str, Value]:
        """The number of parts."""
        return {"parts": float(totals[0])}

    def _ours(self, now: Pass, round: int) -> range:
        start, stop = now.positions(round)
        size = self._files.ends(0)[1]
        first, end = start // size, -(-stop // size)
        begin, until = self._part.of(end - first)
        return range(first + begin, first + until)

    def _ahead(self, parts: range) -> Iterator[tuple[int, Batch, Callable[[], Batch | None]]]:
        """Yield each part's number and records, and a function that returns the next part's records, if read.

        The next part is read while a part is predicted; by a parallel source, as many parts as it reads at a
        time.
        """
        most = 1 if self._parallel is None else self._parallel.count
        reads: deque[Future[Batch | None]] = deque()
        for number in parts:
            while len(reads) <= most and (following := number + len(reads)) in parts:
                reads.append(self._submit(following))
            what = partial(_records_of_part, number)
            batch = self._wait(reads.popleft(), what)
            assert batch is not None, "no part is empty"
            yield number, batch, partial(_if_done, reads[0] if reads else None)

    def _submit(self, number: int) -> Future[Batch | None]:
        positions = self._files.ends(number)
        if self._parallel is not None:
            return self._parallel.submit(*positions, WHOLE, lambda batch: batch)
        return self._reading.submit(self._source.batch, *positions, WHOLE)


def _records_of_part(number: int) -> str:
    return f"records of part {number}"
