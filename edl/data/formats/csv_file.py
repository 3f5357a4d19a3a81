# SPDX-License-Identifier: Apache-2.0
"""CSV files.

pyarrow reads them. Values that pyarrow would change silently are detected afterwards: whole numbers that a
float rounds, and digits that lose their leading zeros. Line numbers are only determined for messages.

Files of up to `IN_MEMORY` bytes together are read into memory. Of larger ones, an index is built once: where
each 1024th record begins, and the types of the columns. A read then parses the lines that it needs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edl.data.base import Reader
from edl.data.files.addresses import Addresses, find
from edl.data.files.index_file import cached
from edl.data.files.joined import Joined, same_columns, span
from edl.data.files.partitions import refuse_partitions
from edl.data.formats.csv_scan import EVERY, Scan, boundaries
from edl.data.formats.csv_text import ByteRange, CsvFile
from edl.data.formats.csv_together import together
from edl.data.objects.columns import Wanted, for_columns
from edl.data.objects.in_memory import EXACT, Arrays
from edl.data.objects.selected import columns_of, with_roles
from edl.data.place import in_files
from edl.errors import DataError

SUFFIXES = (".csv", ".tsv", ".csv.gz", ".tsv.gz", ".csv.zst", ".tsv.zst", ".csv.bz2")
IN_MEMORY = 256 << 20  # bytes of all files together
PART = 8 << 20  # bytes of a larger file that are scanned at once


def csv(
    path: Addresses,
    names: Sequence[str] = (),
    delimiter: str = ",",
    dtype: Any = None,
    fill: Any = None,
    encoding: str = "utf-8",
    header: bool = True,
    *,
    features: Sequence[str] | str | None = None,
    label: str | None = None,
    weight: str | None = None,
) -> Reader:
    """A reader over CSV files.

    Records are a dict of columns, or (features, labels[, weights]) if `features`, `label` or `weight` name
    columns. The type of a column is inferred from all of its values: int64, uint64 for larger ones, float64,
    bool, a time or text. Values are kept exactly; if no type does that, the column is refused by name.

    Args:
        path: a file, a list of files, a glob, a directory, or an address such as s3://bucket/folder. All
            files must have the same columns.
        names: the columns to keep; all by default. If the files have no header, the names of all columns.
        dtype: NumPy types by column, `{"zip": str, "user": "uint64"}`, or one for all features.
        fill: replacement for missing values: by column, `{"age": -1}`, or one for all columns. Without it,
            columns must be complete.
        encoding: Python's name of the text's encoding.
        header: whether the first line of each file has the names of the columns. Without a header and
            without `names`, the columns are "f0", "f1" and so on.
        features, label, weight: the columns' roles, as in `dataset`.

    Raises:
        DataError: a file is missing, changes, or one of its lines cannot be read; a column is missing or
            duplicated, a value is missing, or a value cannot be kept exactly.
    """
    found = find(path, SUFFIXES, "csv")
    files = [CsvFile(file, delimiter, encoding, None if header else tuple(names)) for file in found]
    columns = files[0].columns
    source = files[0].name
    chosen = columns_of(features, label, weight)
    named = (list(names) if header and names else []) or chosen
    refuse_partitions(path, found, named, lambda: columns)
    if header and "" in columns and not named:
        raise DataError(
            f"{source}: column {columns.index('') + 1} of the header has no name, as where pandas has "
            "written row numbers; write the file with to_csv(index=False), or name the columns that are "
            "wanted"
        )
    kept = named or columns
    wanted = Wanted(source, for_columns(dtype, kept, besides=(label, weight)), for_columns(fill, kept))
    wanted.refuse_missing(columns, kept)  # before `fill` and `dtype`, which may be for all of these
    wanted.refuse_missing(columns, list(names) if header else [])
    columns_of_all = _Columns(kept, wanted)
    is_small = sum(file.size for file in found) <= IN_MEMORY
    records: Reader | None = columns_of_all.together(files) if is_small else None
    if records is None:
        for other in files[1:]:
            same_columns(dict.fromkeys(columns), dict.fromkeys(other.columns), other.name, source)
        records = columns_of_all.in_memory(files) if is_small else columns_of_all.by_range(files)
    return with_roles(records, features, label, weight, source)


@dataclass(frozen=True)
class _Columns:
    """The columns to read from each file, and the user's requirements on them."""

    kept: list[str]
    wanted: Wanted

    @property
    def given(self) -> dict[str, Any]:
        return {name: self.wanted.arrow_type(name) for name in self.kept if name in self.wanted.types}

    def together(self, files: Sequence[CsvFile]) -> Arrays | None:
        """Parse many small files at once; None if they must be parsed one by one, also to name a mistake."""
        found = together(files)
        if found is None:
            return None
        whole, counts = found
        part = whole.whole()
        try:
            table = part.read(self.kept, self.given)
            arrays = self.arrays(part, self.types([self.kinds(part, table)]), table)
        except DataError:
            return None
        if table.num_rows != sum(counts):  # some lines are empty
            return None
        records = Arrays(arrays, source=whole.name)
        records.place = in_files([file.name for file in files], counts)
        return records

    def in_memory(self, files: Sequence[CsvFile]) -> Arrays:
        parts = [file.whole() for file in files]
        tables = [part.read(self.kept, self.given) for part in parts]
        types = self.types([self.kinds(part, table) for part, table in zip(parts, tables, strict=True)])
        found = [self.arrays(part, types, table) for part, table in zip(parts, tables, strict=True)]
        whole = {name: np.concatenate([columns[name] for columns in found]) for name in self.kept}
        records = Arrays(found[0] if len(found) == 1 else whole, source=files[0].name)
        records.place = in_files([file.name for file in files], [table.num_rows for table in tables])
        return records

    def by_range(self, files: Sequence[CsvFile]) -> Joined:
        scans = [self._scanned(file) for file in files]
        types = self.types([scan.kinds for scan in scans])

        def read(nth: int, start: int, stop: int) -> dict[str, np.ndarray]:
            first, begin, end = scans[nth].range_of(start, stop)
            part = files[nth].part(begin, end, first, span(start, stop))
            columns = self.arrays(part, types)
            return {name: array[start - first : stop - first] for name, array in columns.items()}

        counts, names = [scan.records for scan in scans], [file.name for file in files]
        return Joined(counts, read, names=names)

    def kinds(self, part: ByteRange, table: Any) -> dict[str, list[Any]]:
        """The type of each column in this part, as text, and its least value if that may matter."""
        import pyarrow
        import pyarrow.compute as pc

        given, found = self.given, {}
        for name in self.kept:
            kind, least = table[name].type, 0
            if name not in given:
                part.refuse_bytes(name, table[name])
                if pyarrow.types.is_time(kind):
                    kind = pyarrow.string()
                elif kind == pyarrow.int64():
                    least = pc.min(table[name]).as_py() or 0
                elif kind == pyarrow.float64() and _is_large(table[name]):
                    kind = part.type_of_large(name, table[name])
            found[name] = [str(kind), least]
        return found

    def types(self, kinds: Sequence[Mapping[str, Sequence[Any]]]) -> dict[str, Any]:
        """The pyarrow types of all columns that keep the values of all parts."""
        found = dict(self.given)
        for name in [name for name in self.kept if name not in found]:
            known = list({tuple(part[name]) for part in kinds})
            kind = known[0]
            for other in known[1:]:
                kind = _common(kind, other)
            found[name] = _type(kind[0])
        return found

    def arrays(self, part: ByteRange, types: Mapping[str, Any], known: Any = None) -> dict[str, np.ndarray]:
        """The columns of a part with these types.

        Args:
            known: the part as a table, whose columns are used if they have these types.

        Raises:
            DataError: a value is missing, cannot be read as this type, or would change.
        """
        import pyarrow

        given = {name: kind for name, kind in types.items() if not pyarrow.types.is_null(kind)}
        table = part.read(self.kept, given, known)
        free = [name for name in self.kept if name not in self.given]
        part.refuse_changed({name: table[name] for name in free}, _is_large)
        part.refuse_overflow({name: table[name] for name in self.given})
        arrays = {}
        for name in self.kept:
            if name not in self.wanted.fill:
                part.refuse_empty(name, table[name])
            arrays[name] = self.wanted.array(name, table[name], part.place(name))
        return arrays

    def _scanned(self, file: CsvFile) -> Scan:
        options = [file.delimiter, file.encoding, file.names, self.kept, sorted(map(str, self.given.items()))]

        def build() -> bytes:
            return _scan(file, self)

        return Scan.parse(bytes(cached(file.file, json.dumps(["csv", 1, *options]), build)))


