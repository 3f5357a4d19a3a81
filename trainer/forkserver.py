# SPDX-License-Identifier: Apache-2.0
"""Start workers by fork from a process that has imported TensorFlow and run nothing.

Reads one JSON line per worker from stdin: {"worker", "arguments", "log"}, with "environment" if that of the
worker differs from this process's. Writes {"worker", "pid"} when it runs and {"worker", "code"} when it has
ended (negative: a signal). Importing starts no TensorFlow thread; a thread would not survive the fork. When
stdin ends, the master is gone, and so is the forkserver.

What a worker leaves behind becomes this process's child (it is a subreaper), and is killed with its worker's
end, also a process that has a session of its own.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import sys
from pathlib import Path
from typing import Any, NamedTuple

from edl.exit_announcements import Announcement, announce_to
from edl.full_disk import log_file
from edl.trainer import __main__ as worker_main
from edl.trainer.runtime.termination import become_subreaper, end_children
from edl.trainer.start.preimport import import_all


def main() -> None:
    """Fork workers as standard input orders, and report on standard output when they end."""
    import_all()
    become_subreaper()
    woken, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker)
    children: dict[int, Child] = {}
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin, selectors.EVENT_READ)
    selector.register(woken, selectors.EVENT_READ)
    pending = b""
    while True:
        for key, _ in selector.select():
            if key.fileobj is woken:
                os.read(woken, 4096)
                _reap(children)
                continue
            data = os.read(sys.stdin.fileno(), 65536)
            if not data:
                return
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                order, announcement = json.loads(line), Announcement()
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    announce_to(announcement.write)
                    _become(order)
                announcement.started()
                children[pid] = Child(order["worker"], announcement)
                _say({"worker": order["worker"], "pid": pid})


def _become(order: dict[str, Any]) -> None:
    """Become the worker, in the child. Never returns."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    log = log_file(Path(order["log"]))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if (environment := order.get("environment")) is not None:
        os.environ.clear()
        os.environ.update(environment)
    code = 1
    try:
        code = worker_main.main(order["arguments"])
    finally:
        os._exit(code)


class Child(NamedTuple):
    """A worker's process."""

    worker: int
    announcement: Announcement


def _reap(children: dict[int, Child]) -> None:
    """Report workers that have ended, after what they have left behind was killed."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        if (child := children.pop(pid, None)) is None:
            continue  # it was left behind by a worker
        end_children(except_for=children)
        code = child.announcement.believed(os.waitstatus_to_exitcode(status))
        _say({"worker": child.worker, "code": code})


def _say(what: dict[str, int]) -> None:
    os.write(1, (json.dumps(what) + "\n").encode())


if __name__ == "__main__":
    main()
