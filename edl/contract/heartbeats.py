"""What a worker's heartbeats say of its job's parameter servers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Staleness:
    """How many updates the weights had missed with which the last steps were made (mode=ps)."""

    steps: int  # so many they are
    median: float
    most: int
    repeated: int  # steps of the job that came again after they were taken


@dataclass(frozen=True, slots=True)
class ServerWait:
    """A worker's call to a parameter server has no answer, or one that has the worker try again.

    Args:
        why: what the last attempt failed with; empty: it has no answer yet.
    """

    server: int
    call: str
    seconds: float
    why: str = ""
