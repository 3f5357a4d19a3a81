"""Who is charged for an end, and how long replacements are put off: `master.core.failures`, without a job."""

from __future__ import annotations

from typing import Any

import pytest

from edl.contract.ids import WorkerId
from master.core.events import Gone
from master.core.failures import LONGEST_PAUSE_SECONDS, RestartBackoff, own_fault
from master.core.workers import WorkerRecord

ID = WorkerId(1)


def a_lost_worker(**known: Any) -> WorkerRecord:
    return WorkerRecord(ID, since=0, heard=0, state="gone", **known)


@pytest.mark.parametrize(
    ("gone", "charge"),
    [
        (Gone(ID, code=0), "worker 1 exited unexpectedly with exit code 0"),
        (
            Gone(ID, code=2, why="no such model"),
            "worker 1 exited unexpectedly with exit code 2: no such model",
        ),
        (Gone(ID, why="its log cannot be written"), "worker 1 failed: its log cannot be written"),
        (Gone(ID, signal="SIGSEGV"), "worker 1 crashed (SIGSEGV)"),
        (Gone(ID, signal="SIGKILL"), ""),
        (Gone(ID, signal="SIGTERM"), ""),
        (Gone(ID, code=75, free=True), ""),
    ],
    ids=str,
)
def test_an_end_is_charged_to_its_cause(gone: Gone, charge: str) -> None:
    assert own_fault(a_lost_worker(), gone) == charge


@pytest.mark.parametrize(
    "known", [{"stopped": True}, {"failure_reason": "ValueError: no"}, {"expected": True}], ids=str
)
def test_nobody_is_charged_for_an_end_that_is_explained_already(known: dict[str, Any]) -> None:
    assert own_fault(a_lost_worker(**known), Gone(ID, code=1)) == ""


def test_a_crash_in_a_ring_that_a_peer_has_broken_is_nobodys_fault_but_an_exit_is() -> None:
    w = a_lost_worker(in_broken_ring=True)
    assert own_fault(w, Gone(ID, signal="SIGABRT")) == ""
    assert own_fault(w, Gone(ID, code=1))


def test_replacements_of_early_deaths_are_put_off_twice_as_long_each_time() -> None:
    backoff = RestartBackoff()
    pauses = []
    for _ in range(1100):
        backoff.died_early(now=0.0)
        pauses.append(backoff.until)
    assert pauses[:4] == [0.5, 1.0, 2.0, 4.0]
    assert pauses[-1] == max(pauses) == LONGEST_PAUSE_SECONDS
    backoff.got_ready()
    backoff.died_early(now=100.0)
    assert backoff.until == 100.5
