# SPDX-License-Identifier: Apache-2.0
"""Ids that the processes of a job share. An id is never reused."""

from __future__ import annotations

from typing import NewType

WorkerId = NewType("WorkerId", int)
"""A worker's number, from 0 in order of creation. A replacement is a new worker with the next number."""

Generation = NewType("Generation", int)
"""A ring's number, counted from 1; 0 means "no ring yet"."""

RunId = NewType("RunId", str)
"""The id of one attempt at a job, from its first record to its last; every message carries it."""
