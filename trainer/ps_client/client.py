"""One worker's client of all parameter servers of a job.

Ids map to servers by arithmetic (edl/contract/rows/buckets.py), and one operation calls all servers
concurrently.

Promise: when `pull` returns, *every* server is at that step, including servers that hold none of the rows.
All ranks with the state pull before they join the step's all-reduce. So when the all-reduce completes
anywhere, no server is more than one step behind, and the next call to it carries the result of that step.

**The shard assignment** may change from ring to ring (edl/contract/rows/placement.py). The root asks all
servers for their state, starts a generation on those that hold the rows (`start_generation`), and, when all
ranks have the state, moves the rows to the servers that the master wants (`move`). If each row is on two
servers, a server that is down or has lost its rows is left out, and is brought back in the same way.

This module makes the calls. `recovery` derives the shard assignment from the servers' answers.

The result of a step is part of the ledger (`Ledger.commit`), so every worker that holds the state knows it.
This module only reads it (`follow`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from typing import Any

import numpy as np

from edl.checkpoints import Part
from edl.contract.heartbeats import ServerWait
from edl.contract.proto import ps_pb2 as pb
from edl.contract.rows.placement import ShardAssignment
from edl.contract.rows.shares import IDS, PAGE_BYTES, VALUES, Shares, encoded, put
from edl.trainer.embedding.interfaces import Commit, Start, Table
from edl.trainer.ps_client.link import (
    Interrupt,
    Link,
    Pending,
    Request,
    ServerAway,
    ServerLink,
    ServerRefused,
    Writing,
)
from edl.trainer.ps_client.messages import (
    commit_to_proto,
    ids_asked,
    part_of,
    places,
    put_together,
    start_to_proto,
    tables_to_proto,
)
from edl.trainer.ps_client.pending import Begun
from edl.trainer.ps_client.recovery import ServerStates, why_behind
from edl.trainer.ring.base import RingBroken

TIMEOUT_SECONDS = 3.0
RETRY_SECONDS = 0.25  # between two attempts while no server answers
WORKERS = 1 << 20  # a generation is a counter times WORKERS, plus the number of the claiming worker


class PsClient:
    """The servers of one job.

    Args:
        links: one per server, by index.
        run_id: the run ID of the job.
        seed: the seed of the job; initial rows depend on it.
        interrupt: cancels the calls of all links.
        replicas: wanted number of servers per row.
        connect: creates the link to a server, by index and address; None if the servers are fixed.
        addresses: host:port of the servers, by index.
    """

    def __init__(
        self, links: Sequence[Link], run_id: str, seed: int, interrupt: Interrupt | None = None,
        replicas: int = 1, connect: Callable[[int, str], Link] | None = None, addresses: Sequence[str] = (),
    ):  # fmt: skip
        self._links, self._run_id, self._seed = list(links), run_id, seed
        self._connect, self._addresses = connect, tuple(addresses)
        self._interrupt = interrupt or Interrupt()
        # The wanted assignment, and the present one.
        self._wanted = self._assignment = ShardAssignment(len(links), replicas)
        self._is_said = True  # whether the master has named the number of servers
        self._tables: tuple[Table, ...] = ()
        self._last: Callable[[], Commit | None] = lambda: None
        self._asynchronous: pb.Asynchronous | None = None  # None: synchronous steps (mode=hybrid)
        self._generation = 0
        self._claims_for = 0  # the worker that acts as the root
        self._claims_above = 0  # the greatest generation that this worker knew before the claim
        self._states = ServerStates()  # as of the last claim
        self._start = Start()  # initial rows for the next `restore` of step 0
        self._assignment.first  # noqa: B018  # computed once, not in the first step

    @classmethod
    def at(
        cls, addresses: Sequence[str], token: str, run_id: str, seed: int,
        replicas: int = 1, timeout: float = TIMEOUT_SECONDS,
    ) -> PsClient:  # fmt: skip
        """Create a client of the servers at these addresses.

        Args:
            addresses: host:port, by index.
            replicas: wanted number of servers per row.
            timeout: seconds after which a silent server is left out, if other servers hold its rows.
        """
        interrupt = Interrupt()
        patience = None if replicas < 2 else timeout

        def connect(index: int, address: str) -> Link:
            return ServerLink(index, address, token, interrupt, patience=patience)

        links = [connect(index, address) for index, address in enumerate(addresses)]
        return cls(links, run_id, seed, interrupt, replicas, connect, addresses)

    @property
    def count(self) -> int:
        return len(self._members)

    @property
    def assignment(self) -> ShardAssignment:
        return self._assignment

    @property
    def _members(self) -> tuple[int, ...]:
        return self._assignment.members

    # --- forming a ring

    def follow(self, tables: Sequence[Table], last: Callable[[], Commit | None]) -> None:
        self._tables, self._last = tuple(tables), last

    def enter(self, addresses: Sequence[str] = (), servers: int = 0) -> None:
        self._interrupt.arm()
        self._know(addresses)
        self._is_said = servers > 0
        # If the number is unknown, keep the previous number; not every server that ever existed counts.
        self._wanted = ShardAssignment(servers or self._assignment.servers, self._wanted.replicas)

    def _know(self, addresses: Sequence[str]) -> None:
        """Update the links. Keep links to further servers: they may hold rows that a new master does not know
        of."""
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
        number.
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
        return self._generation

    def speak_of(self, generation: int) -> None:
        self._generation = generation

    def leave(self) -> None:
        self._interrupt.arm()

    def cut(self) -> None:
        self._interrupt.cut()

    def waiting(self) -> ServerWait | None:
        """The longest running wait for a server, or None. On any thread."""
        return self._interrupt.longest(time.monotonic())

    def begin_with(self, start: Start) -> None:
        """Use these initial rows in the next `restore` of step 0. Once, because they may be large."""
        self._start = start

    def start_generation(self, step: int) -> str:
        if (count := self._states.needed) > len(self._links):
            raise RingBroken(
                f"the rows are on {count} parameter servers, and this worker knows {len(self._links)}: "
                "waiting for the master to name the others"
            )
        last = self._last()
        self._assignment, why = self._states.choose_assignment(step, self._wanted, last)
        while not self._assignment.is_whole and self._states.away:
            # A server that is away may hold the missing rows.
            self._wait_for(self._states.away[:1])  # or know that later servers have ended
            self._assignment, why = self._states.choose_assignment(step, self._wanted, last)
        if not self._assignment.is_whole:
            return why
        if not step and (lost := self._states.lost):
            # It would start with default initial rows, and this job's are loaded from elsewhere.
            return f"parameter server {lost[0]} has lost its log and rows"
        request = pb.StartGenerationRequest(
            run_id=self._run_id, generation=self._generation, step=step, last=self._commit(step),
            assignment=self._assignment.to_proto(),
        )  # fmt: skip
        positions = self._ask("StartGeneration", dict.fromkeys(self._members, request))
        behind = (why_behind(index, position, step) for index, position in positions.items())
        return "; ".join(filter(None, behind))

    def restore(self, step: int, attempt: str) -> None:
        self._assignment = self._wanted.without(self._states.away)
        if not self._assignment.is_whole:
            self._assignment = self._wanted
            self._wait_for(self._members)
        request = pb.RestoreRequest(
            run_id=self._run_id, generation=self._generation, step=step, attempt=attempt,
            assignment=self._assignment.to_proto(),
        )  # fmt: skip
        if not step and (start := self._start).tables:
            request.start.CopyFrom(start_to_proto(start))
        for index, position in self._ask("Restore", dict.fromkeys(self._members, request)).items():
            if position.step != step:
                raise ServerRefused(
                    f"parameter server {index} is at step {position.step:,}: expected step {step:,} after "
                    "its rollback"
                )
        self._declare(self._members)  # for servers that have restarted empty meanwhile
        if not step:
            for number, (ids, rows) in self._start.rows.items():
                self._load(number, ids, rows)
            self._start = Start()

    def _load(self, number: int, ids: np.ndarray, rows: np.ndarray) -> None:
        """Send all servers their initial rows of a table, page by page."""
        most = max(PAGE_BYTES // (8 + 4 * self._tables[number].dim), 1)
        for at in range(0, len(ids), most):
            told, page = places(ids[at : at + most], self._assignment), rows[at : at + most]
            requests = {
                index: pb.LoadRequest(
                    run_id=self._run_id, generation=self._generation,
                    values=[
                        pb.Gradients(
                            table=number, ids=encoded(ids[at : at + most][here], IDS),
                            values=encoded(page[here], VALUES),
                        )
                    ],
                )
                for index in self._members
                if (here := told(index)) is not None
            }  # fmt: skip
            self._ask("Load", requests, known=True)

    @property
    def moves(self) -> bool:
        return self._assignment != self._wanted.without(self._states.away)

    def move(self, step: int) -> str:
        of, to = self._assignment, self._wanted.without(self._states.away)
        if not to.is_whole:  # impossible while these servers are away
            names = ", ".join(map(str, self._states.away))
            return f"parameter server {names} does not answer" if to.copies < 2 else ""
        why = ""
        fetch = pb.FetchRequest(
            run_id=self._run_id, generation=self._generation, step=step, last=self._commit(step),
            of=of.to_proto(), to=to.to_proto(), addresses=self._addresses,
        )  # fmt: skip
        reached = sorted({*of.members, *to.members} - {*self._states.away})
        gaining = [index for index in to.members if (to.held(index) & ~of.held(index)).any()]
        calls = self._begin("Fetch", dict.fromkeys(gaining, fetch))
        try:
            for call in calls.values():
                call.result()
        except ServerRefused as error:
            why, to = str(error), of
        except ServerAway as error:
            if to.copies > 1:
                raise RingBroken(str(error)) from error
            why, to, reached = str(error), of, [*of.members]
        finally:
            for call in calls.values():
                call.forget()
        assign = pb.AssignRequest(
            run_id=self._run_id,
            generation=self._generation,
            step=step,
            last=self._commit(step),
            to=to.to_proto(),
        )
        self._ask("Assign", dict.fromkeys(reached, assign))
        self._assignment = to
        return why

    @property
    def addresses(self) -> tuple[str, ...]:
        return self._addresses

    def adopt(self, assignment: ShardAssignment, addresses: Sequence[str] = ()) -> None:
        self._know(addresses)
        self._assignment = assignment

    def _declare_to_all(self) -> ServerStates:
        """Declare the tables to all servers; returns their states, and which servers are away but not
        needed."""
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
        return self._ask("Declare", dict.fromkeys(servers, self._tables_message()), patient=True)

    def _tables_message(self) -> pb.Tables:
        return tables_to_proto(self._tables, self._run_id, self._seed, self._asynchronous)

    # --- in a step

    def pull(self, step: int, ids: Sequence[np.ndarray]) -> list[np.ndarray]:
        return self.begin_pull(step, ids).result()

    def begin_pull(
        self, step: int, ids: Sequence[np.ndarray], last: Commit | None = None
    ) -> Begun[list[np.ndarray]]:
        shares = [Shares(each, self._assignment) for each in ids]
        last_step = self._commit(step) if last is None else commit_to_proto(last)
        requests = {
            index: pb.PullRequest(
                run_id=self._run_id, generation=self._generation, step=step, last=last_step,
                ids=ids_asked(index, shares),
            )
            for index in self._members
        }  # fmt: skip
        return Begun(
            self._begin("Pull", requests, known=True),
            lambda answers: put_together(ids, self._tables, shares, requests, answers),
        )

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
            for index, page in self._ask("List", asked, last is not None, patient=True).items():
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
            for index, answer in self._ask("Pull", requests, last is not None, patient=True).items():
                put(found[at : at + most], share.of(index), b"".join(answer.rows), index)
        return found

    def stage(self, step: int, rank: int, gradients: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        self.begin_stage(step, rank, gradients).result()

    def begin_stage(
        self, step: int, rank: int, gradients: Sequence[tuple[np.ndarray, np.ndarray]]
    ) -> Begun[None]:
        all_places = [places(ids, self._assignment) for ids, _ in gradients]
        requests = {}
        for index in self._members:
            request = pb.StageRequest(run_id=self._run_id, generation=self._generation, step=step, rank=rank)
            for table, ((ids, values), told) in enumerate(zip(gradients, all_places, strict=True)):
                if (here := told(index)) is not None:  # `add` avoids a copy that a list would cost
                    request.gradients.add(
                        table=table, ids=encoded(ids[here], IDS), values=encoded(values[here], VALUES)
                    )
            if request.gradients:
                requests[index] = request
        return Begun(self._begin("Stage", requests, known=True), lambda _: None)

    # --- checkpoints

    def take_parts(
        self, step: int, attempt: str, first: int
    ) -> AbstractContextManager[Callable[[], list[Part]]]:
        calls: list[Writing] = []
        try:
            for number, link in enumerate(map(self._links.__getitem__, self._members)):
                request = pb.WritePartRequest(
                    run_id=self._run_id, generation=self._generation, step=step, last=self._commit(step),
                    attempt=attempt, index=first + number, of=first + self.count,
                    assignment=self._assignment.to_proto(),
                )  # fmt: skip
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
                call.result(patient=True, within=seconds)
        except ServerAway:
            return False
        finally:
            for call in calls:
                call.forget()
        return True

    def committed(self, step: int, attempt: str) -> None:
        for link in map(self._links.__getitem__, self._members):
            link.tell("Committed", pb.CommittedRequest(run_id=self._run_id, step=step, attempt=attempt))

    # --- private

    def _commit(self, step: int) -> pb.Commit | None:
        """The result of the step before `step`."""
        last = self._last()
        if last is None:
            return None
        if last.step != step - 1:
            raise RuntimeError(f"rows of step {step} requested with the commit of step {last.step}")
        return commit_to_proto(last)

    def _ask(
        self, method: str, requests: Mapping[int, Request], known: bool = False, patient: bool = False
    ) -> dict[int, Any]:
        """Call these servers and return their answers, by index.

        Args:
            known: the servers are known to be in this generation.
            patient: wait for every server, even if others hold its rows.

        Raises:
            RingBroken: the ring was cut; or a server is away whose rows others hold.
        """
        return Begun(self._begin(method, requests, known), lambda answers: answers, patient).result()

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
