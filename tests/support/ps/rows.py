# SPDX-License-Identifier: Apache-2.0
"""Read embedding rows from a job's newest checkpoint, without any of the servers' code.

Also check the rows of the model that counts in its rows (tests/models/counting_rows.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import safetensors.numpy

from edl.checkpoints import Store
from edl.checkpoints.checkpoint import Checkpoint
from edl.errors import EdlError
from tests.support.jobs.evidence import saved_weights

SHOWN = 5  # the number of wrong rows named in a message
FACTOR = np.uint64(0x9E3779B97F4A7C15)  # of tests/models/counting_rows.py


def ids_of(records: np.ndarray) -> np.ndarray:
    """The id of each record of the model that counts in rows."""
    with np.errstate(over="ignore"):
        return (records.astype(np.uint64) * FACTOR).astype(np.int64)


def check_rows(directory: Path, records: int, epochs: int, step: int | None = None) -> str:
    """Describe the wrong counts in the rows of a job's newest checkpoint, which must be that of `step`.

    Names the first wrong records, and how often they were counted. Returns "" if every count is right.
    """
    try:
        checkpoint = newest(directory)
        if step is not None and checkpoint.step != step:
            return f"the newest checkpoint is of step {checkpoint.step}, not of {step}"
        ids, rows = rows_of(checkpoint, "counts")
        return difference(ids, rows, records, epochs)
    except (EdlError, AssertionError) as error:
        return str(error) or type(error).__name__


def difference(ids: np.ndarray, rows: np.ndarray, records: int, epochs: int) -> str:
    """Describe the wrong rows; "" if all records were counted `epochs` times and no other rows exist."""
    record_of = dict(zip(ids_of(np.arange(records)).tolist(), range(records), strict=True))
    foreign = [number for number, id in enumerate(ids.tolist()) if id not in record_of]
    counted = np.zeros((records, rows.shape[-1]), np.float32)
    known = np.delete(np.arange(len(ids)), foreign)
    counted[[record_of[id] for id in ids[known].tolist()]] = rows[known]
    off = np.flatnonzero((counted != epochs).any(-1))
    lines = [
        f"record {n} (id {ids_of(off[i : i + 1])[0]}) was counted {_times(counted[n])}, not {epochs} times"
        for i, n in enumerate(off[:SHOWN])
    ]
    lines += [f"id {ids[n]} is no record's, and has the row {rows[n].tolist()}" for n in foreign[:SHOWN]]
    if lines:
        lines.append(f"{len(off):,} of {records:,} records are wrong, {len(foreign):,} rows are of no record")
    return "\n".join(lines)


def saved_rows(model: Path) -> tuple[np.ndarray, np.ndarray]:
    """The rows of a saved model with one table.

    Returns:
        ids: int64 [n].
        rows: float32 [n, dim].
    """
    weights = saved_weights(model)
    [rows] = [w for w in weights if w.ndim == 2]
    [ids] = [w for w in weights if w.ndim == 1 and np.issubdtype(w.dtype, np.integer)]
    return ids, rows


def newest(directory: Path) -> Checkpoint:
    """Find and verify the newest whole checkpoint in this directory."""
    warnings: list[str] = []
    found = Store.open(str(directory)).newest(warnings.append)
    assert found is not None, f"{directory}: there is no whole checkpoint {'; '.join(warnings)}"
    found.verify()
    return found


def rows_of(checkpoint: Checkpoint, table: str) -> tuple[np.ndarray, np.ndarray]:
    """All rows of a table, from all servers.

    Returns:
        ids: int64 [n], in ascending order, without duplicates.
        rows: float32 [n, dim].
    """
    found = [(ids, rows) for name, ids, rows in _tables(checkpoint) if name == table]
    assert found, f"{checkpoint.directory}: no server has a table {table!r}"
    ids, rows = (np.concatenate(columns) for columns in zip(*found, strict=True))
    order = np.argsort(ids)
    ids, rows = ids[order], rows[order]
    twice = ids[1:][ids[1:] == ids[:-1]]
    assert not len(twice), f"{checkpoint.directory}: id {twice[:1]} of table {table!r} is on several servers"
    return ids, rows


def _tables(checkpoint: Checkpoint) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yield the name, ids and rows of each table of each server."""
    servers = checkpoint.manifest.state.get("servers")
    assert servers, f"{checkpoint.directory}: its manifest names no parts of servers"
    assert servers["count"] == len(servers["parts"])
    for name in servers["parts"]:
        with checkpoint.place.open(checkpoint.directory, name) as file:
            tensors = safetensors.numpy.load(file.read())
        about = next(key for key in tensors if key.endswith(".about"))
        server = about.removesuffix(".about")
        for number, table in enumerate(json.loads(tensors[about].tobytes())["tables"]):
            yield table["name"], tensors[f"{server}.{number}.ids"], tensors[f"{server}.{number}.rows"]


def _times(row: np.ndarray) -> str:
    if (row == row[0]).all():
        return f"{row[0]:g} times"
    return f"{row.tolist()} times (half a row)"
