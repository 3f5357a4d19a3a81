# SPDX-License-Identifier: Apache-2.0
"""A reader for any address, by a format's name or by the names of its files.

`formats` registers the formats here, so that a reader whose files name other files can open those.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from edl.data.base import Reader
from edl.data.files.addresses import Addresses, ends_with, find
from edl.errors import DataError


@dataclass(frozen=True)
class Format:
    """A format of files.

    Args:
        name: its name in `data.format`, which is that of its reader: `edl.NAME`.
        reader: returns a reader, given the address and options.
        suffixes: endings of its files, in lower case.
    """

    name: str
    reader: Callable[..., Reader]
    suffixes: tuple[str, ...]

    @property
    def options(self) -> list[str]:
        """The names of the reader's options."""
        return list(inspect.signature(self.reader).parameters)[1:]


FORMATS: dict[str, Format] = {}  # by name
# Formats that NumPy reads in a few lines: their endings, and what data(split) returns instead.
RECIPES = {
    "npz": ((".npz",), "arrays = np.load(path); return arrays['x'], arrays['y']"),
    "idx": (
        ("ubyte", ".idx", "ubyte.gz", ".idx.gz"),
        "return np.frombuffer(data, np.uint8, offset=16).reshape(-1, 28, 28)",
    ),
    "criteo": ((), "return edl.csv(path, names, '\\t', header=False)"),
}


def recipe(name: str) -> str:
    """What to write instead of a reader that edl does not have."""
    return f"edl has no reader {name}; write in data(split): {RECIPES[name][1]} (docs/data.md#more-formats)"


def open_files(address: Addresses, format: str | None = None, **options: Any) -> Reader:
    """A reader over the files at an address.

    Args:
        address: a file, a list of files, a glob, a directory, or an address such as s3://bucket/folder.
        format: the name of a format, such as "csv"; None: the names of the files say it.
        options: options of this format's reader, such as `features` and `label`.

    Raises:
        DataError: the format is unknown or lacks an option, or the files cannot be read.
    """
    chosen = FORMATS.get(format or "")
    if format in RECIPES:
        raise DataError(f"{_named(address)}: {recipe(format)}")
    if format is not None and chosen is None:
        raise DataError(f"{_named(address)}: unknown format {format!r} (expected {', '.join(FORMATS)})")
    chosen = chosen or format_of(address)
    for option in options:
        if option not in chosen.options:
            raise DataError(
                f"{_named(address)}: {chosen.name} has no option {option!r}; it has "
                + ", ".join(chosen.options)
            )
    return chosen.reader(address, **options)


def format_of(address: Addresses) -> Format:
    """The format of the files at an address, by their names.

    Raises:
        DataError: no format has files of these names, or the files have different formats.
    """
    names = [file.name for file in find(address)]
    found = {name: _by_suffix(name) for name in names}
    kinds = {kind.name: kind for kind in found.values() if kind is not None}
    if len(kinds) == 1 and None not in found.values():
        return next(iter(kinds.values()))
    if len(kinds) > 1:
        raise DataError(
            f"{_named(address)}: has files of the formats {' and '.join(sorted(kinds))}; name one of them "
            "with format, or some of the files with a glob"
        )
    other = next(name for name, kind in found.items() if kind is None)
    for name, (suffixes, _) in RECIPES.items():
        if ends_with(other, suffixes):
            raise DataError(f"{other}: {recipe(name)}")
    raise DataError(
        f"{_named(address)}: the name of {other} does not say its format; give format (expected "
        f"{', '.join(FORMATS)})"
    )


def _by_suffix(name: str) -> Format | None:
    ends = [
        (len(suffix), format)
        for format in FORMATS.values()
        for suffix in format.suffixes
        if ends_with(name, (suffix,))
    ]
    return max(ends, key=lambda end: end[0])[1] if ends else None


def _named(address: Addresses) -> str:
    if isinstance(address, Sequence) and not isinstance(address, str):
        return ", ".join(map(str, address[:3])) + (", ..." if len(address) > 3 else "")
    return os.fspath(address)
