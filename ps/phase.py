# SPDX-License-Identifier: Apache-2.0
"""The phases of a server: whether it has the rows of a job, and whether it is quiesced.

Both update modes have the same phases, but only mode=ps quiesces a server: there, `StartGeneration` stops the
steps of earlier rings, and `Assign` resumes them. In mode=hybrid, the number of the step refuses late calls.

A fetch of rows for another shard assignment has a table of its own (`edl.ps.reshard.reshard`).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from edl.contract.state_tables import Table
from edl.ps.errors import Misplaced


class Phase(StrEnum):
    """Whether a server has the rows of a job, and accepts steps."""

    EMPTY = "empty"
    SERVING = "serving"
    EMPTY_QUIESCED = "empty and quiesced"
    QUIESCED = "quiesced"

    @property
    def has_rows(self) -> bool:
        """Whether the server holds the state of a job."""
        return self is SERVING or self is QUIESCED

    @property
    def is_quiesced(self) -> bool:
        """Whether the server accepts no steps until `Assign`."""
        return self is QUIESCED or self is EMPTY_QUIESCED

    def after(self, event: str) -> Phase:
        """Return the phase after an event of its table."""
        return PHASES.after(self, event)

    def check_can(self, act: str) -> None:
        """Check that a server in this phase can do what a call requests.

        Raises:
            Misplaced: it cannot.
        """
        if self not in ALLOWED_IN[act]:
            expected = " or ".join(ALLOWED_IN[act])
            raise Misplaced(f"cannot {act}: the server is {self}, expected {expected}: {_ABOUT[self]}")


EMPTY, SERVING, EMPTY_QUIESCED, QUIESCED = Phase

PHASES = Table(
    "a parameter server",
    EMPTY,
    {
        # The first rows of a job, with the first step in mode=hybrid.
        (EMPTY, "begin"): SERVING,
        (EMPTY_QUIESCED, "begin"): QUIESCED,
        # The rows of a checkpoint.
        (EMPTY, "restore"): SERVING,
        (SERVING, "restore"): SERVING,
        (EMPTY_QUIESCED, "restore"): QUIESCED,
        (QUIESCED, "restore"): QUIESCED,
        # Rows fetched from other servers. Also a server that began at step 0 gets those of step 0.
        (EMPTY, "join"): SERVING,
        (SERVING, "join"): SERVING,
        (EMPTY_QUIESCED, "join"): SERVING,
        # The rows are damaged, outdated, or on other servers.
        (EMPTY, "lose"): EMPTY,
        (SERVING, "lose"): EMPTY,
        (EMPTY_QUIESCED, "lose"): EMPTY_QUIESCED,
        (QUIESCED, "lose"): EMPTY_QUIESCED,
        # mode=ps: `StartGeneration` and `Assign`.
        (EMPTY, "quiesce"): EMPTY_QUIESCED,
        (SERVING, "quiesce"): QUIESCED,
        (EMPTY_QUIESCED, "quiesce"): EMPTY_QUIESCED,
        (QUIESCED, "quiesce"): QUIESCED,
        (EMPTY, "resume"): EMPTY,
        (SERVING, "resume"): SERVING,
        (EMPTY_QUIESCED, "resume"): EMPTY,
        (QUIESCED, "resume"): SERVING,
    },
)

ALLOWED_IN: Mapping[str, tuple[Phase, ...]] = {
    "read rows": (SERVING, QUIESCED),  # Pull, List, WritePart
    "accept a step": (SERVING,),  # Push
    # mode=ps:
    "lease steps": (SERVING,),
    "drain": (SERVING, QUIESCED),
    "apply waiting steps": (SERVING,),  # Drain, if steps wait
    "reschedule steps": (SERVING, QUIESCED),
    "keep the workers' state": (SERVING, QUIESCED),
    "fetch rows": (EMPTY_QUIESCED, QUIESCED),
    "send rows": (QUIESCED,),  # Page
}
"""The phases in which a server does what a call requests. The calls that change the phase are accepted in all
phases, and so are those that only report the state."""

_ABOUT = {
    EMPTY: "it has no rows yet, because it is new or has lost its log",
    SERVING: "rows move only after `StartGeneration`",
    EMPTY_QUIESCED: "it has no rows yet, and gets some after `Assign`",
    QUIESCED: "it accepts steps again after `Assign`",
}
