# SPDX-License-Identifier: Apache-2.0
"""The parameter servers of a job as one worker knows them: links, last states, and the assignment of rows.

One operation calls several servers concurrently. `root` has the calls that bring all servers to one state,
and `client` those of all workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self, TypeVar

import numpy as np

from edl.contract.converted import written
from edl.contract.heartbeats import ServerWait
from edl.contract.proto import ps_pb2 as pb
from edl.contract.rows.placement import ShardAssignment
from edl.contract.rows.shares import Shares
from edl.trainer.embedding.interfaces import Commit, Table
from edl.trainer.ps_client.calls import Link, Pending, ReleasedServer, Request, ServerAway
from edl.trainer.ps_client.interrupt import Interrupt
from edl.trainer.ps_client.link import ServerLink
from edl.trainer.ps_client.messages import furthest_of, shares_of, tables_to_proto
from edl.trainer.ps_client.pending import Begun
from edl.trainer.ps_client.recovery import ServerStates
from edl.trainer.ring.base import RingBroken

M = TypeVar("M")  # a message of ps.proto
TIMEOUT_SECONDS = 3.0
RETRY_SECONDS = 0.25  # between two attempts while no server answers
WORKERS = 1 << 20  # a generation is a counter times WORKERS, plus the number of the claiming worker


class ServerGroup:
    """The servers of one job.

    Args:
        links: one per server, by index.
        run_id: the run ID of the job.
        seed: the seed of the job; initial rows depend on it.
        interrupt: cancels the calls of all links.
        replicas: wanted number of servers per row.
        connect: creates the link to a server, by index and address; None if the servers are fixed.
        addresses: host:port of the servers, by index.
        asynchronous: how the servers apply steps in mode=ps; None for synchronous steps (mode=hybrid).
    """

    def __init__(
        self,
        links: Sequence[Link],
        run_id: str,
        seed: int,
        interrupt: Interrupt | None = None,
        replicas: int = 1,
        connect: Callable[[int, str], Link] | None = None,
        addresses: Sequence[str] = (),
        asynchronous: pb.Asynchronous | None = None,
    ):
        self._links, self._run_id, self._seed = list(links), run_id, seed
        self._asynchronous = asynchronous
        self.addresses = tuple(addresses)  # of all known servers, host:port by index
        self.generation = 0  # that all calls of the ring carry
        self.assignment = ShardAssignment(len(links), replicas)  # of rows to servers, as calls use it
        self._wanted = self.assignment
        self._is_said = True  # whether the master has named the number of servers
        self._connect, self._interrupt = connect, interrupt or Interrupt()
        self._tables: tuple[Table, ...] = ()
        self._last: Callable[[], Commit | None] = lambda: None
        self._claims_for = 0  # the worker that acts as the root
        self._claims_above = 0  # the greatest generation that this worker knew before the claim
        self._states = ServerStates()  # as of the last claim
        self._there: tuple[int, ...] = ()  # quiesced servers: those that answer and may hold rows
        self._incarnations: dict[int, str] = {}  # of the servers of mode=ps; they reject calls of older ones
        self.furthest = 0  # one more than the last step that any server of mode=ps has accepted
        self._known: dict[int, tuple[Shares, ...]] = {}  # by the `id` of an array of ids
        self.assignment.first  # noqa: B018  # computed once, not in the first step

    @classmethod
    def at(
        cls,
        addresses: Sequence[str],
        token: str,
        run_id: str,
        seed: int,
        replicas: int = 1,
        timeout: float = TIMEOUT_SECONDS,
        asynchronous: pb.Asynchronous | None = None,
    ) -> Self:
        """Create a client of the servers at these addresses.

        Args:
            addresses: host:port, by index.
            replicas: wanted number of servers per row.
            timeout: seconds after which a silent server is left out, if other servers hold its rows.
            asynchronous: as in ServerGroup.
        """
        interrupt = Interrupt()
        patience = None if replicas < 2 else timeout

        def connect(index: int, address: str) -> Link:
            return ServerLink(index, address, token, interrupt, patience=patience)

        links = [connect(index, address) for index, address in enumerate(addresses)]
        return cls(links, run_id, seed, interrupt, replicas, connect, addresses, asynchronous)

    @property
    def count(self) -> int:
        """The number of servers that hold rows."""
        return len(self._members)

    @property
    def coordinator(self) -> int:
        """The index of the server that leases steps in mode=ps."""
        return self.assignment.coordinator

    @property
    def _members(self) -> tuple[int, ...]:
        return self.assignment.members

    # --- which servers there are

    def declare(self, tables: Sequence[Table], last: Callable[[], Commit | None] | None = None) -> None:
        """Set the tables whose rows are on these servers.

        Args:
            last: returns the last step's outcome, which is sent with each call; None in mode=ps.
        """
        self._tables, self._last = tuple(tables), last or self._last

    def enter(self, addresses: Sequence[str] = (), servers: int = 0, released_from: int = 0) -> None:
        """Prepare for a ring: from now on, calls end when the ring is cut.

        Args:
            addresses: the servers' addresses, host:port by index; empty if unchanged.
            servers: the number of servers that shall hold the rows; 0: all.
            released_from: servers from this index on are released and have no rows; 0: unknown. Released
                ones are called again then: a master before this one may have requested them since, in rings
                that this worker was not in.
        """
        self._interrupt.arm()
        self._links = [link.link if isinstance(link, ReleasedServer) else link for link in self._links]
        self._know(addresses)
        if released_from:
            self.addresses = self.addresses[:released_from]
            released = enumerate(self._links[released_from:], released_from)
            self._links[released_from:] = [ReleasedServer(index, link) for index, link in released]
        self._is_said = servers > 0
        # If the number is unknown, keep the previous number; not every server that ever existed counts.
        self._wanted = ShardAssignment(servers or self.assignment.servers, self._wanted.replicas)

    def _know(self, addresses: Sequence[str]) -> None:
        """Update the links.

        Links to further servers stay: they may hold rows that a new master does not know of.
        """
        if addresses and self._connect is not None:
            known, count = dict(enumerate(self.addresses)), len(addresses)
            links = [
                self._links[index] if known.get(index) == address else self._connect(index, address)
                for index, address in enumerate(addresses)
            ]
            self._links = [*links, *self._links[count:]]
            self.addresses = (*addresses, *self.addresses[count:])

    def leave(self) -> None:
        """The ring was left: calls for this worker's own state are possible again."""
        self._interrupt.arm()

    def cut(self) -> None:
        """End all calls at once, from any thread: the ring is called off."""
        self._interrupt.cut()

    def pause(self, seconds: float) -> None:
        """Wait.

        Raises:
            RingBroken: the ring was cut.
        """
        if self._interrupt.wait(seconds):
            raise RingBroken("the ring was cut")

    def waiting(self) -> ServerWait | None:
        """The longest running wait for a server, or None. On any thread."""
        return self._interrupt.longest(time.monotonic())

    def adopt(self, assignment: ShardAssignment, addresses: Sequence[str] = ()) -> None:
        """Use this assignment of rows, and these addresses, for all calls from now on."""
        self._know(addresses)
        self.assignment = assignment
        self._known.clear()

    def _shares(self, ids: np.ndarray, copies: int = 2) -> tuple[Shares, ...]:
        """The servers of these ids, by replica.

        Cached for read-only arrays in mode=ps: the ids of the dense weights, which are those of every step.

        Args:
            copies: 1 if only the first replicas are needed.
        """
        if ids.flags.writeable or self._asynchronous is None:
            return shares_of(ids, self.assignment, copies)
        if (known := self._known.get(id(ids))) is None:
            known = self._known[id(ids)] = shares_of(ids, self.assignment, 2)
        return known  # it refers to `ids`, so that the key stays unique

    # --- a ring begins

    def claim(self, worker: int) -> int:
        """Claim a generation greater than every one that a server or this worker has known.

        Servers that have lost their logs know none; a reused number would make them look like members of an
        earlier ring. Two roots that claim concurrently get different numbers, which contain the worker's
        number. The master's generation would not do: a master that starts without workers may count from 1
        again.

        Raises:
            RingBroken: the ring was cut before all servers had answered.
        """
        last = self._last()
        generations = self._claims_above, self.generation, 0 if last is None else last.generation
        self._claims_above = max(generations)
        self._states = self._declare_to_all()
        of = self._states.newest
        if not self._is_said and of is not None and of.servers <= len(self._links):
            self._wanted = ShardAssignment(of.servers, self._wanted.replicas)
        self._claims_for = worker
        self.generation = self._next_generation()
        return self.generation

    @property
    def moves(self) -> bool:
        """Whether rows must move to other servers, as the root knows after `claim`."""
        return self.assignment != self._reachable

    @property
    def _reachable(self) -> ShardAssignment:
        """The wanted assignment, without the servers that are away."""
        return self._wanted.without(self._states.away)

    def _next_generation(self) -> int:
        known = max(self._states.generation, self._claims_above)
        return (known // WORKERS + 1) * WORKERS + self._claims_for % WORKERS

    def _wait_for(self, servers: Iterable[int]) -> None:
        """Wait for `servers`, which were away, and raise the generation.

        These servers may know a greater generation than the claimed one, or the same one from another claim.
        The states of all servers that may hold rows are refreshed, too. Further servers have answered once
        and may have ended since, so waiting for them might never end.
        """
        before, most = self._states, self._expected(self._states)
        may_have_rows = {index for index in before.found if index < most}
        found = {**before.found, **self._declare({*may_have_rows, *servers})}
        most = self._expected(ServerStates(found))
        away = (index for index in before.away if index < most and index not in found)
        self._states = ServerStates(found, tuple(away))
        self.generation = max(self.generation, self._next_generation())

    # --- their states

    def _declare_to_all(self) -> ServerStates:
        """Declare the tables to all servers; return their states, and which servers are away but not needed.

        Raises:
            RingBroken: the ring was cut before enough servers had answered.
        """
        while True:
            positions = self._declare_once()
            if positions.found:
                return positions
            if self._interrupt.wait(RETRY_SECONDS):  # a ring needs at least one server
                raise RingBroken("the ring was cut while waiting for a parameter server to answer")

    def _declare_once(self) -> ServerStates:
        alone = self._wanted.copies < 2
        calls = self._begin("Declare", dict.fromkeys(range(len(self._links)), self._tables_message()))
        found, away = dict[int, pb.Position](), list[int]()
        positions = ServerStates(found)  # of the servers that have answered so far
        try:
            for index, call in calls.items():
                # Surplus servers may have ended; they hold rows only if a server before them reports so.
                if alone and index >= self._expected(positions):
                    break
                try:
                    found[index] = call.result()
                except ServerAway:
                    away.append(index)
        finally:
            for call in calls.values():
                call.forget()
        away = [index for index in away if index < self._expected(positions)]

        def missing() -> list[int]:
            left = [index for index in range(self._expected(positions)) if index not in found]
            return left if positions.may_be_on(away) else [index for index in left if index not in away]

        while alone and (left := missing()):
            found |= self._declare(left[:1])  # it may know that later servers have ended
            away = [index for index in away if index not in found and index < self._expected(positions)]
        return ServerStates(found, tuple(away))

    def _expected(self, positions: ServerStates) -> int:
        """Number of known servers that hold rows or are wanted to."""
        wanted = self._wanted.servers if self._is_said else 0
        return min(max(wanted, positions.needed) or self.assignment.servers, len(self._links))

    def _declare(self, servers: Iterable[int], wait_forever: bool = True) -> dict[int, pb.Position]:
        """Declare the tables to these servers; returns their states."""
        requests = dict.fromkeys(sorted(servers), self._tables_message())
        return self._ask("Declare", requests, wait_forever=wait_forever)

    def look(self, wait_forever: bool = False) -> dict[int, pb.Description]:
        """Refresh the servers' states and incarnations, which later calls use; return the states by index.

        Args:
            wait_forever: wait for every server, even if others hold its rows.
        """
        self._declare(self._members, wait_forever)
        requests = dict.fromkeys(self._members, pb.DescribeRequest())
        found = self._ask("Describe", requests, wait_forever=wait_forever)
        self._incarnations = {index: told.incarnation for index, told in found.items()}
        self.furthest = furthest_of(found.values())
        return found

    def _tables_message(self) -> pb.Tables:
        return tables_to_proto(self._tables, self._run_id, self._seed, self._asynchronous)

    def _commit(self, step: int) -> pb.Commit | None:
        """The result of the step before `step`.

        Raises:
            RuntimeError: the last commit is not that of the step before: an error of this program.
        """
        last = self._last()
        if last is None:
            return None
        if last.step != step - 1:
            raise RuntimeError(f"rows of step {step} requested with the commit of step {last.step}")
        return written(pb.Commit, last)

    # --- calls

    def _request(self, kind: Callable[..., M], **fields: Any) -> M:
        """A message of this job and generation."""
        return kind(run_id=self._run_id, generation=self.generation, **fields)

    def _ask(
        self, method: str, requests: Mapping[int, Request], known: bool = False, wait_forever: bool = False
    ) -> dict[int, Any]:
        """Call these servers and return their answers, by index.

        Args:
            known: the servers are known to be in this generation.
            wait_forever: wait for every server, even if others hold its rows.

        Raises:
            RingBroken: the ring was cut; or a server is away whose rows others hold.
        """
        return Begun(self._begin(method, requests, known), lambda answers: answers, wait_forever).result()

    def _begin(self, method: str, requests: Mapping[int, Request], known: bool = False) -> dict[int, Pending]:
        """Call these servers concurrently."""
        generation = self.generation if known else None
        return {
            index: self._links[index].begin(method, request, generation)
            for index, request in requests.items()
        }
