# SPDX-License-Identifier: Apache-2.0
"""The parameter servers as the master knows them, and the state table of their rows.

    settled -> due -> moving -> settled

The root of a ring moves the rows: in mode=ps at a later step boundary, else while the ring is formed. Between
a ring that is formed for a different number of servers and the report of that number, any of them may have
rows, even if the ring breaks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from edl.contract.state_tables import Table


class RowsState(StrEnum):
    """The state of the rows on parameter servers."""

    STARTING = "starting"  # the first servers start; no ring is formed before they listen
    SETTLED = "settled"  # no servers are needed except those with rows
    DUE = "due"  # a different number of servers listens, for which the next ring is formed
    MOVING = "moving"  # the ring was formed for a different number, and may move the rows


STARTING, SETTLED, DUE, MOVING = RowsState

ROWS = Table(
    "rows",
    SETTLED,
    {
        (SETTLED, "decide"): STARTING,
        (STARTING, "request"): MOVING,  # the first ring is formed for them; an earlier master's knows them
        (SETTLED, "request"): DUE,
        (DUE, "request"): DUE,
        (MOVING, "request"): DUE,
        (SETTLED, "form"): SETTLED,
        (DUE, "form"): MOVING,
        (MOVING, "form"): MOVING,
        # A ring of an earlier master may move the rows to any number of servers.
        (STARTING, "learn"): STARTING,
        (SETTLED, "learn"): MOVING,
        (DUE, "learn"): DUE,
        (MOVING, "learn"): MOVING,
        (SETTLED, "settle"): SETTLED,
        (DUE, "settle"): SETTLED,
        (MOVING, "settle"): SETTLED,
    },
)


@dataclass(slots=True)
class ServerRecord:
    """A parameter server, as its watch, its probes and the ring report it, independently of each other."""

    away: str = ""  # starting, restarting, not answering; empty: it can be called
    away_since: float = 0.0
    silent_since: float | None = None  # its process has answered no Probe since, or was restarted then
    answered_at: float = 0.0  # when it last recovered
    out: bool = False  # the ring works without it

    def leave(self, away: str, since: float) -> None:
        """Record that it cannot be called."""
        self.away, self.away_since = away, since

    def hang(self, since: float | None) -> None:
        """Record since when it has answered no Probe; None: it has no process that could."""
        self.silent_since = since

    def recover(self, now: float) -> None:
        """Record that it can be called again."""
        self.away, self.silent_since, self.answered_at = "", None, now


@dataclass(slots=True)
class Servers:
    """The requested parameter servers, those with rows, and those that do not answer."""

    state: RowsState = ROWS.first
    wanted: int = 0  # requested number; 0: the number that the workers know
    have: int = 0  # number with rows; 0: not reported yet
    addresses: tuple[str, ...] = ()  # of both
    stay: str = ""  # why the last move failed; empty: it did not
    lost: bool = False  # rows of the trained, unsaved model are lost: a ring rolls back with the servers
    known: dict[int, ServerRecord] = field(default_factory=dict)  # by index, those that were reported
    waited: tuple[int, ...] = ()  # servers that were reported to users as awaited
    waited_since: float = 0.0

    def __getitem__(self, index: int) -> ServerRecord:
        return self.known.setdefault(index, ServerRecord())

    @property
    def released_from(self) -> int:
        """Servers from this index on are released; 0: unknown."""
        return self.wanted if self.state is SETTLED else 0

    @property
    def out(self) -> tuple[int, ...]:
        """The servers that the ring works without."""
        return tuple(sorted(index for index, server in self.known.items() if server.out))

    def step(self, event: str) -> None:
        """Change the state of the rows, by an event of its table."""
        self.state = ROWS.after(self.state, event)

    def request(self, wanted: int, addresses: tuple[str, ...]) -> None:
        """Request rows on `wanted` servers, which listen."""
        self.wanted, self.addresses, self.stay = wanted, addresses, ""
        if self.state is SETTLED and wanted == self.have:
            self.settle(wanted)
        else:
            self.step("request")

    def form(self) -> None:
        """Record that a ring is formed for the requested servers."""
        self.step("form")
        self.lost = False

    def settle(self, count: int, stay: str = "") -> None:
        """Record that the rows are on `count` servers, and why they stay there; release the others."""
        self.step("settle")
        self.wanted, self.addresses, self.stay = count, self.addresses[:count], stay
        self.known = {index: server for index, server in self.known.items() if index < count}
        self.waited = tuple(index for index in self.waited if index < count)

    def hold(self, count: int, out: tuple[int, ...]) -> None:
        """Record the servers with rows, and those of them that the ring works without."""
        self.have = count
        for index in {*self.known, *out}:
            self[index].out = index in out

    def lose_rows(self) -> None:
        """Record that rows of the model that is to be saved are lost."""
        self.lost = True

    def wait(self, waited: tuple[int, ...]) -> None:
        """Record which servers the ring waits for."""
        if not self.waited:
            self.waited_since = min((self[index].away_since for index in waited), default=0.0)
        self.waited = waited
