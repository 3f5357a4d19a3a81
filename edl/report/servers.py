# SPDX-License-Identifier: Apache-2.0
"""The parameter servers of a job over time, as far as its journal knows them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

Entry = Mapping[str, Any]


class ServerState(StrEnum):
    """The states of a parameter server in the report."""

    ANSWERS = "answers"
    NOT_ANSWERING = "not answering"
    RESTARTING = "restarting"


@dataclass
class ServerHistory:
    """One parameter server: its states with their times, in seconds since the job began."""

    index: int
    intervals: list[tuple[ServerState, float, float]] = field(default_factory=list)
    state: ServerState | None = None  # None: it does not run yet, or was released
    since: float = 0.0
    exits: int = 0
    why: str = ""  # how its process ended the last time

    def become(self, state: ServerState | None, now: float) -> None:
        """End the present state, unless it is the same."""
        if state is self.state:
            return
        if self.state is not None:
            self.intervals.append((self.state, self.since, now))
        self.state, self.since = state, now

    def until(self, now: float) -> ServerHistory:
        """Return a copy whose open interval is closed at this time."""
        open_one = [] if self.state is None else [(self.state, self.since, now)]
        return replace(self, intervals=[*self.intervals, *open_one])

    @property
    def unavailable(self) -> list[float]:
        """The seconds of each interval in which it could not be called, in order."""
        found: list[float] = []
        last = None
        for state, start, end in self.intervals:
            if state is ServerState.ANSWERS:
                continue
            if found and last == start:  # a server that did not answer was then restarted
                found[-1] += end - start
            else:
                found.append(end - start)
            last = end
        return found


class ServerReading:
    """Builds the servers of a timeline event by event."""

    def __init__(self) -> None:
        self.servers: dict[int, ServerHistory] = {}

    def note(self, event: Entry, now: float) -> None:
        """Read an event. Other events than those of servers are passed over."""
        match event["type"]:
            case "ServerListens" | "ServerRecovered":
                self._server(event["server"]).become(ServerState.ANSWERS, now)
            case "ServersReady":
                self._hold(event["servers"], now)
            case "JoinedRing":
                self._hold(event.get("servers", 0), now)
            case "ServerAway":
                server = self._server(event["server"])
                if server.state is ServerState.ANSWERS:
                    since = max(now - event["seconds"], server.since)
                    server.become(ServerState.NOT_ANSWERING, since)
            case "ServerExited":
                server = self._server(event["server"])
                server.exits, server.why = server.exits + 1, event["why"]
                server.become(ServerState.RESTARTING, now)

    def release(self, count: int, now: float) -> None:
        """Only the first `count` servers are kept."""
        for server in self.servers.values():
            if server.index >= count:
                server.become(None, now)

    def _server(self, index: int) -> ServerHistory:
        return self.servers.setdefault(index, ServerHistory(index))

    def _hold(self, count: int, now: float) -> None:
        """The first `count` servers are in use; one that is known to be away stays so."""
        for index in range(count):
            server = self._server(index)
            if server.state is None:
                server.become(ServerState.ANSWERS, now)
