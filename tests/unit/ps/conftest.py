# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests of parameter servers and their clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.ps.client_jobs import Job


@pytest.fixture
def make() -> Iterator[Callable[..., Job]]:
    """Create jobs of a client and its servers, which are ended after the test."""
    jobs: list[Job] = []

    def one(*of: Any) -> Job:
        jobs.append(Job(*of))
        return jobs[-1]

    yield one
    for job in jobs:
        job.end()


@pytest.fixture
def begun(make: Callable[..., Job]) -> Callable[..., Job]:
    """Create jobs that have begun."""

    def one(*of: Any) -> Job:
        (job := make(*of)).begin()
        return job

    return one
