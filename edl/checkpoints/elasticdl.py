# SPDX-License-Identifier: Apache-2.0
"""The files of a checkpoint of ElasticDL: `version-V/variables-I-of-N.ckpt`, one for each of N servers."""

from __future__ import annotations

import re
from pathlib import Path

from edl.errors import CheckpointError

_FILE = re.compile(r"variables-([0-9]{1,6})-of-([0-9]{1,6})\.ckpt")
_VERSION = re.compile(r"version-([0-9]{1,18})")


def files_in(where: str) -> list[Path]:
    """Return the files of the newest complete checkpoint of ElasticDL in a directory, or of that directory.

    Returns:
        The files by the index of their server; empty if `where` holds nothing of ElasticDL.

    Raises:
        CheckpointError: files are missing, or the directory cannot be read.
    """
    if not where or "://" in where:
        return []
    folder = Path(where)
    try:
        if not folder.is_dir():
            return []
        versions = [
            (int(match[1]), path) for path in folder.iterdir() if (match := _VERSION.fullmatch(path.name))
        ]
        folders = [folder, *(path for _, path in sorted(versions, reverse=True))]
        stored = [found for path in folders if (found := _stored(path))]
    except OSError as error:
        raise CheckpointError(f"{where}: {error.strerror}") from error
    for files, total in stored:
        if sorted(files) == list(range(total)):
            return [files[index] for index in range(total)]
    if stored:
        files, total = stored[0]
        missing = [f"variables-{i}-of-{total}.ckpt" for i in range(total) if i not in files]
        raise CheckpointError(f"{where}: incomplete checkpoint of ElasticDL: {missing[0]} is missing")
    return []


def _stored(folder: Path) -> tuple[dict[int, Path], int] | None:
    """The files in a folder by their index, and how many there should be; None without such files."""
    found = {path: match for path in folder.iterdir() if (match := _FILE.fullmatch(path.name))}
    if not found:
        return None
    total = max(int(match[2]) for match in found.values())
    return {int(match[1]): path for path, match in found.items() if int(match[2]) == total}, total
