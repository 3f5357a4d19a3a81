# SPDX-License-Identifier: Apache-2.0
"""Which ends are charged, and how long replacements are put off: `edl.master.core.failures` by itself."""

from __future__ import annotations

from typing import Any

import pytest

from edl.contract.exit_codes import WorkerExit
from edl.contract.ids import WorkerId
from edl.contract.phases import WorkerState
from edl.master.core.events import Gone
from edl.master.core.failures import LONGEST_PAUSE_SECONDS, RestartBackoff, cause_unknown, own_fault
from edl.master.core.workers import WorkerRecord

ID = WorkerId(1)


def a_lost_worker(**known: Any) -> WorkerRecord:
    return WorkerRecord(ID, since=0, state=WorkerState.GONE, **known)


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
        (
            Gone(ID, signal="SIGABRT", why="its log ends with: LLVM ERROR"),
            "worker 1 crashed (SIGABRT): its log ends with: LLVM ERROR",
        ),
        (Gone(ID, signal="SIGKILL"), ""),
        (Gone(ID, signal="SIGTERM"), ""),
        (Gone(ID, code=75, free=True), ""),
        (Gone(ID, code=3), ""),  # it had no master any more
        (
            Gone(ID, code=WorkerExit.USER_CODE),
            "worker 1 exited unexpectedly with exit code 70: the model's code has ended the process with "
            "exit code 3, 4 or 75, which edl itself uses",
        ),
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


LIMIT = "Evicted: Pod ephemeral local storage usage exceeds the total limit of containers 1Gi."


@pytest.mark.parametrize(
    "known", [{}, {"stopped": True}, {"expected": True}, {"in_broken_ring": True}], ids=str
)
@pytest.mark.parametrize("code", [0, 137, WorkerExit.STOPPED, WorkerExit.PEER_BROKEN])
def test_a_limit_of_the_pod_is_charged_however_the_worker_ended(known: dict[str, Any], code: int) -> None:
    said = f"worker 1 exceeded a limit of its pod: {LIMIT}"
    assert own_fault(a_lost_worker(**known), Gone(ID, code=code, limit=LIMIT)) == said


def test_a_limit_is_charged_once_to_a_worker_that_reported_its_failure() -> None:
    w = a_lost_worker(failure_reason="OSError: no space left")
    assert own_fault(w, Gone(ID, code=1, limit=LIMIT)) == ""


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


def test_the_longest_pause_before_a_replacement_is_the_one_that_counts() -> None:
    backoff = RestartBackoff()
    for kill in range(4):
        backoff.was_killed(now=10.0 * kill)
    killed = backoff.until, "workers were lost 4 times in a row before the ring made a step"
    assert (backoff.until, backoff.why) == killed == (34.0, killed[1])
    backoff.died_early(now=31.0)
    assert (backoff.until, backoff.why) == killed
    backoff.lacked_gpu_memory(now=33.5, step=0)
    assert (backoff.until, backoff.why) == (34.5, "a worker found too little free memory on a GPU")


def test_rings_that_break_before_their_first_step_wait_longer_each_time() -> None:
    backoff = RestartBackoff()
    assert [backoff.ring_broke(now=10.0 * n) for n in range(5)] == [1, 2, 3, 4, 5]
    assert backoff.ring_until == 40.0 + 25.0
    backoff.stepped()
    assert (backoff.ring_broke(now=100.0), backoff.ring_until) == (1, 101.0)


def test_gpus_without_memory_are_counted_until_the_job_makes_a_step() -> None:
    backoff = RestartBackoff()
    assert [backoff.lacked_gpu_memory(now=0.0, step=0) for _ in range(3)] == [1, 1, 1], "at one time"
    assert [backoff.lacked_gpu_memory(now=10.0 * n, step=0) for n in (1, 2, 3)] == [2, 3, 4]
    assert backoff.until == 38.0, "each pause is twice as long"
    assert backoff.lacked_gpu_memory(now=31.0, step=7) == 1
    assert backoff.lacked_gpu_memory(now=90.0, step=7) == 2


@pytest.mark.parametrize(
    ("known", "gone", "so"),
    [
        ({}, Gone(ID, signal="SIGKILL"), True),
        ({}, Gone(ID, code=75, free=True), True),
        ({}, Gone(ID, signal="SIGKILL", free=True, why="the master deleted its pod"), False),
        ({}, Gone(ID, free=True, why="PreemptionByScheduler"), False),
        ({}, Gone(ID, code=1), False),
        ({"stopped": True}, Gone(ID, signal="SIGKILL"), False),
        ({"failure_reason": "no heartbeat"}, Gone(ID, signal="SIGKILL"), False),
    ],
    ids=str,
)
def test_killed_from_outside_is_told_from_what_the_backend_can_explain(
    known: dict[str, Any], gone: Gone, so: bool
) -> None:
    assert cause_unknown(a_lost_worker(**known), gone) == so


def test_those_who_are_killed_at_one_time_count_as_one_and_a_step_makes_them_forgotten() -> None:
    backoff = RestartBackoff()
    assert [backoff.was_killed(now=0.0) for _ in range(300)] == [1] + 299 * [0]
    assert backoff.until == 0.0, "the first are replaced at once"
    assert backoff.was_killed(now=5.0) == 2
    assert backoff.until == 6.0
    assert backoff.was_killed(now=10.0) == 3
    backoff.stepped()
    assert backoff.was_killed(now=20.0) == 1
