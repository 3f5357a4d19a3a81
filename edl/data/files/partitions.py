# SPDX-License-Identifier: Apache-2.0
"""Directories whose names or logs say something about the records that their files do not.

A Hive directory has values in names of folders (`label=1/`). The directory of a table in Delta Lake, Hudi or
Iceberg has a log, which says which files belong to the table. Files alone would be other data, so the readers
refuse both.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from edl.data.files.addresses import Addresses, File, is_glob, local_path
from edl.errors import DataError
from edl.object_store import client, speaking

_FOLDER = re.compile(r"([^=/]+)=[^/]*/")
_LOGS = {"_delta_log": "Delta Lake", ".hoodie": "Hudi", "metadata/version-hint.text": "Iceberg"}


def refuse_partitions(
    addresses: Addresses,
    files: Sequence[File],
    names: Collection[str],
    columns: Callable[[], Collection[str]],
) -> None:
    """Refuse directories whose files are not all of the data.

    Args:
        files: the files at the addresses.
        names: the columns that the user names; empty: all.
        columns: returns the columns in the first file.

    Raises:
        DataError: a column that is wanted is a part of the files' paths, or the files are those of a table
            with a log.
    """
    for root in _directories(addresses, files):
        for log, name in _LOGS.items():
            if _exists(f"{root}{log}"):
                raise DataError(
                    f"{root}: is a table of {name}, whose log says which files belong to it: give the list "
                    "of these files, or write the records of the table to other files"
                )
        for file in files:
            below = file.name.removeprefix(root) if file.name.startswith(root) else ""
            for column in _FOLDER.findall(below):
                if (not names or column in names) and column not in columns():
                    others = "" if names else "; or leave it out by naming the columns that are wanted"
                    raise DataError(
                        f"{file.name}: column {column!r} is in the name of a folder and not in the file, "
                        f"which edl does not read; write the column into the files{others}"
                    )


def _directories(addresses: Addresses, files: Sequence[File]) -> Iterator[str]:
    """The directories that are searched, without a pattern, each with a slash at its end."""
    known = {file.name for file in files}
    for address in [addresses] if isinstance(addresses, str | os.PathLike) else addresses:
        name = local_path(os.fspath(address))
        if is_glob(name) and not Path(name).exists():
            yield name[: 1 + re.split(r"[*?[]", name)[0].rfind("/")]
        elif name not in known:
            yield f"{name.rstrip('/')}/"


def _exists(name: str) -> bool:
    if "://" not in name:
        return Path(name).exists()
    with contextlib.suppress(OSError), speaking():  # an account may be allowed to read these files only
        found, path = client(name)
        return bool(found.exists(path))
    return False
