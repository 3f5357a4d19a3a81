"""All parameter servers of a job, as one worker sees them: which server has which row is arithmetic
(edl/contract/rows/buckets.py), and what one call asks of several servers is asked of all at the same time.

Promise: when `pull` returns, *every* server is at that step, also one that has none of the rows. All ranks
that have the state pull before they take part in a step's sums. So when the sums have come back anywhere, no
server is further behind than this one step, and what is said to the servers next says what became of it.

**Which servers there are** may change from ring to ring (edl/contract/rows/placement.py). The root asks all
of them what they have, settles those that have the rows (`settle`), and when all ranks have the state, has
the rows moved to where the master wants them (`move`). Where each row is on two servers, one that is away, or
has lost its rows, is left out, and comes back in the same way.

This module is the calls. What follows from where the servers say that they are is in server_positions.py.

What has become of a step stands in the ledger, beside the number of the step (`Ledger.commit`): whoever has
the state knows it, however it came by it. This module only asks for it (`follow`).
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
from edl.contract.rows.placement import Arrangement
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
    commit_told,
    ids_asked,
    part_of,
    places,
    put_together,
    start_told,
    tables_told,
)
from edl.trainer.ps_client.pending import Begun
from edl.trainer.ps_client.recovery import Positions, why_behind
from edl.trainer.ring.base import RingBroken

TIMEOUT_SECONDS = 3.0
NOBODY_SECONDS = 0.25  # between two questions whether any server answers
WORKERS = 1 << 20  # a generation is a number of its own, and that of the worker who claimed it


class ParameterServers:
    """The servers of one job.

    Args:
        links: one for each, by index.
        run_id: of the job.
        seed: of the job: rows are born from it.
        interrupt: breaks the calls of all links off.
        replicas: on how many servers each row is to be.
        connect: makes the link to the server of this number at an address; None: there are no others.
    """

    def __init__(
        self, links: Sequence[Link], run_id: str, seed: int, interrupt: Interrupt | None = None,
        replicas: int = 1, connect: Callable[[int, str], Link] | None = None, addresses: Sequence[str] = (),
    ):  # fmt: skip
        self._links, self._run_id, self._seed = list(links), run_id, seed
        self._connect, self._addresses = connect, tuple(addresses)
        self._interrupt = interrupt or Interrupt()
        # As it is to be, and as it is.
        self._wanted = self._arrangement = Arrangement(len(links), replicas)
        self._is_said = True  # how many are wanted; else as many as have the rows
        self._tables: tuple[Table, ...] = ()
        self._last: Callable[[], Commit | None] = lambda: None
        self._asynchronous: pb.Asynchronous | None = None  # steps are a ring's
        self._generation = 0
        self._claims_for = 0  # the worker who speaks as the root
        self._claims_above = 0  # the greatest generation that this worker knew before it claimed one
        self._positions = Positions()  # where they were when a generation was claimed
        self._start = Start()  # what the next `restore` of step 0 begins with
        self._arrangement.first  # noqa: B018  # computed once, not in the first step

    @classmethod
    def at(
        cls, addresses: Sequence[str], token: str, run_id: str, seed: int,
        replicas: int = 1, timeout: float = TIMEOUT_SECONDS,
    ) -> ParameterServers:  # fmt: skip
        """Those at these addresses, host:port by index.

        Args:
            replicas: on how many of them each row is to be.
            timeout: seconds after which one that does not answer is done without, if others have its rows.
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
    def arrangement(self) -> Arrangement:
        return self._arrangement

    @property
    def _members(self) -> tuple[int, ...]:
        return self._arrangement.members

    # --- the loop's side

    def follow(self, tables: Sequence[Table], last: Callable[[], Commit | None]) -> None:
        self._tables, self._last = tuple(tables), last

    def enter(self, addresses: Sequence[str] = (), servers: int = 0) -> None:
        self._interrupt.arm()
        self._know(addresses)
        self._is_said = servers > 0
        # Nobody says so: as many as there were, and not all that ever were.
        self._wanted = Arrangement(servers or self._arrangement.servers, self._wanted.replicas)

    def _know(self, addresses: Sequence[str]) -> None:
        """Where servers listen. Others, known before, may have rows: a new master does not know that."""
        if addresses and self._connect is not None:
            known, count = dict(enumerate(self._addresses)), len(addresses)
            links = [
                self._links[index] if known.get(index) == address else self._connect(index, address)
                for index, address in enumerate(addresses)
            ]
            self._links = [*links, *self._links[count:]]
            self._addresses = (*addresses, *self._addresses[count:])

    def claim(self, worker: int) -> int:
        """Greater than every generation that a server or this worker has known. (Servers that have lost their
        logs know none; a reused number would make them look like those of an earlier ring.) Two roots that
        claim at the same time get different numbers: each ends with the worker's."""
        last = self._last()
        generations = self._claims_above, self._generation, 0 if last is None else last.generation
        self._claims_above = max(generations)
        self._positions = self._declare_to_all()
        of = self._positions.newest
        if not self._is_said and of is not None and of.servers <= len(self._links):
            self._wanted = Arrangement(of.servers, self._wanted.replicas)
        self._claims_for = worker
        return self._next_generation()

    def _next_generation(self) -> int:
        known = max(self._positions.generation, self._claims_above)
        return (known // WORKERS + 1) * WORKERS + self._claims_for % WORKERS

    def _wait_for(self, servers: Iterable[int]) -> None:
        """Those that were away may know a greater generation than any that was found when this one was
        claimed, or this very one, in which something else was said."""
        self._find_late(servers)
        self._generation = max(self._generation, self._next_generation())

    def _find_late(self, servers: Iterable[int]) -> None:
        """Where all are that may have rows, and these, too, which were away. Others have answered once and
        may have ended meanwhile: waiting for one of them might never end."""
        before, most = self._positions, self._expected(self._positions)
        may_have_rows = {index for index in before.found if index < most}
        found = {**before.found, **self._declare(sorted({*may_have_rows, *servers}))}
        most = self._expected(Positions(found))
        away = (index for index in before.away if index < most and index not in found)
        self._positions = Positions(found, tuple(away))

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
        """For which server this worker waits, the longest first. On any thread."""
        return self._interrupt.longest(time.monotonic())

    def begin_with(self, start: Start) -> None:
        """The next `restore` of step 0 begins with these rows: once, for they may be many."""
        self._start = start

    def settle(self, step: int) -> str:
        if (count := self._positions.needed) > len(self._links):
            raise RingBroken(
                f"rows are on {count} parameter servers, of which this worker knows {len(self._links)}: the "
                "master is to say where the others are"
            )
        last = self._last()
        self._arrangement, why = self._positions.which(step, self._wanted, last)
        while not self._arrangement.is_whole and self._positions.away:  # who is away may have what is missing
            self._wait_for(self._positions.away[:1])  # or know that those after it have ended
            self._arrangement, why = self._positions.which(step, self._wanted, last)
        if not self._arrangement.is_whole:
            return why
        if not step and (lost := self._positions.lost):
            # It would begin anew, and this job's rows do not begin as new ones do.
            return f"parameter server {lost[0]} has lost its log and rows"
        request = pb.SettleRequest(
            run_id=self._run_id, generation=self._generation, step=step, last=self._commit(step),
            arrangement=self._arrangement.told(),
        )  # fmt: skip
        positions = self._ask("Settle", dict.fromkeys(self._members, request))
        behind = (why_behind(index, position, step) for index, position in positions.items())
        return "; ".join(filter(None, behind))

    def restore(self, step: int, attempt: str) -> None:
        self._arrangement = self._wanted.without(self._positions.away)
        if not self._arrangement.is_whole:
            self._arrangement = self._wanted
            self._wait_for(self._members)
        request = pb.RestoreRequest(
            run_id=self._run_id, generation=self._generation, step=step, attempt=attempt,
            arrangement=self._arrangement.told(),
        )  # fmt: skip
        if not step and (start := self._start).tables:
            request.start.CopyFrom(start_told(start))
        for index, position in self._ask("Restore", dict.fromkeys(self._members, request)).items():
            if position.step != step:
                raise ServerRefused(
                    f"parameter server {index} was to go back to step {step:,}, and is at {position.step:,}"
                )
        self._declare(self._members)  # to those that came back meanwhile with nothing
        if not step:
            for number, (ids, rows) in self._start.rows.items():
                self._load(number, ids, rows)
            self._start = Start()

    def _load(self, number: int, ids: np.ndarray, rows: np.ndarray) -> None:
        """Give all servers their rows of a table, page by page."""
        most = max(PAGE_BYTES // (8 + 4 * self._tables[number].dim), 1)
        for at in range(0, len(ids), most):
            told, page = places(ids[at : at + most], self._arrangement), rows[at : at + most]
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
        return self._arrangement != self._wanted.without(self._positions.away)

    def move(self, step: int) -> str:
        of, to = self._arrangement, self._wanted.without(self._positions.away)
        if not to.is_whole:  # it cannot be, as long as they are away
            names = ", ".join(map(str, self._positions.away))
            return f"parameter server {names} does not answer" if to.copies < 2 else ""
        why = ""
        fetch = pb.FetchRequest(
            run_id=self._run_id, generation=self._generation, step=step, last=self._commit(step),
            of=of.told(), to=to.told(), addresses=self._addresses,
        )  # fmt: skip
        everybody = sorted({*of.members, *to.members} - {*self._positions.away})
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
            why, to, everybody = str(error), of, [*of.members]
        finally:
            for call in calls.values():
                call.forget()
        arrange = pb.ArrangeRequest(
            run_id=self._run_id, generation=self._generation, step=step, last=self._commit(step), to=to.told()
        )
        self._ask("Arrange", dict.fromkeys(everybody, arrange))
        self._arrangement = to
        return why

    @property
    def addresses(self) -> tuple[str, ...]:
        return self._addresses

    def adopt(self, arrangement: Arrangement, addresses: Sequence[str] = ()) -> None:
        self._know(addresses)
        self._arrangement = arrangement

    def _declare_to_all(self) -> Positions:
        """Where they are, and who is away and can be done without, for all that is known."""
        while True:
            positions = self._declare_once()
            if positions.found:
                return positions
            if self._interrupt.wait(NOBODY_SECONDS):  # a ring without any of them comes to nothing
                raise RingBroken("the ring was cut while all parameter servers were waited for")

    def _declare_once(self) -> Positions:
        everybody, alone = range(len(self._links)), self._wanted.copies < 2
        calls = self._begin("Declare", dict.fromkeys(everybody, self._tables_told()))
        found, away = dict[int, pb.Position](), list[int]()
        positions = Positions(found)  # of those that have answered so far
        try:
            for index, call in calls.items():
                # Those that are too many may have ended; they have rows only if one before them says so.
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
            found |= self._declare(left[:1])  # it may know that those after it have ended
            away = [index for index in away if index not in found and index < self._expected(positions)]
        return Positions(found, tuple(away))

    def _expected(self, positions: Positions) -> int:
        """How many, of those that are known, have rows or are to have some."""
        wanted = self._wanted.servers if self._is_said else 0
        return min(max(wanted, positions.needed) or self._arrangement.servers, len(self._links))

    def _declare(self, servers: Iterable[int]) -> dict[int, pb.Position]:
        """To these servers, which are waited for; returns where they are."""
        return self._ask("Declare", dict.fromkeys(servers, self._tables_told()), patient=True)

    def _tables_told(self) -> pb.Tables:
        return tables_told(self._tables, self._run_id, self._seed, self._asynchronous)

    # --- the step's side

    def pull(self, step: int, ids: Sequence[np.ndarray]) -> list[np.ndarray]:
        return self.begin_pull(step, ids).result()

    def begin_pull(
        self, step: int, ids: Sequence[np.ndarray], last: Commit | None = None
    ) -> Begun[list[np.ndarray]]:
        shares = [Shares(each, self._arrangement) for each in ids]
        last_step = self._commit(step) if last is None else commit_told(last)
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
        """All rows of the table of this number, of the state that this worker has: ids int64 [n], each once,
        and rows float32 [n, dim]. Where the servers have just gone back to it, it is what they have. For a
        server that is away it waits: there is no ring any more that could be formed without it."""
        last, dim = self._last(), self._tables[table].dim
        request = pb.ListRequest(run_id=self._run_id, table=table, most=max(PAGE_BYTES // (8 + 4 * dim), 1))
        if last is not None:
            request.generation, request.step = self._generation, last.step + 1
            request.last.CopyFrom(self._commit(last.step + 1))
            request.arrangement.CopyFrom(self._arrangement.told())
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
        """The rows of these ids, float32 [n, dim], of the state that this worker has: initial ones, too."""
        last, dim = self._last(), self._tables[table].dim
        request = pb.PullRequest(run_id=self._run_id)
        if last is not None:
            request.generation, request.step = self._generation, last.step + 1
            request.last.CopyFrom(self._commit(last.step + 1))
            request.arrangement.CopyFrom(self._arrangement.told())
        found, most = np.empty((len(ids), dim), np.float32), max(PAGE_BYTES // (8 + 4 * dim), 1)
        for at in range(0, len(ids), most):
            share, requests = Shares(ids[at : at + most], self._arrangement), {}
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
        all_places = [places(ids, self._arrangement) for ids, _ in gradients]
        requests = {}
        for index in self._members:
            request = pb.StageRequest(run_id=self._run_id, generation=self._generation, step=step, rank=rank)
            for table, ((ids, values), told) in enumerate(zip(gradients, all_places, strict=True)):
                if (here := told(index)) is not None:  # `add`: in a list each would be copied
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
                    arrangement=self._arrangement.told(),
                )  # fmt: skip
                calls.append(link.write_part(request))
            for call in calls:
                call.taken()
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

    # --- below

    def _commit(self, step: int) -> pb.Commit | None:
        """Which step has led to the state of this one."""
        last = self._last()
        if last is None:
            return None
        if last.step != step - 1:
            raise RuntimeError(f"rows of step {step} are asked for, with the commit of step {last.step}")
        return commit_told(last)

    def _ask(
        self, method: str, requests: Mapping[int, Request], known: bool = False, patient: bool = False
    ) -> dict[int, Any]:
        """The answers of these servers, by index.

        Args:
            known: to be in this generation.
            patient: nobody can be done without.

        Raises:
            RingBroken: it is called off; or one is away that can be done without.
        """
        return Begun(self._begin(method, requests, known), lambda answers: answers, patient).result()

    def _begin(self, method: str, requests: Mapping[int, Request], known: bool = False) -> dict[int, Pending]:
        """Call these servers, all at the same time."""
        generation = self._generation if known else None
        return {
            index: self._links[index].begin(method, request, generation)
            for index, request in requests.items()
        }


@contextmanager
def _being_written(calls: Sequence[Writing]) -> Iterator[Callable[[], list[Part]]]:
    """Own these calls until the block ends. Inside, call the result to wait until all parts are written."""
    try:
        yield lambda: [part_of(call.written()) for call in calls]
    finally:
        _forget(calls)


def _forget(calls: Iterable[Writing]) -> None:
    for call in calls:
        call.forget()
