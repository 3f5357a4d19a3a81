# SPDX-License-Identifier: Apache-2.0
"""Table rows saved by a job with parameter servers.

They are in a file saved by Keras, or in the servers' checkpoint shards (ps/storage/checkpoint_shard.py writes
them).

A model that holds the rows as variables can be built only when their number is known: `counted` reads it from
headers alone. The names of their layers identify the tables.
"""

from __future__ import annotations

import json
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import h5py
import numpy as np

from edl.checkpoints import SERVERS, Checkpoint
from edl.checkpoints import tensors as files_of_tensors
from edl.errors import CheckpointDamaged, CheckpointError, ModelError
from edl.trainer.embedding.interfaces import Table

IN_KERAS = "model.weights.h5"  # of a .keras file
_DTYPES: dict[str, np.dtype[Any]] = {
    "I64": np.dtype("<i8"),
    "F32": np.dtype("<f4"),
    "U8": np.dtype("u1"),
}


class SavedTable(NamedTuple):
    """The saved rows of one layer.

    Args:
        ids: int64 [n], each once.
        rows: float32 [n, dim].
    """

    ids: np.ndarray
    rows: np.ndarray


@contextmanager
def weights_in(path: Path) -> Iterator[h5py.File]:
    """The weights in a .keras or .weights.h5 file.

    Raises:
        OSError, KeyError, zipfile.BadZipFile: it is not such a file.
    """
    if path.suffix == ".keras":
        with zipfile.ZipFile(path) as archive, archive.open(IN_KERAS) as inside, h5py.File(inside) as file:
            yield file
    else:
        with h5py.File(path) as file:
            yield file


def counted_in_file(path: Path) -> dict[str, int]:
    """The number of ids of each layer that was saved with its learned ids.

    Raises:
        CheckpointError: it is not a file of Keras.
    """
    found: dict[str, int] = {}

    def note(name: str, item: Any) -> None:
        # As edl.layers.Embedding saves such a table: its ids, and their rows.
        if isinstance(item, h5py.Group) and name.endswith("/vars") and set(item) == {"0", "1"}:
            ids, rows = item["0"], item["1"]
            layer = item.attrs.get("name", "")
            if layer and ids.dtype == np.int64 and ids.ndim == 1 and rows.ndim == 2 and len(ids) == len(rows):
                found[str(layer)] = len(ids)

    try:
        with weights_in(path) as file:
            file.visititems(note)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path.name} is not a file that Keras has saved: {error}") from error
    return found


def dims_in_file(path: Path) -> dict[str, int]:
    """Return the length of each layer's rows in a file, in either form.

    A table is saved with the ids that were learned, or with rows for all ids from 0 on.

    Raises:
        CheckpointError: it is not a file of Keras.
    """
    found: dict[str, int] = {}

    def note(name: str, item: Any) -> None:
        if isinstance(item, h5py.Group) and name.endswith("/vars") and set(item) in ({"0"}, {"0", "1"}):
            rows = item[max(item)]
            if (layer := item.attrs.get("name", "")) and rows.ndim == 2:
                found[str(layer)] = int(rows.shape[1])

    try:
        with weights_in(path) as file:
            file.visititems(note)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path.name} is not a file that Keras has saved: {error}") from error
    return found


def dims(checkpoint: Checkpoint) -> dict[str, int]:
    """The length of each table's rows, in the servers' parts of a checkpoint.

    Raises:
        CheckpointError: it cannot be read.
    """
    return {name: shape[1] for name, shape in _shapes(checkpoint, "rows")}


def counted(checkpoint: Checkpoint) -> dict[str, int]:
    """The number of rows of each table in a checkpoint; empty if none were on parameter servers.

    Raises:
        CheckpointError: it cannot be read.
    """
    found = Counter[str]()
    for name, shape in _shapes(checkpoint, "ids"):
        found[name] += shape[0]
    return dict(found)


