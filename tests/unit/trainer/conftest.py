# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests of workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.jobs.checkpoint_writers import Writer
from tests.support.jobs.workers import ring_of


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[list[Writer]]:
    """Two workers in a ring that holds each all-reduce until the test continues."""
    workers = [Writer(0, tmp_path), Writer(1, tmp_path)]
    ring_of(*workers)
    yield workers
    for w in workers:
        w.ring.free()
        w.stop()
