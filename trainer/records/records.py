# SPDX-License-Identifier: Apache-2.0
"""The records of a step, in the order of the job: what a reader gives, as batches for the model."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from edl.contract.layout import Layout, StepSlice
from edl.contract.order import Order, record_seeds
from edl.data import RandomAccess, Reader, nest
from edl.data.exact import refuse_masked, refuse_mixed
from edl.data.place import place
from edl.errors import DataError
from edl.trainer.records.arrays import kind_of, nbytes, protected, standard
from edl.trainer.records.batches import BadRecord, Batch, named, with_place
from edl.trainer.runtime.error_report import format_error
from edl.trainer.runtime.watchdog import Watch, unwatched

if TYPE_CHECKING:
    from edl.trainer.records.transform import Transform

SAMPLE = 16  # records, to see how large one is
MAX_BAD = 1000  # at the beginning of the data: more cannot be a few that one may leave out


class Records:
    """A reader's records as batches, in the order of the job.

    Args:
        reader: the records. If it has `take`, only the records of a batch are requested; otherwise blocks of
            consecutive records are.
        feed: maps raw records to (features, labels) or (features, labels, weights); None
            when the reader returns such tuples itself.
        watch: wraps each call of the reader and of `feed`.
        seed, shuffle: determine the order.
        lenient: leave bad records out of a batch, and list them there; otherwise they raise.
        transform: maps the records that `feed` has made; each with a seed of its own in each epoch.
    """

    def __init__(
        self,
        reader: Reader,
        feed: Callable[[Any], Any] | None,
        name: str,
        watch: Watch = unwatched,
        seed: int = 0,
        shuffle: bool = False,
        lenient: bool = False,
        transform: Transform | None = None,
    ):
        self._transform = transform
        self._reader, self._watch, self._feed, self._name = reader, watch, feed, name
        # Found once: isinstance of a Protocol looks at each of its members, which is too slow for each batch.
        self._random_access = reader if isinstance(reader, RandomAccess) else None
        self._seed, self._shuffle, self._lenient = seed, shuffle, lenient
        # By shard: its present block, as (number, records, their arrays).
        self._open: dict[int, tuple[int, Any, list[np.ndarray]]] = {}
        self._part = StepSlice.even(0, 1)
        self.lay_out(Layout(len(reader)))

    @property
    def layout(self) -> Layout:
        return self._order.layout

    def choose_layout(self, buffer_bytes: float, ranks: int, deterministic: bool = False) -> None:
        """Find a layout that goes well with how large the records are, and whether they are read in blocks.

        Args:
            buffer_bytes: what a worker that is alone may keep of blocks that it has read.
            ranks: the number of ranks of the expected ring.
            deterministic: which records are read together must not depend on the ring.

        Raises:
            DataError: with these records, training cannot be deterministic.
        """
        size = self.layout.records
        if self._shuffle and size and self._random_access is None:
            sample = self.first(SAMPLE)
            record_bytes = nbytes(self._joined(sample)) / len(sample)
            together = getattr(self._reader, "records_per_read", 1)
            self.lay_out(Layout.fitting(size, record_bytes, buffer_bytes, ranks, together))
        if deterministic and self._order.in_blocks:
            raise DataError(
                f"{self._name}: training.deterministic must be false with a reader that has no take(), "
                "because which records of a step are read together depends on the number of workers; give "
                "the reader take(), or set data.shuffle=false"
            )

    def lay_out(self, layout: Layout) -> None:
        """Use this layout from now on."""
        self._order = Order(layout, self._seed, self._shuffle)
        self._open = {}

    def batch(self, start: int, stop: int, part: StepSlice) -> Batch | None:
        """Read this part of the records at the positions [start, stop).

        Raises:
            DataError: the reader gave something else than it promised.
        """
        indices, shards = self._order.part(start, stop, part)
        return self.batch_of(indices, shards, part, self.epoch(start)) if len(indices) else None

    def batch_of(self, indices: np.ndarray, shards: np.ndarray, part: StepSlice, epoch: int) -> Batch:
        """Read the records at `indices`, a part of a step.

        Args:
            shards: int64 [records], the shard of each record.

        Raises:
            DataError: the reader gave something else than it promised.
        """
        try:
            return self._as_batch(self.pick(indices, shards, part), indices, epoch)
        except Exception:
            if not self._lenient:
                raise
            return self._batch_without_bad(indices, epoch)

    def epoch(self, position: int) -> int:
        """The epoch of a position."""
        return position // max(self.layout.records, 1)

    def feed(self, indices: np.ndarray, back: np.ndarray, epoch: int, pieces: Sequence[Any]) -> Batch:
        """Make the batch of the records at `indices` of raw records that several processes have picked.

        Args:
            back: int64 [records], the place of each record in all pieces together.

        Raises:
            DataError: the reader or `feed` gave something else than it promised.
        """
        try:
            whole = lambda *arrays: self._whole(*arrays)[back]  # noqa: E731
            records = nest.map_leaves(whole, *pieces) if len(pieces) > 1 else pieces[0]
            return self._as_batch(records, indices, epoch)
        except Exception:
            if not self._lenient:
                raise
            return self._batch_without_bad(indices, epoch)

    def pick(self, indices: np.ndarray, shards: np.ndarray, part: StepSlice) -> Any:
        """Read the raw records at `indices`, all or some of this part of a step.

        Args:
            shards: int64 [records], the shard of each record.

        Raises:
            DataError: the reader gave something else than it promised.
        """
        if self._random_access is not None:
            return self._take(self._random_access, indices)
        if not self._shuffle:
            return self._read(int(indices[0]), int(indices[-1]) + 1)
        if part != self._part:  # the blocks of the shards that others read now
            self._part, ours = part, self._order.shards(part)
            self._open = {shard: block for shard, block in self._open.items() if ours[shard]}
        return self._pick(indices, shards)

    def consecutive(self, start: int, stop: int) -> Batch:
        """The records [start, stop) as they lie, without any order: for evaluation."""
        return self._as_batch(self._read(start, stop), np.arange(start, stop))

    def first(self, count: int) -> list[int]:
        """The first `count` good records, or fewer if there are fewer.

        Raises:
            DataError, or an error of the reader or of `feed`: no record is good among very many.
        """
        count = min(count, self.layout.records)
        if not self._lenient:
            return list(range(count))
        good: list[int] = []
        for index in range(min(self.layout.records, count + MAX_BAD)):
            try:
                self.batch_at([index])
            except Exception:
                if not good and index + 1 == min(self.layout.records, count + MAX_BAD):
                    raise
            else:
                good.append(index)
            if len(good) == count:
                break
        return good

    def batch_at(self, indices: Sequence[int], epoch: int = 0) -> Batch:
        """The records at `indices` in an epoch, read one by one unless they follow each other.

        Raises:
            DataError, or what the reader or `feed` raises: one of them is bad, or they do not go together.
        """
        return self._as_batch(self._joined(indices), np.array(indices), epoch)

    def _joined(self, indices: Sequence[int]) -> Any:
        start, stop = indices[0], indices[-1] + 1
        if list(indices) == list(range(start, stop)):
            return self._read(start, stop)
        return nest.map_leaves(self._whole, *(self._read(i, i + 1) for i in indices))

    def batch_without_bad(self, indices: np.ndarray, epoch: int) -> Batch:
        """The records at `indices` in an epoch, without those that are bad if `lenient`.

        Raises:
            DataError, or what the reader or `feed` raises: one of them is bad, or they do not go together.
        """
        return (
            self._batch_without_bad(indices, epoch)
            if self._lenient
            else self.batch_at(indices.tolist(), epoch)
        )

    def _batch_without_bad(self, indices: np.ndarray, epoch: int) -> Batch:
        """The records at `indices` without those that are bad, found one by one.

        Raises:
            DataError, or what `feed` raises: each alone is good, and all together are not.
        """
        good, bad = [], []
        for index in indices.tolist():
            try:
                self.batch_at([index], epoch)
            except Exception as error:
                bad.append(BadRecord(index, with_place(format_error(error), place(self._reader, index))))
            else:
                good.append(index)
        if not good:
            return Batch(np.zeros(0, np.int64), None, None, None, bad=tuple(bad))
        return replace(self.batch_at(good, epoch), bad=tuple(bad))

    def _as_batch(self, records: Any, indices: np.ndarray, epoch: int = 0) -> Batch:
        fed = self._fed(records, indices)
        where = "feed(records)" if self._feed else "data(split).read()"
        if self._feed is None and not isinstance(fed, tuple | list):
            fed = (fed,)  # features without labels, as `fit` takes one array or a dict
        if not isinstance(fed, tuple | list) or len(fed) not in (1, 2, 3):
            raise DataError(
                f"{self._name}: {where} must give (features, labels) or (features, labels, weights), or "
                f"(features, None) where the model needs no labels, not {type(fed).__name__}"
                + (f" of {len(fed)}" if isinstance(fed, tuple | list) else "")
            )
        given = tuple(nest.with_ones(fed, len(indices))) + (None,) * (3 - len(fed))
        try:
            x, y, weights = nest.map_leaves(standard, given)
        except (TypeError, ValueError):
            self._refuse_objects(given, where)
            raise
        for path, array in nest.leaves((x, y, weights)):
            # What a record becomes is counted as that record, so it must be one.
            if array is not None and (not array.shape or array.shape[0] != len(indices)):
                name = _name(path)
                what = f"{array.shape[0]} records" if array.shape else "a single value"
                raise DataError(
                    f"{self._name}: {where} must keep the number of records: of {len(indices)}, {name} has "
                    f"{what} ({named(indices)})"
                )
        if self._transform is not None and len(indices):
            with self._watch(lambda: f"{self._name}: transform() of the {named(indices)}"):
                seeds = record_seeds(self._seed, epoch, indices)
                x, y, weights = self._transform(x, y, weights, seeds, named(indices))
        return Batch(indices, x, y, weights, nbytes((x, y, weights)))

    def _refuse_objects(self, fed: Any, where: str) -> None:
        """Refuse arrays that cannot be tensors.

        Raises:
            DataError: one of the arrays cannot be a tensor.
        """
        for path, array in nest.leaves(fed):
            try:
                standard(array)
            except (TypeError, ValueError) as error:
                is_masked = isinstance(array, np.ma.MaskedArray)
                what = f" is {kind_of(array)}, which cannot become a tensor; give numbers or text"
                raise DataError(
                    f"{self._name}: {where}: {_name(path)}{f': {error}' if is_masked else what}"
                ) from error

    def _fed(self, records: Any, indices: np.ndarray) -> Any:
        if self._feed is None:
            return records
        given = nest.map_leaves(protected, records)  # a reader may return views of its data
        with self._watch(lambda: f"{self._name}: feed() of the {named(indices)}"):
            try:
                return self._feed(given)
            except ValueError as error:
                if "read-only" not in str(error):
                    raise
                raise DataError(
                    f"{self._name}: feed(records) changes its records in place{_line(error)}, but they may "
                    "be the data themselves, so they are read-only. Compute new arrays (x = x / 2 instead of "
                    "x /= 2), or change a copy (x = x.copy())"
                ) from error

    def _pick(self, indices: np.ndarray, shards: np.ndarray) -> Any:
        """The records at `indices`, out of their blocks. The last block of each shard stays open."""
        size = self._order.layout.block
        blocks = indices // size
        numbers, firsts, which = np.unique(blocks, return_index=True, return_inverse=True)
        grouped = np.argsort(which, kind="stable")
        within, ends = indices[grouped] % size, np.cumsum(np.bincount(which)).tolist()
        picked: list[list[np.ndarray]] = [[] for _ in numbers]  # by block, in the order of `numbers`
        records: Any = None
        for nth in np.argsort(firsts).tolist():  # as the shards go on
            number, shard = int(numbers[nth]), int(shards[firsts[nth]])
            if shard not in self._open or self._open[shard][0] != number:
                start = number * size
                read = self._read(start, min(start + size, self._order.layout.records))
                like = next(iter(self._open.values()))[1] if self._open else read
                arrays = nest.map_leaves(lambda _, array: np.asarray(array), like, read)
                self._open[shard] = number, arrays, nest.flatten(arrays)
            _, records, arrays = self._open[shard]
            here = within[ends[nth - 1] if nth else 0 : ends[nth]]
            picked[nth] = [array.take(here, axis=0) for array in arrays]
        back = np.empty_like(grouped)
        back[grouped] = np.arange(len(grouped))
        return nest.pack(records, [self._whole(*arrays)[back] for arrays in zip(*picked, strict=True)])

    def _whole(self, *arrays: Any) -> np.ndarray:
        """The arrays of several reads as one.

        Raises:
            DataError: NumPy would change values, as integers that it makes floats of.
        """
        try:
            refuse_mixed(array for array in map(np.asarray, arrays) if len(array))
        except ValueError as error:
            raise DataError(
                f"{self._name}: read() gives {error} for different records, which would change values; each "
                "array must have one type for all records"
            ) from error
        return np.concatenate(arrays)

    def _take(self, reader: RandomAccess, indices: np.ndarray) -> Any:
        with self._watch(lambda: f"{self._name}: take() of the {named(indices)}"):
            records = reader.take(indices.copy())  # what is the reader's it may sort
        self._check(records, len(indices), f"take() of the {named(indices)}")
        return records

    def _read(self, start: int, stop: int) -> Any:
        with self._watch(lambda: f"{self._name}: read({start}, {stop})"):
            records = self._reader.read(start, stop)
        self._check(records, stop - start, f"read({start}, {stop})")
        return records

    def _check(self, records: Any, count: int, call: str) -> None:
        for array in nest.flatten(records):
            if isinstance(array, str | bytes) or not hasattr(array, "__len__"):
                raise DataError(
                    f"{self._name}: {call} must give an array with an entry for each record, or a tuple, "
                    f"list or dict of such arrays; it gave single values of type {type(array).__name__} "
                    "(make an array of a list of them: np.array(values))"
                )
            if len(array) != count:
                raise DataError(f"{self._name}: {call} gave {len(array)} records, not {count}")
            if isinstance(array, np.ma.MaskedArray):  # its mask would be lost where records are joined
                try:
                    refuse_masked(array)
                except ValueError as error:
                    raise DataError(f"{self._name}: {call}: {error}") from error


def _name(path: str) -> str:
    """An array as the user knows it: features['age'], from [0]['age']."""
    which, rest = path[1:].split("]", 1)
    return ("features", "labels", "weights")[int(which)] + rest


def _line(error: BaseException) -> str:
    """Where the user's code raised the error: " (file.py, line 7)"; empty if no frame is the user's."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    ours = [frame for frame in frames if "site-packages" not in frame.filename]
    return f" ({ours[-1].filename}, line {ours[-1].lineno})" if ours else ""
