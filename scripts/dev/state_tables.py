#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Print docs/state-tables.md for scripts/dev/docs: a picture of each state table, drawn from the table."""

from __future__ import annotations

from collections import defaultdict
from textwrap import fill
from typing import Any

from edl.contract.state_tables import Table
from edl.master.backends.kubernetes.pod_view import POD
from edl.master.core.ring import RING
from edl.master.core.servers import ROWS
from edl.master.core.workers import WORKER
from edl.ps.phase import ALLOWED_IN, PHASES, Phase
from edl.ps.reshard.reshard import FETCHES

HEAD = """# State tables

The state machines of the master and of the parameter servers are tables: the state and an event give the
next state. A transition that a table lacks is an error. `scripts/dev/docs` draws this page from the tables.
Events that leave the state as it is are not drawn.
"""
ALLOWED = (
    "This table is in `ps/phase.py`, too. Calls that change the phase are accepted in all phases, and so "
    "are those that only report the state. With `mode=hybrid` a server is never quiesced: between two "
    "steps of the ring it fetches rows while it is empty or serving, and sends rows while it is serving."
)
TABLES: tuple[tuple[str, str, Table[Any]], ...] = (
    (
        "A worker",
        "The table is in `master/core/workers.py`. States never go backwards: a replacement is a new worker "
        "with the next number.",
        WORKER,
    ),
    (
        "The ring",
        "The table is in `master/core/ring.py`. A ring is left at a step boundary (`change`), or it is cut "
        "(`break`, and `loss` if a member is lost). The next ring is formed once all members have left it. A "
        "new master learns of a ring from its members (`learn`). [How the ring works](ring.md) says what "
        "they do.",
        RING,
    ),
    (
        "The rows on parameter servers",
        "The table is in `master/core/servers.py`. A move begins when a different number of servers listens "
        "(`request`). The next ring is formed for them (`form`), and moves the rows. It ends when the ring "
        "reports where the rows are (`settle`), and the other servers are released then. With `mode=auto`, "
        "the first servers start once the model is known (`decide`). A new master does not know for how many "
        "servers a ring was formed (`learn`).",
        ROWS,
    ),
    (
        "The pod of a worker",
        "The table is in `master/backends/kubernetes/pod_view.py`. `Gone` is emitted when a pod ends, and "
        "never again for this worker. The next worker may continue in the pod of a crashed one (`made`).",
        POD,
    ),
    (
        "A parameter server",
        "The table is in `ps/phase.py`. A server gets the first rows of a job (`begin`), those of a "
        "checkpoint (`restore`), or those of other servers (`join`). It loses them (`lose`) if a "
        "checkpoint cannot be read, if they are outdated, or if other servers have them. With `mode=ps`, "
        "the root of a ring quiesces all servers (`quiesce`), and lets them accept steps again once it "
        "knows where the rows are (`resume`, `join`).",
        PHASES,
    ),
    (
        "A fetch of rows",
        "The table is in `ps/reshard/reshard.py`. A server that gains rows in a new shard assignment fetches "
        "them from other servers, and keeps them beside its tables until it switches to that assignment. It "
        "drops them if a step or a rollback changes the rows before.",
        FETCHES,
    ),
)


def picture(table: Table[Any]) -> str:
    """Draw a table as a state diagram of Mermaid, with one arrow for all events between two states."""
    arrows: dict[tuple[str, str], list[str]] = defaultdict(list)
    for (state, event), after in table.steps.items():
        if state != after:
            arrows[_name(state), _name(after)].append(event)
    states = dict.fromkeys(state for step, after in table.steps.items() for state in (step[0], after))
    lines = ["stateDiagram-v2"]
    lines += [f'  state "{state}" as {_name(state)}' for state in states if _name(state) != state]
    lines.append(f"  [*] --> {_name(table.first)}")
    lines += [f"  {before} --> {after}: {', '.join(events)}" for (before, after), events in arrows.items()]
    lines += [f"  {_name(state)} --> [*]" for state in states if not any(state == s for s, _ in table.steps)]
    return "\n".join(["```mermaid", *lines, "```"])


def allowed() -> str:
    """Draw what a parameter server does in which phase, as a table of Markdown."""
    lines = [f"| | {' | '.join(Phase)} |", "| --- |" + " --- |" * len(Phase)]
    for act, phases in ALLOWED_IN.items():
        lines.append(f"| {act} | {' | '.join('yes' if phase in phases else '' for phase in Phase)} |")
    return "\n".join(lines)


def _name(state: str) -> str:
    return state.replace(" ", "_")


def main() -> None:
    """Print the page."""
    print(HEAD)
    print(
        "\n\n".join(
            f"## {name}\n\n{fill(text, 120, break_on_hyphens=False)}\n\n{picture(table)}"
            for name, text, table in TABLES
        )
    )
    print("\n## What a parameter server does in which phase\n")
    print(fill(ALLOWED, 120, break_on_hyphens=False), allowed(), sep="\n\n")


if __name__ == "__main__":
    main()
