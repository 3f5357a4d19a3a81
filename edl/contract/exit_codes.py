# SPDX-License-Identifier: Apache-2.0
"""Exit codes of the processes of a job, for the code that starts these processes and for readers of logs."""

from __future__ import annotations

from enum import IntEnum


class MasterExit(IntEnum):
    """Exit codes of `edl master`."""

    SUCCEEDED = 0
    NOT_SUCCEEDED = 1  # the job failed or was stopped
    NOT_STARTED = 2


class WorkerExit(IntEnum):
    """Exit codes of `edl worker`."""

    STOPPED = 0  # on request of the master
    FAILED = 1  # the worker has reported the reason
    LOST = 3  # the master is unreachable or has given this worker up
    UNAUTHENTICATED = 4  # the master has stopped accepting its token
    USER_CODE = 70  # the user's code has ended the process with a code of ANNOUNCED
    DESCRIPTORS_CLOSED = 71  # the user's code has closed file descriptors of the process
    # EX_TEMPFAIL: its peers broke the ring, and the worker could not leave the collective. Not its own fault.
    PEER_BROKEN = 75


# Codes that are not charged. A process that ends with one is believed only if edl's own code has announced it
# (edl/exit_announcements.py): the user's code may end its process with any code.
ANNOUNCED = frozenset({WorkerExit.LOST, WorkerExit.UNAUTHENTICATED, WorkerExit.PEER_BROKEN})
# Messages for the exit codes that the user's code is responsible for.
BLAME: dict[int, str] = {
    WorkerExit.USER_CODE: "the model's code has ended the process with exit code 3, 4 or 75, "
    "which edl itself uses",
    WorkerExit.DESCRIPTORS_CLOSED: "the model's code has closed file descriptors of its worker "
    "(os.closerange, os.close)",
}
