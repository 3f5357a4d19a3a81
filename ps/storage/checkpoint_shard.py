# SPDX-License-Identifier: Apache-2.0
"""A server's shard of a checkpoint: all rows of all tables, as tensors of one file.

The manifest names the files of all servers, under `state["servers"]`: {"parts": [names], "count": n}. A
server reads all these files and keeps the rows whose buckets it owns, so the number of servers may change.

`ps.I.about` (JSON) names the step, the server and the tables. For table T: `ps.I.T.ids`, `.steps` (the last
step that used the id), `.counts` (the number of steps that used it), `.rows`, `.slots` (the optimizer's
state), and `.seen` (ids that are not learned yet: id, last step, count).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np

from edl.checkpoints import Checkpoint, Store, Tensor
from edl.checkpoints import tensors as files_of_tensors
from edl.checkpoints.manifest import Manifest
from edl.contract.proto import ps_pb2 as pb
from edl.errors import CheckpointDamaged, CheckpointError
from edl.ps.table.table import Copy, Table

ROOM = 8 << 20  # bytes per read
NOTHING: Mapping[str, Any] = MappingProxyType({})
_DTYPES = {"I64": "<i8", "F32": "<f4", "U8": "u1"}

Mine = Callable[[np.ndarray], np.ndarray]  # which of some ids are on this server, bool [n]
Room = Callable[[Table, int], None]  # raises if the memory limit allows no further rows


def tensors(
    index: int,
    step: int,
    servers: int,
    tables: Iterable[pb.Table],
    copies: Sequence[Copy],
    more: Mapping[str, Any] = NOTHING,
) -> dict[str, Tensor]:
    """The tensors of a shard, by name.

    Args:
        index, step, servers: of the writing server, of the rows, and the number of servers.
        tables, copies: definition and contents of each table.
        more: further entries of `about`.
    """
    about = {
        "step": step,
        "server": index,
        "servers": servers,
        "tables": [_about(table) for table in tables],
        **more,
    }
    text = np.frombuffer(json.dumps(about).encode(), np.uint8)
    found = {f"ps.{index}.about": Tensor.of(text)}
    for number, copy in enumerate(copies):
        for name in ("ids", "steps", "counts", "rows", "slots", "seen"):
            found[f"ps.{index}.{number}.{name}"] = Tensor.of(getattr(copy, name))
    return found


def rows(names: Iterable[str]) -> frozenset[str]:
    """The names of tensors that must be finite."""
    return frozenset(name for name in names if name.endswith(".rows"))


def _about(table: pb.Table) -> dict[str, Any]:
    return {
        "name": table.name,
        "dim": table.dim,
        "optimizer": table.optimizer,
        "initializer": table.initializer,
    }


def read_checkpoint(
    url: str,
    step: int,
    attempt: str,
    tables: Sequence[Table],
    mine: Mine,
    room: Room,
    alone: tuple[int, int] | None = None,
) -> list[Mapping[str, Any]]:
    """Fill empty tables with this server's rows of a checkpoint.

    Args:
        alone: index of a server, and the number of servers; if the checkpoint has a shard of each of them,
        only
            that server's shard is read.

    Returns:
        the `about` of each shard read.

    Raises:
        CheckpointError: the checkpoint is missing, incomplete, or of different tables.
    """
    found, said = _find(url, step, attempt), list[Mapping[str, Any]]()
    names = _names(found.manifest, found.directory)
    only = None
    if alone is not None and len(names) == alone[1]:
        with found.place.open(found.directory, names[0]) as file:
            about = _about_of(file, f"{found.directory}: {names[0]}")
        if about.get("servers") == alone[1]:  # otherwise some servers were out, and others held their rows
            only = alone[0]
    for name in names:
        with found.place.open(found.directory, name) as file:
            digest = read(file, f"{found.directory}: {name}", tables, mine, room, said.append, only)
        if digest:
            _verify(found, name, digest)
    return said


def read_start(start: pb.Start, tables: Sequence[Table], mine: Mine, room: Room) -> None:
    """Fill the empty tables that `start` names with this server's rows of another job's checkpoint.

    Raises:
        CheckpointError: the checkpoint is missing, incomplete, or of different tables.
    """
    found = _find(start.directory, start.step, start.attempt)
    for name in _names(found.manifest, found.directory):
        where = f"{found.directory}: {name}"
        with found.place.open(found.directory, name) as file:
            tables_there = _about_of(file, where)["tables"]
        theirs = [(str(table["name"]), table["dim"]) for table in tables_there]
        ours = {table.name: table for table in tables if table.name in start.tables}
        for missing in ours.keys() - {name for name, _ in theirs}:
            raise CheckpointError(f"{where}: it has no table {missing!r}")
        for name_of, dim in theirs:
            if name_of in ours and ours[name_of].dim != dim:
                raise CheckpointError(
                    f"{where}: table {name_of!r} has rows of length {dim}, and the model's have length "
                    f"{ours[name_of].dim}"
                )
        taken = {n: ours[name_of] for n, (name_of, _) in enumerate(theirs) if name_of in ours}
        with found.place.open(found.directory, name) as file:
            digest = _read(file, where, taken, mine, room, of_another=OfAnother(start.everything))
        _verify(found, name, digest)


class OfAnother(NamedTuple):
    """Which data of another job's rows are loaded.

    Args:
        slots: also load the optimizer's state.
    """

    slots: bool

    @property
    def skips(self) -> frozenset[str]:
        return frozenset({"steps", "seen"} if self.slots else {"steps", "seen", "slots"})


def _about_of(file: BinaryIO, where: str) -> dict[str, Any]:
    """Return the `about` of a file, which includes its `tables`.

    Raises:
        CheckpointDamaged: the file is not one of a parameter server.
    """  # noqa: DOC501 (caught below)
    try:
        size = int.from_bytes(_exactly(file, 8), "little")
        if size > files_of_tensors.MAX_HEADER_BYTES:
            raise ValueError(f"its header has {size} bytes")
        entries = json.loads(_exactly(file, size))
        (entry,) = (entry for name, entry in entries.items() if name.endswith(".about"))
        start, stop = entry["data_offsets"]
        file.seek(8 + size + start)
        about: dict[str, Any] = json.loads(_exactly(file, stop - start))
        return {**about, "tables": list(about["tables"])}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointDamaged(f"{where}: not a file of tensors of a parameter server: {error}") from error


def _exactly(file: BinaryIO, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        if not (piece := file.read(size - len(found))):
            raise ValueError("it ends too early")
        found += piece
    return bytes(found)


def _find(url: str, step: int, attempt: str) -> Checkpoint:
    there = Store.open(url).checkpoints()
    found = next((c for c in there if (c.step, c.attempt) == (step, attempt)), None)
    if found is None:
        raise CheckpointError(f"{url}: there is no checkpoint of step {step}, attempt {attempt!r}")
    return found


def _verify(checkpoint: Checkpoint, name: str, digest: str) -> None:
    part = next((part for part in checkpoint.manifest.parts if part.name == name), None)
    if part is not None and digest != part.sha256:
        raise CheckpointDamaged(f"{checkpoint.directory}: {name}: its SHA-256 is not the one in the manifest")


def _names(manifest: Manifest, where: str) -> list[str]:
    said = manifest.state.get("servers")
    if not isinstance(said, Mapping) or not isinstance(names := said.get("parts"), list):
        raise CheckpointError(f"{where}: its manifest names no parts of parameter servers")
    if said.get("count") != len(names) or not all(isinstance(name, str) for name in names):
        raise CheckpointDamaged(
            f"{where}: its manifest names {len(names)} parts of {said.get('count')} servers"
        )
    return names


def read(
    file: BinaryIO,
    where: str,
    tables: Sequence[Table],
    mine: Mine,
    room: Room,
    said: Callable[[Mapping[str, Any]], object] = id,
    only: int | None = None,
) -> str:
    """Load this server's rows from a file.

    Args:
        said: called with the file's `about`.
        only: index of a server; files of other servers are skipped.

    Returns:
        the file's SHA-256; empty if it was skipped.

    Raises:
        CheckpointError: the file is damaged, or of different tables.
    """
    return _read(file, where, dict(enumerate(tables)), mine, room, said, only)


def _read(
    file: BinaryIO,
    where: str,
    tables: Mapping[int, Table],
    mine: Mine,
    room: Room,
    said: Callable[[Mapping[str, Any]], object] = id,
    only: int | None = None,
    of_another: OfAnother | None = None,
) -> str:
    """Fill tables from an open file, as `read` does.

    Args:
        tables: the tables to fill, by their numbers in the file.
        of_another: which data of another job's file to load; None: all data, the file is of this job.

    Raises:
        CheckpointDamaged: the file is not one of a parameter server, or its tensors do not fit these tables.
    """
    source = _Hashed(file, where)
    in_order = _entries(source)
    if only is not None and f"ps.{only}.about" not in dict(in_order):
        return ""
    begun: dict[int, dict[str, np.ndarray]] = {}
    taken: dict[int, np.ndarray] = {}
    for name, entry in in_order:
        number, what, dtype, shape, nbytes = _checked_entry(name, entry, where)
        if what == "about":
            about = bytes(source.take(nbytes))
            if of_another is None:
                said(_checked_about(about, where, [tables[n] for n in sorted(tables)]))
            continue
        table = int(number)
        if of_another is not None and (table not in tables or what in of_another.skips):
            source.skip(nbytes)
        elif what == "ids":
            ids = np.frombuffer(source.take(nbytes), dtype)
            taken[table] = mine(ids)
            if table in tables:
                room(tables[table], int(taken[table].sum()))
            begun.setdefault(table, {})["ids"] = ids[taken[table]]
        elif what == "seen":
            seen = np.frombuffer(source.take(nbytes), dtype).reshape(shape)
            begun.setdefault(table, {})["seen"] = seen[mine(np.ascontiguousarray(seen[:, 0]))]
        else:
            begun[table][what] = _filtered(source.take, dtype, shape, taken[table])
    if file.read(1):
        raise CheckpointDamaged(f"{where}: something follows its last tensor")
    _fill(tables, begun, where, room, of_another)
    return source.digest.hexdigest()


class _Hashed:
    """An open file that is read from its beginning to its end, and hashed meanwhile."""

    def __init__(self, file: BinaryIO, where: str):
        self.where, self.digest = where, hashlib.sha256()
        self._file = file

    def take(self, size: int) -> bytearray:
        """Read that many bytes.

        Raises:
            CheckpointDamaged: the file ends before.
        """
        room = bytearray(size)
        filled = 0
        while filled < size:
            count = cast(int, self._file.readinto(memoryview(room)[filled:]))  # type: ignore[attr-defined]
            if not count:
                raise CheckpointDamaged(f"{self.where}: it ends before its last tensor")
            filled += count
        self.digest.update(room)
        return room

    def skip(self, size: int) -> None:
        """Hash that many bytes without keeping them."""
        for at in range(0, size, ROOM):
            self.take(min(ROOM, size - at))


def _entries(source: _Hashed) -> list[tuple[str, Any]]:
    """Read the header of a file: the name and the entry of each tensor, in the order of their bytes.

    Raises:
        CheckpointDamaged: it is not the header of a file of tensors.
    """
    try:
        entries = json.loads(bytes(source.take(int.from_bytes(source.take(8), "little"))))
        entries.pop("__metadata__", None)
        return sorted(entries.items(), key=lambda item: cast(int, item[1]["data_offsets"][0]))
    except (ValueError, LookupError, TypeError, AttributeError, MemoryError) as error:
        raise CheckpointDamaged(f"{source.where}: not a file of tensors: {error}") from error


class _Entry(NamedTuple):
    """A tensor of a file.

    Args:
        table: the number of its table.
        what: which data of the table it holds, such as "rows".
    """

    table: str
    what: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    nbytes: int


def _checked_entry(name: str, entry: Any, where: str) -> _Entry:
    try:
        dtype, shape = np.dtype(_DTYPES[entry["dtype"]]), tuple(entry["shape"])
        start, stop = entry["data_offsets"]
        *_, number, what = name.split(".")
    except (LookupError, ValueError, TypeError) as error:
        raise CheckpointDamaged(f"{where}: tensor {name!r} is not one of a parameter server") from error
    if stop - start != int(np.prod(shape, dtype=np.int64)) * dtype.itemsize:
        raise CheckpointDamaged(f"{where}: tensor {name!r} has {stop - start} bytes for {list(shape)}")
    return _Entry(number, what, dtype, shape, stop - start)


def _fill(
    tables: Mapping[int, Table],
    begun: Mapping[int, Mapping[str, np.ndarray]],
    where: str,
    room: Room,
    of_another: OfAnother | None,
) -> None:
    """Fill tables with the tensors that were read for them, both by the tables' numbers.

    Raises:
        CheckpointDamaged: the tensors are not those of the table.
    """
    for number, parts in begun.items():
        try:
            room(tables[number], len(parts["ids"]))
            if of_another is None:
                tables[number].load(Copy(**parts))
            else:
                tables[number].begin_with(parts["ids"], parts["rows"], parts["counts"], parts.get("slots"))
        except (LookupError, TypeError, ValueError) as error:
            raise CheckpointDamaged(f"{where}: the tensors of table {number} do not fit: {error}") from error


def _filtered(
    take: Callable[[int], bytearray], dtype: np.dtype[Any], shape: tuple[int, ...], mine: np.ndarray
) -> np.ndarray:
    """The rows of a tensor that are on this server, read piece by piece."""
    width = int(np.prod(shape[1:], dtype=np.int64))
    found = np.empty((int(mine.sum()), *shape[1:]), dtype)
    at, room = 0, max(1, ROOM // max(1, width * dtype.itemsize))
    for start in range(0, shape[0], room):
        count = min(room, shape[0] - start)
        piece = np.frombuffer(take(count * width * dtype.itemsize), dtype).reshape(count, *shape[1:])
        piece = piece[mine[start : start + count]]
        found[at : at + len(piece)] = piece
        at += len(piece)
    return found


def _checked_about(text: bytes, where: str, tables: Sequence[Table]) -> Mapping[str, Any]:
    try:
        about: Mapping[str, Any] = json.loads(text)
        theirs = [(table["name"], table["dim"], table["optimizer"]) for table in about["tables"]]
    except (ValueError, LookupError, TypeError) as error:
        raise CheckpointDamaged(f"{where}: it does not say which tables it has: {error}") from error
    ours = [(table.name, table.dim) for table in tables]
    if [(name, dim) for name, dim, _ in theirs] != ours:
        raise CheckpointError(
            f"{where}: it has the tables {[t[:2] for t in theirs]} (name, dim), and the model has {ours}"
        )
    return about
