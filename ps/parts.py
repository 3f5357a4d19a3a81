"""A server's part of a checkpoint: all rows of all tables, as tensors of one file.

The manifest names the files of all servers, under `state["servers"]`: {"parts": [names], "count": n}. A
server
reads the files of all of them and takes the rows whose buckets are its own: so another number of servers can
go on.

`ps.I.about` (JSON) says of which step and which server it is, and what the tables are. For table T:
`ps.I.T.ids`, `.steps` (the last one that had the id), `.counts` (of steps that had it), `.rows`, `.slots`
(what the optimizer keeps), and `.seen` (ids that are not learned yet: id, last step, count).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, BinaryIO, cast

import numpy as np

from edl.checkpoints import Store, Tensor
from edl.checkpoints.manifest import Manifest
from edl.contract.proto import ps_pb2 as pb
from edl.errors import CheckpointDamaged, CheckpointError
from ps.table import Copy, Table

ROOM = 8 << 20  # bytes that are read at once
NOTHING: Mapping[str, Any] = MappingProxyType({})
_DTYPES = {"I64": "<i8", "F32": "<f4", "U8": "u1"}

Mine = Callable[[np.ndarray], np.ndarray]  # which of some ids are this server's, bool [n]
Room = Callable[[Table, int], None]  # raises, if there is none for so many rows more


def tensors(
    index: int,
    step: int,
    servers: int,
    tables: Iterable[pb.Table],
    copies: Sequence[Copy],
    more: Mapping[str, Any] = NOTHING,
) -> dict[str, Tensor]:
    """
    Args:
        more: is said in `about`, too.
    """
    about = {
        "step": step, "server": index, "servers": servers,
        "tables": [_about(table) for table in tables], **more,
    }  # fmt: skip
    text = np.frombuffer(json.dumps(about).encode(), np.uint8)
    found = {f"ps.{index}.about": Tensor.of(text)}
    for number, copy in enumerate(copies):
        for name in ("ids", "steps", "counts", "rows", "slots", "seen"):
            found[f"ps.{index}.{number}.{name}"] = Tensor.of(getattr(copy, name))
    return found


def rows(names: Iterable[str]) -> frozenset[str]:
    """Those of the tensors that must be finite."""
    return frozenset(name for name in names if name.endswith(".rows"))


def _about(table: pb.Table) -> dict[str, Any]:
    return {
        "name": table.name,
        "dim": table.dim,
        "optimizer": table.optimizer,
        "initializer": table.initializer,
    }


def read_checkpoint(
    url: str, step: int, attempt: str, tables: Sequence[Table], mine: Mine, room: Room,
    alone: tuple[int, int] | None = None,
) -> list[Mapping[str, Any]]:  # fmt: skip
    """Fill tables that are empty with this server's rows of a checkpoint; returns what its parts say of
    themselves.

    Args:
        alone: a server, and of how many: if the checkpoint is of so many, only its own part is read.

    Raises:
        CheckpointError: it is not there, not whole, or of other tables.
    """
    store = Store.open(url)
    found = next((c for c in store.checkpoints() if (c.step, c.attempt) == (step, attempt)), None)
    if found is None:
        raise CheckpointError(f"{url}: the checkpoint of step {step}, attempt {attempt!r}, is not there")
    manifest = found.manifest
    names = _names(manifest, found.directory)
    known = {part.name: part for part in manifest.parts}
    said: list[Mapping[str, Any]] = []
    only = alone[0] if alone is not None and len(names) == alone[1] else None
    for name in names:
        part = known.get(name)
        with found.place.open(found.directory, name) as file:
            digest = read(file, f"{found.directory}: {name}", tables, mine, room, said.append, only)
        if digest and part is not None and digest != part.sha256:
            raise CheckpointDamaged(f"{found.directory}: {name}: its SHA-256 is not the one in the manifest")
    return said


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
    file: BinaryIO, where: str, tables: Sequence[Table], mine: Mine, room: Room,
    said: Callable[[Mapping[str, Any]], object] = id, only: int | None = None,
) -> str:  # fmt: skip
    """Take this server's rows from a file; returns its SHA-256.

    Args:
        said: takes what the file says of itself.
        only: a server; of another one's file nothing is read, and nothing returned.

    Raises:
        CheckpointError: it is not such a file, or of other tables.
    """
    digest = hashlib.sha256()

    def take(size: int) -> bytearray:
        room = bytearray(size)
        filled = 0
        while filled < size:
            count = cast(int, file.readinto(memoryview(room)[filled:]))  # type: ignore[attr-defined]
            if not count:
                raise CheckpointDamaged(f"{where}: it ends before its last tensor")
            filled += count
        digest.update(room)
        return room

    try:
        entries = json.loads(bytes(take(int.from_bytes(take(8), "little"))))
        entries.pop("__metadata__", None)
        in_order = sorted(entries.items(), key=lambda item: cast(int, item[1]["data_offsets"][0]))
    except (ValueError, LookupError, TypeError, AttributeError, MemoryError) as error:
        raise CheckpointDamaged(f"{where}: not a file of tensors: {error}") from error
    if only is not None and f"ps.{only}.about" not in entries:
        return ""
    begun: dict[int, dict[str, np.ndarray]] = {}
    taken: dict[int, np.ndarray] = {}
    for name, entry in in_order:
        try:
            dtype, shape = np.dtype(_DTYPES[entry["dtype"]]), tuple(entry["shape"])
            start, stop = entry["data_offsets"]
            *_, number, what = name.split(".")
        except (LookupError, ValueError, TypeError) as error:
            raise CheckpointDamaged(f"{where}: tensor {name!r} is not one of a parameter server") from error
        if stop - start != int(np.prod(shape, dtype=np.int64)) * dtype.itemsize:
            raise CheckpointDamaged(f"{where}: tensor {name!r} has {stop - start} bytes for {list(shape)}")
        if what == "about":
            said(_checked_about(bytes(take(stop - start)), where, tables))
            continue
        table = int(number)
        if what == "ids":
            ids = np.frombuffer(take(stop - start), dtype)
            taken[table] = mine(ids)
            if table < len(tables):
                room(tables[table], int(taken[table].sum()))
            begun.setdefault(table, {})["ids"] = ids[taken[table]]
        elif what == "seen":
            seen = np.frombuffer(take(stop - start), dtype).reshape(shape)
            begun.setdefault(table, {})["seen"] = seen[mine(np.ascontiguousarray(seen[:, 0]))]
        else:
            begun[table][what] = _filtered(take, dtype, shape, taken[table])
    if file.read(1):
        raise CheckpointDamaged(f"{where}: something follows its last tensor")
    for number, parts in begun.items():
        try:
            room(tables[number], len(parts["ids"]))
            tables[number].load(Copy(**parts))
        except (LookupError, TypeError, ValueError) as error:
            raise CheckpointDamaged(f"{where}: the tensors of table {number} do not fit: {error}") from error
    return digest.hexdigest()


def _filtered(
    take: Callable[[int], bytearray], dtype: np.dtype[Any], shape: tuple[int, ...], mine: np.ndarray
) -> np.ndarray:
    """The rows of a tensor that are this server's, read in pieces."""
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
