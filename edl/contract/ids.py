# SPDX-License-Identifier: Apache-2.0
"""Ids that the processes of a job share. An id is never reused."""

from __future__ import annotations

from typing import NewType

WorkerId = NewType("WorkerId", int)
"""A worker's number, from 0 in order of creation. A replacement is a new worker with the next number."""

Generation = NewType("Generation", int)
"""A ring's number, counted from 1; 0 means "no ring yet"."""

NO_RING = Generation(0)

_ROOTS = 1 << 20


def ring_id(generation: int, root: int) -> int:
    """Return a number that no other ring of the job has.

    A master that finds no member of an earlier ring counts generations from 1 again. But the generations of
    the rings of one worker only rise, so a generation and its root name one ring.

    Args:
        root: the worker whose state the others receive.
    """
    return generation * _ROOTS + root % _ROOTS


RunId = NewType("RunId", str)
"""The id of one attempt at a job, from its first record to its last; every message carries it."""
