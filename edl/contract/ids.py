"""The names by which the sides of a job speak of things. An id is never reused."""

from __future__ import annotations

from typing import NewType

WorkerId = NewType("WorkerId", int)
"""A worker's number, from 0 up in order of birth. A replacement is a new worker with the next number."""

Generation = NewType("Generation", int)
"""A ring's number, from 1 up; 0 is "no ring yet"."""

RunId = NewType("RunId", str)
"""One job from its first record to its last; every message carries it."""
