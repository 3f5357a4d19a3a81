# SPDX-License-Identifier: Apache-2.0
"""Kill processes while they write checkpoints: `killed_checkpoints.py DIR SEED TIMES`.

Each checkpoint has its own process, which is killed (SIGKILL) at a random moment while it writes, commits and
prunes. Afterwards the newest checkpoint must be the previous one or the new one, and whole. Prints the number
of checkpoints that were completed nevertheless.
"""

from __future__ import annotations

import os
import random
import select
import signal
import sys
import time
from pathlib import Path

from edl.checkpoints import Store
from tests.support.checkpoints.checkpoints import equal, of_size, unexpected, write

NBYTES = 1 << 20


def main(directory: Path, seed: int, times: int) -> int:
    chance, store = random.Random(seed), Store.open(str(directory))
    began = time.monotonic()
    _write(store, 1)
    seconds, last, completed = time.monotonic() - began, 1, 0
    for step in range(2, times + 2):
        if (child := os.fork()) == 0:
            _write(store, step)
            os._exit(0)
        ended = os.pidfd_open(child)
        select.select([ended], [], [], chance.uniform(0, 1.5 * seconds))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ended)
        found = store.load_newest(unexpected)
        assert found is not None and found.checkpoint.step in (last, step), (found, last, step)
        assert equal(found.tensors, of_size(NBYTES, found.checkpoint.step)), found
        completed += found.checkpoint.step == step
        last = found.checkpoint.step
    _write(store, times + 2)
    left = [checkpoint.step for checkpoint in [*store.unfinished(), *store.checkpoints()]]
    assert left == sorted([last, times + 2]), left  # the remains of killed processes are pruned
    print(completed)
    return 0


def _write(store: Store, step: int) -> None:
    write(store, step, tensors=of_size(NBYTES, step))
    store.prune(2)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
