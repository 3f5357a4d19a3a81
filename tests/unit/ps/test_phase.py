# SPDX-License-Identifier: Apache-2.0
"""The phases of a server, and what it does in each of them."""

from __future__ import annotations

import pytest

from edl.ps.errors import Misplaced
from edl.ps.phase import ALLOWED_IN, PHASES, Phase


def test_only_a_server_with_rows_that_is_not_quiesced_accepts_steps() -> None:
    accepting = [phase for phase in Phase if phase.has_rows and not phase.is_quiesced]
    assert [*ALLOWED_IN["accept a step"]] == accepting == [Phase.SERVING]


def test_events_change_whether_there_are_rows_or_whether_steps_are_accepted_and_only_join_both() -> None:
    for (before, event), after in PHASES.steps.items():
        if event in ("begin", "restore", "join"):
            assert after.has_rows
        elif event == "lose":
            assert not after.has_rows
        else:
            assert after.has_rows == before.has_rows
        quiesced = {"quiesce": True, "resume": False, "join": False}.get(event, before.is_quiesced)
        assert after.is_quiesced == quiesced


@pytest.mark.parametrize(
    ("phase", "act", "why"),
    [
        (Phase.EMPTY, "read rows", "cannot read rows: the server is empty, .* it has no rows yet"),
        (Phase.QUIESCED, "accept a step", "the server is quiesced, expected serving: .* after `Assign`"),
        (Phase.EMPTY_QUIESCED, "send rows", "the server is empty and quiesced, expected quiesced"),
        (Phase.SERVING, "fetch rows", "expected empty and quiesced or quiesced: .* after `StartGeneration`"),
    ],
)
def test_a_refusal_names_the_phase_and_the_expected_ones(phase: Phase, act: str, why: str) -> None:
    with pytest.raises(Misplaced, match=why):
        phase.check_can(act)
