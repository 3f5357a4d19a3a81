# SPDX-License-Identifier: Apache-2.0
"""Jobs of any mode: a `Job` is given the `Work` that belongs to its mode."""

from __future__ import annotations

from edl import integrations
from edl.config import Config
from edl.master.core.job import Job
from edl.master.core.work import RECORDS, Work


def work_of(config: Config) -> Work:
    """Return what the workers of a job do.

    Raises:
        EdlError: this installation lacks what the job's mode needs.
    """
    target = integrations.WORK.get(config.mode)
    work: Work = RECORDS if target is None else integrations.load(target, f"mode={config.mode}")
    return work


def new_job(config: Config) -> Job:
    """Return a job in its first state."""
    return Job(config, work_of(config))
