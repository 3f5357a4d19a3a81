"""Masters that are killed while they begin a segment: `killed_writers.py DIR SEGMENT_BYTES`.

One process for each time that a journal touches a file by name: it is killed (SIGKILL) right before that,
in a directory of its own, DIR/1, DIR/2, ... The last one lives to the end. Prints how many there were.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from tests.month import Month, journal

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
    for act in (lived.begin, *[lived.change] * 10):  # and does not end
        act()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
