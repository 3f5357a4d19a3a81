# SPDX-License-Identifier: Apache-2.0
"""Reports in a worker's heartbeats: what it waits for or computes, its parameter servers, its GPU."""

from __future__ import annotations

from dataclasses import dataclass

WAITS = "waits for"  # the beginning of what a member does that waits


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


@dataclass(frozen=True, slots=True)
class Activity:
    """What a member does that its ring waits for, such as `waits for records: read(0, 64)`.

    Args:
        seconds: since it began.
    """

    what: str
    seconds: float

    @property
    def awaits(self) -> bool:
        """Whether the member waits, and does not run code of the user's."""
        return self.what.startswith(WAITS)


@dataclass(frozen=True)
class Gpu:
    """A worker's GPU, with what all its users take.

    Args:
        memory: bytes in use.
        memory_limit: bytes that it has.
        busy: share of the last moment in which it computed.
    """

    name: str
    memory: int
    memory_limit: int
    busy: float


@dataclass(frozen=True)
class Usage:
    """What a worker takes of its machine, which goes whole from the worker to the status.

    Args:
        memory: bytes resident.
        gpu: None: it has none, or its use is unknown.
    """

    memory: int = 0
    gpu: Gpu | None = None


@dataclass(frozen=True, kw_only=True)
class WorkerRow(Usage):
    """A worker in the status of its job, as `edl status` shows it; in a cluster, with the node of its pod.

    Args:
        handle: its process or its pod; empty: none yet.
        rank: None outside the ring.
        delay: why it is pending.
        step, rate: of its last heartbeat in the present ring.
    """

    id: int
    handle: str = ""
    rank: int | None = None
    state: str = ""
    delay: str = ""
    step: int = 0
    rate: float = 0.0