def _shapes(checkpoint: Checkpoint, entry: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name of each table in each servers' part, and the shape of its entry."""
    for part in _parts(checkpoint):
        with part.opened(checkpoint) as file:
            for number, name in enumerate(part.tables(file)):
                yield name, part.entry(number, entry).shape


def tables(checkpoint: Checkpoint) -> dict[str, SavedTable]:
    """All rows of all tables of a checkpoint, of all servers. The caller verifies the checkpoint before.

    Raises:
        CheckpointError: it cannot be read.
        CheckpointDamaged: the shards contradict each other.
    """
    found: dict[str, list[SavedTable]] = {}
    for part in _parts(checkpoint):
        with part.opened(checkpoint) as file:
            for number, name in enumerate(part.tables(file)):
                ids, rows = part.read(file, number, "ids"), part.read(file, number, "rows")
                if ids.ndim != 1 or rows.ndim != 2 or len(ids) != len(rows):
                    raise CheckpointDamaged(
                        f"{part.where}: table {name!r} has ids {list(ids.shape)} and rows {list(rows.shape)}"
                    )
                found.setdefault(name, []).append(SavedTable(ids, rows))
    whole = {name: SavedTable(*map(np.concatenate, zip(*of, strict=True))) for name, of in found.items()}
    for name, table in whole.items():
        if len(np.unique(table.ids)) != len(table.ids):
            raise CheckpointDamaged(f"{checkpoint.directory}: table {name!r} has an id on several servers")
    return whole


class RowsOfCheckpoint:
    """Rows of a model's tables in a checkpoint, to be saved with the model (trainer/embedding/lookups.py).

    Args:
        those: the model's tables, by number.

    Raises:
        ModelError: the checkpoint has other tables.
        CheckpointError: it cannot be read.
    """

    def __init__(self, checkpoint: Checkpoint, those: Sequence[Table]):
        there = tables(checkpoint)
        dims = {name: table.rows.shape[1] for name, table in there.items()}
        wrong = [
            f"{t.name!r} has rows of length {t.dim} here, and {dims.get(t.name, 'none')} there"
            for t in those
            if dims.get(t.name) != t.dim
        ]
        if wrong:
            raise ModelError(f"{checkpoint.directory}: it is of other tables: {'; '.join(wrong)}")
        self._tables = [there[table.name] for table in those]

    def all_rows(self, table: int) -> tuple[np.ndarray, np.ndarray]:
        return self._tables[table]

    def pull(self, step: int, ids: Sequence[np.ndarray]) -> list[np.ndarray]:
        raise AssertionError("no step is taken, and the model has all rows")

    def stage(self, step: int, rank: int, gradients: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        raise AssertionError("nothing is trained")


class _Entry(NamedTuple):
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int


class _Part:
    """A server's part: where in the file each tensor is."""

    def __init__(self, name: str, where: str):
        self.name, self.where = name, where
        self._entries: dict[str, _Entry] = {}
        self._server = ""

    @contextmanager
    def opened(self, checkpoint: Checkpoint) -> Iterator[BinaryIO]:
        """Open the part and read its header.

        Raises:
            CheckpointDamaged: the file is not a server's part of a checkpoint.
        """
        with checkpoint.opened(self.name) as file:
            try:
                self._read_header(file)
                yield file
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                raise CheckpointDamaged(
                    f"{self.where}: not a parameter server's part of a checkpoint: {error}"
                ) from error

    def _read_header(self, file: BinaryIO) -> None:
        size = int.from_bytes(_exactly(file, 8), "little")
        if size > files_of_tensors.MAX_HEADER_BYTES:
            raise ValueError(f"its header has {size} bytes")
        entries = json.loads(_exactly(file, size))
        entries.pop("__metadata__", None)
        for name, entry in entries.items():
            start = 8 + size + int(entry["data_offsets"][0])
            self._entries[name] = _Entry(_DTYPES[entry["dtype"]], tuple(entry["shape"]), start)
        (about,) = (name for name in self._entries if name.endswith(".about"))
        self._server = about.removesuffix(".about")

    def tables(self, file: BinaryIO) -> list[str]:
        """Return the names of the tables in the file, by number."""
        about = json.loads(self._bytes(file, self._entries[f"{self._server}.about"]))
        return [str(table["name"]) for table in about["tables"]]

    def entry(self, table: int, name: str) -> _Entry:
        """The entry of the header for a table's array: `ids`, `rows`, ..."""
        return self._entries[f"{self._server}.{table}.{name}"]

    def read(self, file: BinaryIO, table: int, name: str) -> np.ndarray:
        """Read a table's array."""
        entry = self.entry(table, name)
        return np.frombuffer(self._bytes(file, entry), entry.dtype).reshape(entry.shape)

    def _bytes(self, file: BinaryIO, entry: _Entry) -> bytes:
        file.seek(entry.start)
        return _exactly(file, int(np.prod(entry.shape, dtype=np.int64)) * entry.dtype.itemsize)


def _exactly(file: BinaryIO, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        piece = file.read(size - len(found))
        if not piece:
            raise ValueError("it ends before its last tensor")
        found += piece
    return bytes(found)


def _parts(checkpoint: Checkpoint) -> Sequence[_Part]:
    said = checkpoint.manifest.state.get(SERVERS)
    names = said.get("parts", []) if isinstance(said, Mapping) else []
    return [_Part(name, f"{checkpoint.directory}: {name}") for name in names]
