# SPDX-License-Identifier: Apache-2.0
"""One worker's client of all parameter servers of a job, in both update modes.

Ids map to servers by arithmetic (edl/contract/rows/buckets.py), and one operation calls all servers
concurrently. `server_group` knows the servers, their states and the shard assignment, and `root` brings all
servers to one state. The two modes differ in what a step sends and awaits:

    mode=hybrid   pull ─▶ stage                         the next call to a server carries the step's outcome
    mode=ps       lease_steps ─▶ pull_current ─▶ push   a push that is accepted counts

**Synchronous steps** (mode=hybrid). Promise: when `pull` returns, *every* server is at that step, including
servers that hold none of the rows. All ranks with the state pull before they join the step's all-reduce. So
when the all-reduce completes anywhere, no server is more than one step behind, and the next call to it
carries the result of that step. That result is part of the ledger (`Ledger.commit`), so every worker that
holds the state knows it. This module only reads it.

**Asynchronous SGD** (mode=ps). Promise: every server has each step that the coordinator has. Each server
accepts a step once, whichever worker pushes it and however often. So every call can be repeated. A step that
reached only some servers, because its worker died, is computed again and counts on the servers that lack it.
The coordinator is the first server that is not out: server 0, as long as each row is on one server. A server
that rolls back to a checkpoint starts a new `incarnation`: calls of the old one are rejected, as RingBroken.
The root of the next ring resolves that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from typing import Any, TypeVar

import numpy as np

from edl.checkpoints import CheckpointFile
from edl.contract.converted import written
from edl.contract.proto import ps_pb2 as pb
from edl.contract.rows.shares import IDS, VALUES
from edl.trainer.embedding.interfaces import Commit
from edl.trainer.ps_client.calls import Request, ServerAway, Writing
from edl.trainer.ps_client.interfaces import Pulled, StepGradients, TrainedOn, Values, Whole
from edl.trainer.ps_client.messages import (
    add_values,
    furthest_of,
    ids_asked,
    part_of,
    put_together,
    ranges_of,
    rows_per_page,
)
from edl.trainer.ps_client.pending import Begun, forget
from edl.trainer.ps_client.root import RootCalls
from edl.trainer.ring.base import RingBroken

T = TypeVar("T")
M = TypeVar("M")  # a message of ps.proto


class PsClient(RootCalls):
    """The servers of one job, as its workers use them. Arguments as in ServerGroup."""

    # --- synchronous steps

    def pull(self, step: int, ids: Sequence[np.ndarray]) -> list[np.ndarray]:
        return self.begin_pull(step, ids).result()

    def begin_pull(
        self, step: int, ids: Sequence[np.ndarray], last: Commit | None = None
    ) -> Begun[list[np.ndarray]]:
        commit = self._commit(step) if last is None else written(pb.Commit, last)
        fields = {"generation": self.generation, "step": step, "last": commit}
        return self._begin_pull(ids, lambda rows, _: rows, fields, known=True)

    def stage(self, step: int, rank: int, gradients: Values) -> None:
        self.begin_stage(step, rank, gradients).result()

    def begin_stage(self, step: int, rank: int, gradients: Values) -> Begun[None]:
        shares, requests = [self._shares(ids) for ids, _ in gradients], {}
        for index in self._members:
            request = self._request(pb.PushRequest, step=step, rank=rank)
            if add_values(request.gradients, index, gradients, shares):
                requests[index] = request
        return Begun(self._begin("Push", requests, known=True), lambda _: None)

    def _begin_pull(
        self,
        ids: Sequence[np.ndarray],
        made: Callable[[list[np.ndarray], Mapping[int, pb.Rows]], T],
        fields: Mapping[str, Any],
        known: bool = False,
        wait_forever: bool = False,
    ) -> Begun[T]:
        """Begin to pull rows from all servers.

        Args:
            made: returns the result, from the rows of each table and the answers by server.
            fields: further fields of the requests.
            known, wait_forever: as in `_ask`.
        """
        shares = [self._shares(each, copies=1)[0] for each in ids]
        requests = {
            index: pb.PullRequest(run_id=self._run_id, ids=ids_asked(index, shares), **fields)
            for index in self._members
        }

        def combined(answers: dict[int, pb.Rows]) -> T:
            return made(put_together(ids, self._tables, shares, requests, answers), answers)

        return Begun(self._begin("Pull", requests, known), combined, wait_forever)

    # --- asynchronous steps

    def lease_steps(self, worker: int, most: int, limit: int) -> list[int]:
        """Lease at most `most` steps below `limit`; updates `progress`.

        Returns:
            the steps; empty if other workers have leased all that remain.
        """
        first = self.coordinator
        requests = self._to_incarnations(pb.LeaseRequest, [first], worker=worker, most=most, limit=limit)
        leased = self._ask("Lease", requests)[first]
        self._told(leased.progress)
        return [step for start, stop in ranges_of(leased.steps) for step in range(start, stop)]

    def pull_current(self, ids: Sequence[np.ndarray]) -> Pulled:
        """Pull current rows of the unique ids of each table, int64 [n]."""

        def made(rows: list[np.ndarray], answers: Mapping[int, pb.Rows]) -> Pulled:
            return Pulled(rows, {index: answer.version for index, answer in answers.items()})

        return self._begin_pull(ids, made, {"assignment": self.assignment.to_proto()}).result()

    def push(self, made: StepGradients, worker: int, versions: Mapping[int, int]) -> bool:
        """Push a step's gradients to all servers.

        Args:
            versions: the versions of the weights that the step used, by server.

        Returns:
            False if the weights were too old: the step must be computed again.
        """
        shares = [self._shares(ids) for ids, _ in made.gradients]
        requests = self._to_incarnations(
            pb.PushRequest,
            self._members,
            step=made.step,
            worker=worker,
            learning_rate=made.learning_rate,
            loss=made.loss,
            records=made.records,
            skipped=made.skipped,
        )
        for index, request in requests.items():
            request.version = versions[index]
            add_values(request.gradients, index, made.gradients, shares)
        for some in self._coordinator_last(requests):
            answers = self._ask("Push", some)
            if self.coordinator in answers:
                self._told(answers[self.coordinator])
            if any(answer.refused for answer in answers.values()):
                return False
        return True

    def drain(self, step: int) -> None:
        """Make all servers apply the waiting steps below `step`. These steps are already accepted."""
        self._drain(self._members, step)

    def find_progress(self) -> Whole:
        """Refresh and return `progress`."""
        self._drain([self.coordinator], 0)  # drains no steps
        return self.progress

    def _drain(self, servers: Iterable[int], step: int) -> None:
        requests = self._to_incarnations(pb.DrainRequest, servers, step=step)
        self._told(self._ask("Drain", requests)[self.coordinator])

    def keep(self, step: int, order: int, ledger: bytes) -> None:
        """Store the ledger on all servers, unless they hold one of the same or a greater `order`.

        The coordinator comes last: so no other server lacks what it has.
        """
        requests = self._to_incarnations(
            pb.KeepRequest,
            self._members,
            step=step,
            order=order,
            ledger=ledger,
            repeated=self.progress.repeated,
        )
        for some in self._coordinator_last(requests):
            answers = self._ask("Keep", some)
        self._told(answers[self.coordinator])

    def kept(self) -> bytes:
        """Return the stored ledger; empty if the servers have stored no ledger."""
        first = self.coordinator
        kept: bytes = self._ask("Describe", {first: pb.DescribeRequest(kept=True)})[first].kept.ledger
        return kept

    def _to_incarnations(self, kind: Callable[..., M], servers: Iterable[int], **fields: Any) -> dict[int, M]:
        """A message to each of these servers, which a server of another incarnation rejects."""
        return {
            index: kind(run_id=self._run_id, incarnation=self._incarnations[index], **fields)
            for index in servers
        }

    def _coordinator_last(self, requests: dict[int, Request]) -> tuple[dict[int, Request], ...]:
        first = self.coordinator
        return {index: one for index, one in requests.items() if index != first}, {first: requests[first]}

    # --- rows of this worker's state

    def all_rows(self, table: int, step: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """All rows of a table, of this worker's state; waits for servers that are away.

        After a rollback without further steps, and in mode=ps, the servers' present state is read.

        Args:
            step: in mode=ps, require exactly the steps below it to be in the rows; 0: any.

        Returns:
            ids int64 [n], unique, and rows float32 [n, dim].

        Raises:
            RingBroken: a server lacks a step, or has lost its log meanwhile.
            TrainedOn: a server has accepted later steps.
        """
        before = {} if self._asynchronous is None else self._incarnations_with(step)
        dim, fields = self._tables[table].dim, self._state_fields()
        request = pb.ListRequest(run_id=self._run_id, table=table, most=rows_per_page(dim), **fields)
        asked = {index: deepcopy(request) for index in self._members}
        found: list[tuple[np.ndarray, np.ndarray]] = []
        while asked:
            for index, page in self._ask("List", asked, bool(fields), wait_forever=True).items():
                ids = np.frombuffer(page.ids, IDS)
                found.append((ids, np.frombuffer(page.rows, VALUES).reshape(len(ids), dim)))
                if page.more:
                    asked[index].after = int(ids[-1])
                else:
                    del asked[index]
        if before and (now := self._incarnations_with(step)) != before:
            changed = min(index for index in now if now[index] != before[index])
            raise RingBroken(f"parameter server {changed} has lost its log while its rows were read")
        return np.concatenate([ids for ids, _ in found]), np.concatenate([rows for _, rows in found])

    def rows_of(self, table: int, ids: np.ndarray) -> np.ndarray:
        """The rows of these ids, float32 [n, dim], of this worker's state, including initial rows."""
        dim, fields = self._tables[table].dim, self._state_fields()
        found, most, nothing = np.empty((len(ids), dim), np.float32), rows_per_page(dim), ids[:0]
        for at in range(0, len(ids), most):
            page = [*[nothing] * table, ids[at : at + most]]
            pulled = self._begin_pull(page, lambda rows, _: rows, fields, bool(fields), wait_forever=True)
            found[at : at + most] = pulled.result()[table]
        return found

    def _state_fields(self) -> dict[str, Any]:
        """The fields of a request for rows of this worker's state; empty if the present rows are read."""
        if (last := self._last()) is None:
            return {}
        return {
            "generation": self.generation,
            "step": last.step + 1,
            "last": written(pb.Commit, last),
            "assignment": self.assignment.to_proto(),
        }

    def _incarnations_with(self, step: int) -> dict[int, str]:
        """Return the incarnation of each server. Every server must have the steps below `step`.

        This waits for servers that are away.

        Raises:
            RingBroken: a server has lost its log and rows, or the ring was cut.
            TrainedOn: a server has accepted later steps.
        """
        found = self._ask("Describe", dict.fromkeys(self._members, pb.DescribeRequest()), wait_forever=True)
        for index, told in found.items():
            if told.position.empty:
                raise RingBroken(f"parameter server {index} has lost its log and rows")
            if told.waiting or not ranges_of(told.accepted).covers(0, step):
                raise RingBroken(f"parameter server {index} has lost its log, and some of {step:,} steps")
            if step and furthest_of([told]) > step:
                raise TrainedOn(
                    f"parameter server {index} has accepted steps after step {step:,} of the model"
                )
        return {index: told.incarnation for index, told in found.items()}

    # --- checkpoints

    def take_parts(
        self, step: int, attempt: str, first: int
    ) -> AbstractContextManager[Callable[[], list[CheckpointFile]]]:
        """Have each server snapshot its part of a checkpoint of this step, and write it in the background.

        When this returns, all servers have made their snapshots.

        Args:
            first: the number of parts before theirs.

        Returns:
            a context manager, to be entered once. Inside, call its value to wait until all parts are written.
            On exit, unwritten parts are given up.

        Raises:
            CheckpointError: a server could not. The context's value raises it, too.
            PartNotWritten: a server went away before. The context's value raises it, too.
        """
        calls: list[Writing] = []
        try:
            for number, index in enumerate(self._members):
                request = pb.WritePartRequest(
                    run_id=self._run_id,
                    generation=self.generation if self._asynchronous is None else 0,
                    step=step,
                    last=self._commit(step),
                    attempt=attempt,
                    index=first + number,
                    of=first + self.count,
                    assignment=self.assignment.to_proto(),
                )
                calls.append(self._links[index].write_part(request))
            for call in calls:
                call.captured()
        except BaseException:
            forget(calls)
            raise
        return _being_written(calls)

    def answer_within(self, seconds: float) -> bool:
        """Whether all servers answer within the time limit, including servers that return meanwhile.

        Raises:
            RingBroken: the call was called off.
        """
        calls = self._begin("Describe", dict.fromkeys(self._members, pb.DescribeRequest()))
        try:
            for call in calls.values():
                call.result(wait_forever=True, within=seconds)
        except ServerAway:
            return False
        finally:
            forget(calls.values())
        return True

    def committed(self, step: int, attempt: str) -> None:
        """Report that the checkpoint is complete. Fails silently: the next checkpoint reports more."""
        for index in self._members:
            request = pb.CommittedRequest(run_id=self._run_id, step=step, attempt=attempt)
            self._links[index].tell("Committed", request)


@contextmanager
def _being_written(calls: Sequence[Writing]) -> Iterator[Callable[[], list[CheckpointFile]]]:
    """Own these calls until the block ends. The yielded function waits until all shards are written."""
    try:
        yield lambda: [part_of(call.written()) for call in calls]
    finally:
        forget(calls)
