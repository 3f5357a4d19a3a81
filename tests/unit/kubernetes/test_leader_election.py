# SPDX-License-Identifier: Apache-2.0
"""When a master that stands by takes the Lease, and why."""

from __future__ import annotations

import pytest

from edl.kubernetes.timing import Timing
from edl.master.backends.kubernetes.leader_election import Rival, why_take
from edl.master.backends.kubernetes.masters import Whereabouts

PACE = Timing()
HERE, LEAVING, GONE = Whereabouts


def test_the_old_one_is_silent_before_the_next_one_can_act() -> None:
    assert PACE.renew < PACE.fresh < PACE.stale


@pytest.mark.parametrize(
    ("rival", "why"),
    [
        (Rival("", GONE), "no master acts"),
        (Rival("a_1", GONE), "a_1 is gone"),
        (Rival("a_1", LEAVING, leaving_for=PACE.handover), "a_1 is being deleted"),
        (
            Rival("a_1", HERE, silent_for=PACE.stale, lost_by=(2, 5)),
            "a_1 has not renewed the Lease for 4.0 s, and was lost by worker 2, 5",
        ),
    ],
)
def test_the_lease_is_taken(rival: Rival, why: str) -> None:
    assert why_take(rival, PACE) == why


@pytest.mark.parametrize(
    "rival",
    [
        Rival("a_1", HERE),
        Rival("a_1", HERE, silent_for=3600.0),  # only it is cut off from the API, and trains on
        Rival("a_1", HERE, silent_for=PACE.stale - 0.1, lost_by=(1, 2, 3)),  # only they are cut off from it
        Rival("a_1", LEAVING, leaving_for=PACE.handover - 0.1),  # it is about to give it back
    ],
)
def test_the_lease_is_left_to_its_holder(rival: Rival) -> None:
    assert why_take(rival, PACE) == ""