def _scan(file: CsvFile, columns: _Columns) -> bytes:
    """Find where records begin, and the types of the columns.

    Raises:
        DataError: the file cannot be read from anywhere, or its lines are not its records.
    """
    file.refuse_unless_splittable()
    places: list[int] = []
    kinds: list[Mapping[str, Sequence[Any]]] = []
    count, is_first = 0, file.names is None
    for begin, starts in boundaries(file, PART):
        if is_first:  # the header
            starts, is_first = starts[1:], False
        if not len(starts) - 1:
            continue
        part = file.part(int(starts[0]), int(starts[-1]), count, "")
        table = part.read(columns.kept, columns.given)
        if table.num_rows != len(starts) - 1:
            raise DataError(
                f"{file.name}: bytes {begin} to {int(starts[-1])}: pyarrow finds {table.num_rows} records, "
                f"and {len(starts) - 1} lines end there; a line must end with \\n or \\r\\n"
            )
        kinds.append(columns.kinds(part, table))
        places += starts[:-1][-count % EVERY :: EVERY].tolist()
        count, end = count + table.num_rows, int(starts[-1])
    merged = {name: [str(kind), 0] for name, kind in columns.types(kinds).items()} if kinds else {}
    for name in merged:
        merged[name][1] = min(part[name][1] for part in kinds)
    return Scan(count, [*places, end if count else 0], merged).text()


def _is_large(column: Any) -> bool:
    """Whether a number of the column is beyond the whole numbers that a float64 has."""
    import pyarrow.compute as pc

    return bool((pc.max(pc.abs(column)).as_py() or 0) >= EXACT)


def _type(name: str) -> Any:
    import pyarrow

    if name.startswith("timestamp["):
        unit, _, zone = name.removeprefix("timestamp[").rstrip("]").partition(", tz=")
        return pyarrow.timestamp(unit, zone or None)
    if name == "date32[day]":
        return pyarrow.date32()
    return pyarrow.type_for_alias(name)


def _common(one: Sequence[Any], other: Sequence[Any]) -> tuple[str, Any]:
    """A type that keeps the values of both, and their least value."""
    kinds, least = {one[0], other[0]}, min(one[1], other[1])
    for kind in (one[0], other[0]):
        if kinds <= {kind, "null"}:
            return kind, least
    if kinds == {"int64", "uint64"}:
        return ("uint64" if least >= 0 else "double"), least  # a float is refused if it rounds a value
    if kinds <= {"int64", "uint64", "double"}:
        return "double", least
    times = [kind for kind in kinds if kind.startswith(("timestamp[", "date32"))]
    if len(times) == len(kinds) and not any("tz=" in kind for kind in kinds):
        return max(times, key=["date32[day]", "timestamp[s]", "timestamp[ns]"].index), least
    return "string", least
