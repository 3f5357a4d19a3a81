# SPDX-License-Identifier: Apache-2.0
"""How long a worker is waited for: `edl.master.core.timeouts`, without a job."""

from __future__ import annotations

import pytest

from edl import config
from edl.config import values
from edl.contract.ids import WorkerId
from edl.contract.phases import WorkerState
from edl.master.core import timeouts
from edl.master.core.timeouts import Timeouts
from edl.master.core.workers import Pool, WorkerRecord

ELASTIC = config.parse(
    values.merge(values.defaults(), {"elastic": {"startupTimeoutSeconds": 60, "heartbeatTimeoutSeconds": 4}})
).elastic


@pytest.mark.parametrize(
    ("state", "ends"),
    [
        ("pending", None),
        ("starting", 70),
        ("initializing", 70),
        ("ready", None),
        ("member", None),
        ("draining", None),
    ],
)
def test_a_worker_is_waited_for_as_its_state_allows(state: str, ends: float | None) -> None:
    assert timeouts.ends(WorkerRecord(WorkerId(0), since=10, state=WorkerState(state)), ELASTIC) == ends


def test_one_that_was_told_to_end_has_its_grace_and_no_more() -> None:
    w = WorkerRecord(WorkerId(0), since=10, state=WorkerState.DRAINING, kill_at=15)
    assert timeouts.ends(w, ELASTIC) == 15


def test_they_pass_in_order_each_once_and_what_no_longer_holds_is_dropped() -> None:
    pool = Pool()
    all_of_them = Timeouts(pool, ELASTIC)
    early, late, ready, told = (pool.adopt(WorkerId(i), "pod", now) for i, now in enumerate((10, 20, 5, 30)))
    for w in (late, early, ready, told, early):
        all_of_them.watch(w)
    pool.change(ready, "hello")
    pool.change(ready, "ready")
    told.kill_at = 40
    all_of_them.watch(told)
    assert all_of_them.next() == 40
    for now, passes in ((39, []), (40, [told]), (75, [early]), (80, [late])):
        found = []
        for w in all_of_them.passed(now):
            found.append(w)
            pool.lose(w)
        assert found == passes
    assert all_of_them.next() is None


def test_one_that_starts_is_not_blamed_for_what_is_still_to_be_read() -> None:
    pool = Pool()
    all_of_them = Timeouts(pool, ELASTIC)
    starts, told, later = (pool.adopt(WorkerId(i), "pod", now) for i, now in enumerate((0, 1, 30)))
    told.kill_at = 65.5
    for w in (starts, told, later):
        all_of_them.watch(w)
    all_of_them.excuse(65)
    assert all_of_them.next() == told.kill_at, "that is no fault to be excused"
    assert timeouts.ends(starts, ELASTIC) == 66
    assert timeouts.ends(later, ELASTIC) == 90
    assert list(all_of_them.passed(65)) == []
    told.kill_at = 70
    assert all_of_them.next() == 66
