# SPDX-License-Identifier: Apache-2.0
"""The files of a checkpoint of ElasticDL: `version-V/variables-I-of-N.ckpt`, one for each of N servers.

They are in a directory, or in an object store to which they were copied.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from edl.checkpoints.place import Place, troubles
from edl.checkpoints.store import Store
from edl.checkpoints.tensors import PIECE
from edl.errors import CheckpointDamaged, CheckpointError

_PREFIX = "variables-"
_FILE = re.compile(rf"{_PREFIX}([0-9]{{1,6}})-of-([0-9]{{1,6}})\.ckpt")
_VERSION = re.compile(r"version-([0-9]{1,18})")


@dataclass(frozen=True)
class ServerFile:
    """The file of one server.

    Args:
        directory: its directory in `place`; "" if `place` itself holds the files.
        nbytes: its size when it was found.
    """

    place: Place
    directory: str
    name: str
    nbytes: int

    def __str__(self) -> str:
        return "/".join(filter(None, (self.place.where, self.directory, self.name)))

    def read(self) -> bytes:
        """Read the file.

        Raises:
            CheckpointDamaged: it is empty, or ends before its size.
            CheckpointError: it cannot be read.
        """
        data = bytearray()
        with (
            troubles(self.place, f"read {self.name} of {self.directory or 'this directory'}"),
            self.place.open(self.directory, self.name) as file,
        ):
            while piece := file.read(PIECE):
                data += piece
        if not data or len(data) != self.nbytes:
            raise CheckpointDamaged(f"{self}: truncated: {len(data)} of {self.nbytes} bytes")
        return bytes(data)


def files_in(where: str) -> list[ServerFile]:
    """Return the files of the newest complete checkpoint of ElasticDL in a directory, or of that directory.

    Args:
        where: a path or an address, as for `Store.open`.

    Returns:
        The files by the index of their server; empty if `where` holds nothing of ElasticDL.

    Raises:
        CheckpointError: files are missing, or the directory cannot be read.
    """
    place = Store.open(where).place
    with troubles(place, "look for a checkpoint of ElasticDL"):
        directories = {"": place.sizes("", _PREFIX)}
        directories |= place.all("version-", lambda name: _VERSION.fullmatch(name) is not None)
    newest = sorted(directories, key=lambda name: int(name.partition("-")[2] or 10**18), reverse=True)
    stored = [found for name in newest if (found := _stored(place, name, directories[name]))]
    for files, total in stored:
        if sorted(files) == list(range(total)):
            return [files[index] for index in range(total)]
    if stored:
        files, total = stored[0]
        missing = [f"{_PREFIX}{i}-of-{total}.ckpt" for i in range(total) if i not in files]
        raise CheckpointError(f"{where}: incomplete checkpoint of ElasticDL: {missing[0]} is missing")
    return []


def _stored(
    place: Place, directory: str, sizes: Mapping[str, int]
) -> tuple[dict[int, ServerFile], int] | None:
    """The files in a directory by their index, and how many there should be; None without such files."""
    found = [(name, match) for name in sizes if (match := _FILE.fullmatch(name))]
    if not found:
        return None
    total = max(int(match[2]) for _, match in found)
    return {
        int(match[1]): ServerFile(place, directory, name, sizes[name])
        for name, match in found
        if int(match[2]) == total
    }, total
