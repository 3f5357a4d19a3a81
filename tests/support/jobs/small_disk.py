# SPDX-License-Identifier: Apache-2.0
"""A small file system of its own, which a test can fill without harm to the machine's disk."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path


class SmallDisk:
    """A file system in memory, mounted at a new directory. It takes root.

    Args:
        path: the directory.
        mebibytes: the size.
    """

    def __init__(self, path: Path, mebibytes: int):
        self._path, self._ballast = path, path / "ballast"
        path.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", path], check=True)

    def fill(self) -> None:
        """Write a file until nothing fits any more."""
        with contextlib.suppress(OSError), open(self._ballast, "wb", buffering=0) as file:
            for size in (1 << 16, 1 << 10, 1):
                with contextlib.suppress(OSError):
                    while file.write(b"x" * size):
                        pass

    @property
    def is_full(self) -> bool:
        """Whether nothing fits any more."""
        return os.statvfs(self._path).f_bavail == 0

    def make_room(self) -> None:
        """Remove the file that fills the disk, if it is there."""
        self._ballast.unlink(missing_ok=True)

    def unmount(self) -> None:
        """Remove the file system with all its files."""
        subprocess.run(["umount", self._path], check=True)
