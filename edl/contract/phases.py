# SPDX-License-Identifier: Apache-2.0
"""Phases of a job and states of a worker: the words of statuses, summaries, labels and metrics."""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class Phase(StrEnum):
    """The phase of a job."""

    Starting = "Starting"
    Training = "Training"
    Suspended = "Suspended"
    Waiting = "Waiting"
    Finishing = "Finishing"
    Ending = "Ending"
    Succeeded = "Succeeded"
    Failed = "Failed"
    Stopped = "Stopped"


ENDED: Final = frozenset({Phase.Succeeded, Phase.Failed, Phase.Stopped})


class WorkerState(StrEnum):
    """The state of a worker; `edl.master.core.workers` has the transitions."""

    PENDING = "pending"  # requested from the backend, not running yet
    STARTING = "starting"  # its process runs
    INITIALIZING = "initializing"  # its stream is open; it imports, builds and traces the model
    READY = "ready"
    MEMBER = "member"  # of the ring
    DRAINING = "draining"
    GONE = "gone"
