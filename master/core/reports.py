# SPDX-License-Identifier: Apache-2.0
"""Reports for users, which change no decision: failing subsystems, warnings, the history of the metrics."""

from __future__ import annotations

from edl.contract.reasons import Reason
from edl.master.core import events as ev
from edl.master.core.state import State
from edl.master.core.workers import WorkerRecord


def degraded(job: State, event: ev.Degraded) -> None:
    """Report a part that does not work, or that works again."""
    if not job.notes.degrade(event.part, event.why):
        return
    if event.why:
        job.notice(Reason.Degraded, f"{event.part}: {event.why}")
    else:
        job.notice(Reason.Recovered, f"{event.part} works again")


def warned(job: State, _w: WorkerRecord, event: ev.Warned) -> None:
    """Report a warning of a worker, once."""
    if job.notes.warn(event.text):
        job.notice(Reason.ModelWarning, event.text)


def warm_started(job: State, _w: WorkerRecord, event: ev.WarmStarted) -> None:
    """Report that the job begins with the state of a different training, once."""
    if job.notes.begin_with(event.text):
        job.notice(Reason.WarmStarted, event.text)


def history(job: State, _w: WorkerRecord, event: ev.History) -> None:
    """Record the metrics of all epochs."""
    job.result.history = event.epochs
