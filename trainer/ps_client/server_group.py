# SPDX-License-Identifier: Apache-2.0
"""The parameter servers of a job as one worker knows them: links, last states, and the assignment of rows.

One operation calls several servers concurrently. `recovery` derives from their states which of them hold
the rows. What is called, and when, is in `client` (synchronous steps) and `async_client`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from typing import Any, Self

import numpy as np

from edl.checkpoints import Part
from edl.contract.heartbeats import ServerWait
from edl.contract.proto import ps_pb2 as pb
from edl.contract.rows.placement import ShardAssignment
from edl.contract.rows.shares import IDS, PAGE_BYTES, VALUES, Shares, encoded, put
from edl.trainer.embedding.interfaces import Commit, Start, Table
from edl.trainer.ps_client.calls import Link, Pending, ReleasedServer, Request, ServerAway, Writing
from edl.trainer.ps_client.interrupt import Interrupt
from edl.trainer.ps_client.link import ServerLink
from edl.trainer.ps_client.messages import commit_to_proto, part_of, tables_to_proto
from edl.trainer.ps_client.pending import Begun
from edl.trainer.ps_client.recovery import ServerStates
from edl.trainer.ring.base import RingBroken

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
        self._connect, self._addresses = connect, tuple(addresses)
        self._interrupt = interrupt or Interrupt()
        # The wanted assignment, and the present one.
        self._wanted = self._assignment = ShardAssignment(len(links), replicas)
        self._is_said = True  # whether the master has named the number of servers
        self._tables: tuple[Table, ...] = ()
        self._last: Callable[[], Commit | None] = lambda: None
        self._asynchronous = asynchronous
        self._generation = 0
        self._claims_for = 0  # the worker that acts as the root
        self._claims_above = 0  # the greatest generation that this worker knew before the claim
        self._states = ServerStates()  # as of the last claim
        self._start = Start()  # initial rows for the next `restore` of step 0
        self._assignment.first  # noqa: B018  # computed once, not in the first step

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
            asynchronous: as in ServerGroup.
            timeout: seconds after which a silent server is left out, if other servers hold its rows.
        """
        interrupt = Interrupt()
        patience = None if replicas < 2 else timeout

        def connect(index: int, address: str) -> Link:
            return ServerLink(index, address, token, interrupt, patience=patience)

        links = [connect(index, address) for index, address in enumerate(addresses)]
        return cls(links, run_id, seed, interrupt, replicas, connect, addresses, asynchronous)

    @property
    def count(self) -> int:
        return len(self._members)

    @property
    def assignment(self) -> ShardAssignment:
        """The assignment of rows to servers."""
        return self._assignment

    @property
    def _members(self) -> tuple[int, ...]:
        return self._assignment.members

    # --- which servers there are

    def follow(self, tables: Sequence[Table], last: Callable[[], Commit | None]) -> None:
        """Set the tables whose rows are on these servers.

        Args:
            last: returns the last step's outcome, which is sent with each call.
        """
        self._tables, self._last = tuple(tables), last

    def enter(self, addresses: Sequence[str] = (), servers: int = 0, released_from: int = 0) -> None:
        """Prepare for a ring: from now on, calls end when the ring is cut.

        Args:
            addresses: the servers' addresses, host:port by index; empty if unchanged.
            servers: the number of servers that shall hold the rows; 0: all.
            released_from: servers from this index on are released and have no rows; 0: unknown.
        """
        self._interrupt.arm()
        self._know(addresses)
        if released_from:
            self._addresses = self._addresses[:released_from]
            released = range(released_from, len(self._links))
            self._links[released_from:] = [ReleasedServer(index) for index in released]
        self._is_said = servers > 0
        # If the number is unknown, keep the previous number; not every server that ever existed counts.
        self._wanted = ShardAssignment(servers or self._assignment.servers, self._wanted.replicas)

    def _know(self, addresses: Sequence[str]) -> None:
        """Update the links.

        Links to further servers stay: they may hold rows that a new master does not know of.
        """
        if addresses and self._connect is not None:
            known, count = dict(enumerate(self._addresses)), len(addresses)
            links = [
                self._links[index] if known.get(index) == address else self._connect(index, address)
                for index, address in enumerate(addresses)
            ]
            self._links = [*links, *self._links[count:]]
            self._addresses = (*addresses, *self._addresses[count:])

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
        generations = self._claims_above, self._generation, 0 if last is None else last.generation
        self._claims_above = max(generations)
        self._states = self._declare_to_all()
        of = self._states.newest
        if not self._is_said and of is not None and of.servers <= len(self._links):
            self._wanted = ShardAssignment(of.servers, self._wanted.replicas)
        self._claims_for = worker
        return self._next_generation()

    def _next_generation(self) -> int:
        known = max(self._states.generation, self._claims_above)
        return (known // WORKERS + 1) * WORKERS + self._claims_for % WORKERS

    def _wait_for(self, servers: Iterable[int]) -> None:
        """Wait for servers that were away, and raise the generation.

        These servers may know a greater generation than the claimed one, or the same one from another claim.
        """
        self._find_late(servers)
        self._generation = max(self._generation, self._next_generation())

    def _find_late(self, servers: Iterable[int]) -> None:
        """Refresh the state of all servers that may hold rows, and of `servers`, which were away.

        Further servers have answered once and may have ended since, so waiting for them might never end.
        """
        before, most = self._states, self._expected(self._states)
        may_have_rows = {index for index in before.found if index < most}
        found = {**before.found, **self._declare(sorted({*may_have_rows, *servers}))}
        most = self._expected(ServerStates(found))
        away = (index for index in before.away if index < most and index not in found)
        self._states = ServerStates(found, tuple(away))

    @property
    def generation(self) -> int:
        """The generation that all calls carry."""
        return self._generation

    def speak_of(self, generation: int) -> None:
        """Set the generation that the root has claimed: all calls carry it from now on."""
        self._generation = generation

    def leave(self) -> None:
        """The ring was left: calls for this worker's own state are possible again."""
        self._interrupt.arm()

    def cut(self) -> None:
        """End all calls at once, from any thread: the ring is called off."""
        self._interrupt.cut()

    def waiting(self) -> ServerWait | None:
        """The longest running wait for a server, or None. On any thread."""
        return self._interrupt.longest(time.monotonic())

    @property
    def addresses(self) -> tuple[str, ...]:
        """The known addresses of the servers, host:port by index."""
        return self._addresses

    def adopt(self, assignment: ShardAssignment, addresses: Sequence[str] = ()) -> None:
        """Use this assignment of rows, and these addresses, for all calls from now on."""
        self._know(addresses)
        self._assignment = assignment

    def begin_with(self, start: Start) -> None:
        """Use these initial rows in the next `restore` of step 0. Once, because they may be large."""
        self._start = start

    @property
    def moves(self) -> bool:
        """Whether rows must move to other servers, as the root knows after `claim`."""
        return self._assignment != self._wanted.without(self._states.away)

    # --- rows of this worker's state

    def all_rows(self, table: int) -> tuple[np.ndarray, np.ndarray]:
        """All rows of a table, of this worker's state; waits for servers that are away.

        After a rollback without further steps, the servers' present state is read.

        Returns:
            ids int64 [n], unique, and rows float32 [n, dim].
        """
        last, dim = self._last(), self._tables[table].dim
        request = pb.ListRequest(run_id=self._run_id, table=table, most=max(PAGE_BYTES // (8 + 4 * dim), 1))
        if last is not None:
            request.generation, request.step = self._generation, last.step + 1
            request.last.CopyFrom(self._commit(last.step + 1))
            request.assignment.CopyFrom(self._assignment.to_proto())
        asked = {index: deepcopy(request) for index in self._members}
        found: list[tuple[np.ndarray, np.ndarray]] = []
        while asked:
            for index, page in self._ask("List", asked, last is not None, wait_forever=True).items():
                ids = np.frombuffer(page.ids, IDS)
                found.append((ids, np.frombuffer(page.rows, VALUES).reshape(len(ids), dim)))
                if page.more:
                    asked[index].after = int(ids[-1])
                else:
                    del asked[index]
        return np.concatenate([ids for ids, _ in found]), np.concatenate([rows for _, rows in found])

    def rows_of(self, table: int, ids: np.ndarray) -> np.ndarray:
        """The rows of these ids, float32 [n, dim], of this worker's state, including initial rows."""
        last, dim = self._last(), self._tables[table].dim
        request = pb.PullRequest(run_id=self._run_id)
        if last is not None:
            request.generation, request.step = self._generation, last.step + 1
            request.last.CopyFrom(self._commit(last.step + 1))
            request.assignment.CopyFrom(self._assignment.to_proto())
        found, most = np.empty((len(ids), dim), np.float32), max(PAGE_BYTES // (8 + 4 * dim), 1)
        for at in range(0, len(ids), most):
            share, requests = Shares(ids[at : at + most], self._assignment), {}
            for index in self._members:
                requests[index] = pb.PullRequest()
                requests[index].CopyFrom(request)
                requests[index].ids.add(table=table, ids=encoded(share.ids[share.of(index)], IDS))
            for index, answer in self._ask("Pull", requests, last is not None, wait_forever=True).items():
                put(found[at : at + most], share.of(index), b"".join(answer.rows), index)
        return found

    # --- checkpoints

    def take_parts(
        self, step: int, attempt: str, first: int
    ) -> AbstractContextManager[Callable[[], list[Part]]]:
        calls: list[Writing] = []
        try:
            for number, link in enumerate(map(self._links.__getitem__, self._members)):
                request = pb.WritePartRequest(
                    run_id=self._run_id,
                    generation=self._generation,
                    step=step,
                    last=self._commit(step),
                    attempt=attempt,
                    index=first + number,
                    of=first + self.count,
                    assignment=self._assignment.to_proto(),
                )
                calls.append(link.write_part(request))
            for call in calls:
                call.captured()
        except BaseException:
            _forget(calls)
            raise
        return _being_written(calls)

    def answer_within(self, seconds: float) -> bool:
        links = [self._links[index] for index in self._members]
        calls = [link.begin("Describe", pb.DescribeRequest()) for link in links]
        try:
            for call in calls:
                call.result(wait_forever=True, within=seconds)
        except ServerAway:
            return False
        finally:
            for call in calls:
                call.forget()
        return True

    def committed(self, step: int, attempt: str) -> None:
        for link in map(self._links.__getitem__, self._members):
            link.tell("Committed", pb.CommittedRequest(run_id=self._run_id, step=step, attempt=attempt))

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
        reached, alone = range(len(self._links)), self._wanted.copies < 2
        calls = self._begin("Declare", dict.fromkeys(reached, self._tables_message()))
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
        return min(max(wanted, positions.needed) or self._assignment.servers, len(self._links))

    def _declare(self, servers: Iterable[int]) -> dict[int, pb.Position]:
        """Declare the tables to these servers, waiting for each; returns their states."""
        return self._ask("Declare", dict.fromkeys(servers, self._tables_message()), wait_forever=True)

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
        return commit_to_proto(last)

    # --- calls

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
        generation = self._generation if known else None
        return {
            index: self._links[index].begin(method, request, generation)
            for index, request in requests.items()
        }


@contextmanager
def _being_written(calls: Sequence[Writing]) -> Iterator[Callable[[], list[Part]]]:
    """Own these calls until the block ends. The yielded function waits until all shards are written."""
    try:
        yield lambda: [part_of(call.written()) for call in calls]
    finally:
        _forget(calls)


def _forget(calls: Iterable[Writing]) -> None:
    for call in calls:
        call.forget()
