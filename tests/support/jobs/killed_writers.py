# SPDX-License-Identifier: Apache-2.0
"""Kill masters while they begin a journal segment: `killed_writers.py DIR SEGMENT_BYTES`.

Each file operation of a journal has its own process, which is killed (SIGKILL) right before that operation,
with its own directory DIR/1, DIR/2, ... The last process lives to the end. Prints the number of processes.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from tests.support.jobs.month import Month, journal

TOUCHES = {"open", "os.link", "os.rename", "os.remove"}


def main(directory: Path, full_at: int) -> int:
    for number in range(1, 10**6):
        output = directory / str(number)
        output.mkdir()
        if (child := os.fork()) == 0:
            _write(output, full_at, killed_at=number)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status == 0:
            print(number)
            return 0
        assert os.WTERMSIG(status) == signal.SIGKILL, status
    return 1


def _write(output: Path, full_at: int, killed_at: int) -> None:
    touched = 0

    def touches(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal touched
        if event in TOUCHES and str(output) in str(arguments[0]):
            touched += 1
            if touched == killed_at:
                os.kill(os.getpid(), signal.SIGKILL)

    lived = Month(workers=2, changes=20)
    sys.addaudithook(touches)
    kept = journal(lived, output, full_at)
    lived.hear = kept.write
    for act in (lived.begin, *[lived.change] * 10):  # the month is not finished
        act()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
