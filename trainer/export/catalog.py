# SPDX-License-Identifier: Apache-2.0
"""The list of exported files, beside them: after a copy it shows whether all files have arrived."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path

from edl.contract import artifacts
from edl.contract.exports import Export, File, dumps
from edl.trainer.export.formats import files_of


def write(output: Path, exports: Mapping[str, Path], verified: Collection[str]) -> bytes:
    """Write the list and return its SHA-256.

    Args:
        exports: by the names of their formats.
        verified: which of them were loaded again, and are as the model was.

    Raises:
        OSError: there is no room for it.
    """
    text = dumps(
        Export(
            name,
            place(output, path),
            name in verified,
            {_name(path, f): _described(f) for f in files_of(path)},
        )
        for name, path in exports.items()
    )
    artifacts.write_whole(output / artifacts.EXPORTS, text)
    return hashlib.sha256(text.encode()).digest()


def place(output: Path | None, path: Path) -> str:
    """The place of an export: its name in the output directory, or its full path elsewhere."""
    return path.name if path.parent == output else str(path)


def _name(path: Path, file: Path) -> str:
    return path.name if file == path else f"{path.name}/{file.relative_to(path)}"


def _described(file: Path) -> File:
    with open(file, "rb") as opened:
        return File(file.stat().st_size, hashlib.file_digest(opened, "sha256").hexdigest())
