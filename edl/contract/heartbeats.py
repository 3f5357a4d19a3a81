"""Reports about the job's parameter servers in a worker's heartbeats."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Staleness:
    """Staleness of the last steps in mode=ps: the number of updates that their weights had missed."""

    steps: int  # number of steps measured
    median: float
    most: int
    repeated: int  # steps of the job that were pushed again after they were accepted


@dataclass(frozen=True, slots=True)
class ServerWait:
    """A worker's pending call to a parameter server: it has no answer yet, or the answer asks for a retry.

    Args:
        why: error of the last attempt; empty: the first attempt has no answer yet.
    """

    server: int
    call: str
    seconds: float
    why: str = ""
