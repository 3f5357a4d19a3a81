# SPDX-License-Identifier: Apache-2.0
"""Sends the results of a run to the volume of the master: the trained model, its exports, the history.

A worker of a release without an output volume saves them in its own pod, which is deleted with the job. So
before it reports a file, it sends all files that have changed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from edl.checkpoints import Store
from edl.checkpoints.place import replace, troubles
from edl.checkpoints.tensors import PIECE
from edl.errors import CheckpointError, StoreUnavailable
from edl.trainer.session.state import Session

PLACE = "EDL_RESULTS"  # in the environment: the address that results are sent to; empty: they stay
AGAIN_SECONDS = 1.0


class SentResults:
    """The files of a folder, and their copies on the master's volume.

    Args:
        folder: the run's results.
        url: the address of the copies.
    """

    def __init__(self, folder: Path, url: str, session: Session):
        self._folder, self._session = folder, session
        self._place, self._sent = Store.open(url).place, dict[Path, tuple[int, int]]()

    def send(self) -> None:
        """Send the files that have changed, and remove the copies of those that are gone.

        While the master is away, this waits for it. Another failure is reported to users: the job's state is
        not affected.
        """
        while not self._session.ended:
            try:
                with troubles(self._place, "keep the trained model"):
                    self._update()
                return
            except StoreUnavailable:
                time.sleep(AGAIN_SECONDS)  # the next master is not announced to this thread
            except CheckpointError as error:
                self._session.warn(f"{error}; the model is in this worker's pod only, and is lost with it")
                return

    def _update(self) -> None:
        found = {path: _version(path) for path in self._files(self._folder)}
        for path, version in found.items():
            if self._sent.get(path) != version:
                self._at(path, self._replace)
                self._sent[path] = version
        for path in self._sent.keys() - found.keys():
            self._at(path, lambda _, directory, name: self._place.remove(directory, [name]))
            del self._sent[path]

    def _files(self, folder: Path) -> Iterator[Path]:
        for path in sorted(folder.iterdir()):
            if path.name.startswith("."):  # unfinished, or a lock
                continue
            if path.is_dir():
                yield from self._files(path)
            elif path.is_file():
                yield path

    def _at(self, path: Path, act: Callable[[Path, str, str], object]) -> None:
        within = path.relative_to(self._folder)
        act(path, str(within.parent), within.name)

    def _replace(self, path: Path, directory: str, name: str) -> None:
        with open(path, "rb") as file:
            pieces = (memoryview(data) for data in iter(partial(file.read, PIECE), b""))
            replace(self._place, directory, name, pieces)


def _version(path: Path) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_mtime_ns, found.st_size
