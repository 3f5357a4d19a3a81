"""How long a worker is waited for: `master.core.timeouts`, without a job."""

from __future__ import annotations

import pytest

from edl import config
from edl.config import values
from edl.contract.ids import WorkerId
from master.core import timeouts
from master.core.workers import WorkerRecord

ELASTIC = config.parse(
    values.merge(values.defaults(), {"elastic": {"startupTimeoutSeconds": 60, "heartbeatTimeoutSeconds": 4}})
).elastic


@pytest.mark.parametrize(
    ("state", "ends"),
    [
        ("pending", None),
        ("starting", 70),
        ("initializing", 70),
        ("ready", 24),
        ("member", 24),
        ("draining", 24),
    ],
)
def test_a_worker_is_waited_for_as_its_state_allows(state: str, ends: float | None) -> None:
    assert timeouts.ends(WorkerRecord(WorkerId(0), since=10, heard=20, state=state), ELASTIC) == ends


def test_one_that_was_told_to_end_has_its_grace_and_no_more() -> None:
    w = WorkerRecord(WorkerId(0), since=10, heard=20, state="draining", kill_at=15)
    assert timeouts.ends(w, ELASTIC) == 15


def test_nobody_is_blamed_for_silence_while_the_master_did_not_listen() -> None:
    w = WorkerRecord(WorkerId(0), since=0, heard=20, state="member")
    timeouts.excuse_the_unheard([w], listened=20, now=22, elastic=ELASTIC)
    assert w.heard == 20, "half the silence is nothing unusual"
    timeouts.excuse_the_unheard([w], listened=20, now=30, elastic=ELASTIC)
    assert timeouts.ends(w, ELASTIC) == 31
    w.heard = 29.5
    timeouts.excuse_the_unheard([w], listened=20, now=30, elastic=ELASTIC)
    assert w.heard == 29.5, "who was heard later keeps that"


def test_one_that_starts_is_not_blamed_for_what_is_still_to_be_read_either() -> None:
    w = WorkerRecord(WorkerId(0), since=0, heard=0, state="starting")
    timeouts.excuse_the_unheard([w], listened=59, now=65, elastic=ELASTIC)
    assert timeouts.ends(w, ELASTIC) == 66
    timeouts.excuse_the_unheard([w], listened=65, now=66, elastic=ELASTIC)
    assert timeouts.ends(w, ELASTIC) == 66, "it has had its moment"
