"""The exit codes of the processes of a job, for those who start them and for those who read them."""

from __future__ import annotations

from enum import IntEnum


class MasterExit(IntEnum):
    """How `edl master` ends."""

    SUCCEEDED = 0
    NOT_SUCCEEDED = 1  # the job failed or was stopped
    NOT_STARTED = 2


class WorkerExit(IntEnum):
    """How `edl worker` ends."""

    STOPPED = 0  # as the master asked
    FAILED = 1  # and it has reported why
    LOST = 3  # the master is unreachable or has given this worker up
    UNAUTHENTICATED = 4  # the master does not know its token any more
    # EX_TEMPFAIL: its peers broke the ring and it could not get out of the collective. Not its own fault.
    PEER_BROKEN = 75
