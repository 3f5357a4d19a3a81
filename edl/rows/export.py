# SPDX-License-Identifier: Apache-2.0
"""Export of rows of parameter servers as Parquet files: all rows, or the changes since an earlier export.

A directory has a file for each table, with the columns `id` (int64) and `values` (float32, a list of the
table's length). Its `mark.json` describes each file, and has the marks from which the next export continues.

Promise: the directory appears complete or not at all. A reader that applies successive exports (and starts
anew if `whole` is true) has each row in the state at the mark of the last export, or in a later state.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from edl.contract.artifacts import write_whole
from edl.errors import ConfigError, EdlError
from edl.rows.client import ATTEMPTS, Client, Pages, RolledBack
from edl.scratch import unfinished

MARK = "mark.json"


@dataclass(frozen=True)
class Exported:
    """One exported table.

    Args:
        rows, nbytes: number of rows in the file, and its size.
        whole: the file has all existing rows; earlier exports are obsolete.
    """

    table: str
    file: str
    rows: int
    nbytes: int
    step: int
    mark: str
    whole: bool


def marks_of(since: Path) -> dict[str, str]:
    """Read the mark of each table in an earlier export.

    Args:
        since: the export's directory, or its file mark.json.

    Raises:
        ConfigError: `since` is not an export.
    """
    path = since / MARK if since.is_dir() else since
    try:
        said = json.loads(path.read_text(encoding="utf-8"))["tables"]
        return {str(name): str(about["mark"]) for name, about in said.items()}
    except OSError as error:
        raise ConfigError(
            f"--since {since}: cannot read {path}: {error.strerror} (expected the directory of an earlier "
            f"export, or its {MARK})"
        ) from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"--since {since}: {path} is not the {MARK} of an earlier export: {error!r}"
        ) from error


def export(
    client: Client, target: Path, names: Sequence[str] = (), since: Path | None = None
) -> tuple[Exported, ...]:
    """Write rows of a job to a directory, which must not exist.

    Args:
        names: names of the tables; empty: all tables.
        since: an earlier export; None: all rows are written. A table that it lacks is written completely.

    Raises:
        ConfigError: an argument is invalid.
        EdlError: a server does not answer, or the directory cannot be written; no files are left then.
    """
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise EdlError(
            "rows are exported with pyarrow, which is not installed: pip install pyarrow"
        ) from error
    if target.exists() or target.is_symlink():
        raise ConfigError(f"{target} already exists; choose another directory")
    marks = marks_of(since) if since is not None else {}
    there = [table.name for table in client.tables()]
    if unknown := [name for name in names if name not in there]:
        raise ConfigError(f"unknown table {unknown[0]!r}: the job has {', '.join(map(repr, there))}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with unfinished(target) as aside:
            aside.mkdir()
            found = tuple(_table(client, aside, name, marks.get(name, "")) for name in names or there)
            _keep(aside / MARK, found)
    except OSError as error:
        raise EdlError(f"{target}: cannot write: {error.strerror or error}") from error
    return found


def _table(client: Client, directory: Path, name: str, mark: str) -> Exported:
    path = directory / f"{quote(name, safe=' ')}.parquet"
    for _ in range(ATTEMPTS):
        pages = client.pages(name, mark)
        try:
            rows = _write(path, pages)
        except RolledBack:
            continue
        return Exported(name, path.name, rows, path.stat().st_size, pages.step, pages.mark, pages.whole)
    raise EdlError(f"table {name!r}: the servers rolled back {ATTEMPTS} times while it was read: try again")


def _write(path: Path, pages: Pages) -> int:
    """Write the pages to a file, and return the number of rows."""
    import pyarrow as pa
    from pyarrow import parquet

    kind = pa.list_(pa.float32(), pages.dim)
    schema = pa.schema([("id", pa.int64()), ("values", kind)])
    count = 0
    with open(path, "wb") as file:
        with parquet.ParquetWriter(file, schema) as writer:
            for ids, rows in pages:
                values: Any = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), type=kind)
                writer.write_table(pa.Table.from_arrays([pa.array(ids), values], schema=schema))
                count += len(ids)
        file.flush()
        os.fsync(file.fileno())
    return count


def _keep(path: Path, found: Sequence[Exported]) -> None:
    said = {
        each.table: {
            "file": each.file,
            "rows": each.rows,
            "step": each.step,
            "whole": each.whole,
            "mark": each.mark,
        }
        for each in found
    }
    write_whole(path, json.dumps({"tables": said}, indent=2) + "\n")
