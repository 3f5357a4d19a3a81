# SPDX-License-Identifier: Apache-2.0
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

`server_group` knows the servers and their states, and `recovery` derives the shard assignment from them.

The result of a step is part of the ledger (`Ledger.commit`), so every worker that holds the state knows it.
This module only reads it (`follow`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy

import numpy as np

from edl.checkpoints import Part
from edl.contract.proto import ps_pb2 as pb
from edl.contract.rows.shares import IDS, PAGE_BYTES, VALUES, Shares, encoded, put
from edl.trainer.embedding.interfaces import Commit, Start
from edl.trainer.ps_client.calls import Link, ServerAway, ServerRefused, Writing
from edl.trainer.ps_client.interrupt import Interrupt
from edl.trainer.ps_client.link import ServerLink
from edl.trainer.ps_client.messages import (
    commit_to_proto,
    ids_asked,
    part_of,
    places,
    put_together,
    start_to_proto,
)
from edl.trainer.ps_client.pending import Begun
from edl.trainer.ps_client.recovery import why_behind
from edl.trainer.ps_client.server_group import ServerGroup
from edl.trainer.ring.base import RingBroken

TIMEOUT_SECONDS = 3.0


class PsClient(ServerGroup):
    """The servers of one job, as a ring with synchronous steps uses them. Arguments as in ServerGroup."""

    @classmethod
    def at(
        cls,
        addresses: Sequence[str],
        token: str,
        run_id: str,
        seed: int,
        replicas: int = 1,
        timeout: float = TIMEOUT_SECONDS,
    ) -> PsClient:
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

    # --- forming a ring

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
        chosen, why = self._states.choose_assignment(step, self._wanted, last)
        while not chosen.is_whole and self._states.away:
            # A server that is away may hold the missing rows.
            self._wait_for(self._states.away[:1])  # or know that later servers have ended
            chosen, why = self._states.choose_assignment(step, self._wanted, last)
        if not chosen.is_whole:
            return why
        self._assignment = chosen  # not before: if this ring is cut meanwhile, this worker may save the model
        if not step and (lost := [index for index in self._states.lost if index in self._members]):
            # It would start with default initial rows, and this job's are loaded from elsewhere.
            return f"parameter server {lost[0]} has lost its log and rows"
        request = pb.StartGenerationRequest(
            run_id=self._run_id,
            generation=self._generation,
            step=step,
            last=self._commit(step),
            assignment=self._assignment.to_proto(),
        )
        positions = self._ask("StartGeneration", dict.fromkeys(self._members, request))
        behind = (why_behind(index, position, step) for index, position in positions.items())
        return "; ".join(filter(None, behind))

    def restore(self, step: int, attempt: str) -> None:
        self._assignment = self._wanted.without(self._states.away)
        if not self._assignment.is_whole:
            self._assignment = self._wanted
            self._wait_for(self._members)
        request = pb.RestoreRequest(
            run_id=self._run_id,
            generation=self._generation,
            step=step,
            attempt=attempt,
            assignment=self._assignment.to_proto(),
        )
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
                    run_id=self._run_id,
                    generation=self._generation,
                    values=[
                        pb.Gradients(
                            table=number,
                            ids=encoded(ids[at : at + most][here], IDS),
                            values=encoded(page[here], VALUES),
                        )
                    ],
                )
                for index in self._members
                if (here := told(index)) is not None
            }
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
            run_id=self._run_id,
            generation=self._generation,
            step=step,
            last=self._commit(step),
            of=of.to_proto(),
            to=to.to_proto(),
            addresses=self._addresses,
        )
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
                run_id=self._run_id,
                generation=self._generation,
                step=step,
                last=last_step,
                ids=ids_asked(index, shares),
            )
            for index in self._members
        }
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

    # --- private

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
