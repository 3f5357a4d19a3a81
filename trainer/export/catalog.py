"""The list of exported files, beside them: after a copy it shows whether all files have arrived."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path

from edl.contract import artifacts
from edl.trainer.export.formats import files_of


def write(output: Path, exports: Mapping[str, Path], verified: Collection[str]) -> bytes:
    """Write the list and return its SHA-256.

    Args:
        exports: by the names of their formats.
        verified: which of them were loaded again, and are as the model was.

    Raises:
        OSError: there is no room for it.
    """
    listed = [
        {
            "format": name,
            "path": place(output, path),
            "verified": name in verified,
            "files": {_name(path, file): _described(file) for file in files_of(path)},
        }
        for name, path in exports.items()
    ]
    text = json.dumps({"exports": listed}, indent=1) + "\n"
    artifacts.write_whole(output / artifacts.EXPORTS, text)
    return hashlib.sha256(text.encode()).digest()


def place(output: Path | None, path: Path) -> str:
    """The place of an export: its name in the output directory, or its full path elsewhere."""
    return path.name if path.parent == output else str(path)


def _name(path: Path, file: Path) -> str:
    return path.name if file == path else f"{path.name}/{file.relative_to(path)}"


def _described(file: Path) -> dict[str, object]:
    with open(file, "rb") as opened:
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(opened, "sha256").hexdigest()}
