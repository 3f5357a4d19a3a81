# SPDX-License-Identifier: Apache-2.0
"""Stop a process for some seconds: `python pause.py PIDFD SECONDS`, for `edl chaos`.

The process goes on in any case: this one handles no signal of a terminal, and sends SIGCONT at once when its
standard input ends, that is, when the command that has started it ends or is killed.
"""

from __future__ import annotations

import contextlib
import select
import signal
import sys


def main() -> None:
    """Send SIGSTOP, and SIGCONT after the time or at the end of standard input."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    process, seconds = int(sys.argv[1]), float(sys.argv[2])
    with contextlib.suppress(ProcessLookupError):  # it was killed meanwhile
        try:
            signal.pidfd_send_signal(process, signal.SIGSTOP)
            select.select([sys.stdin], [], [], seconds)
        finally:
            signal.pidfd_send_signal(process, signal.SIGCONT)


if __name__ == "__main__":
    main()
