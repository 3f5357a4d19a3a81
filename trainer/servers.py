"""All parameter servers of a job, as one worker sees them: which server has which row is arithmetic
(edl/contract/buckets.py), and what one call asks of several servers is asked of all at the same time.

Promise: when `pull` returns, *every* server is at that step, also one that has none of the rows. All ranks
that have the state pull before they take part in a step's sums. So when the sums have come back anywhere, no
server is further behind than this one step, and what is said to the servers next says what became of it.

What that is stands in the ledger, beside the number of the step (`Ledger.commit`): whoever has the state
knows it, however it came by it. This module only asks for it (`follow`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from typing import Any

import numpy as np

from edl.checkpoints import Part
from edl.contract.buckets import owners
from edl.contract.proto import ps_pb2 as pb
from edl.contract.rows import IDS, PAGE_BYTES, VALUES, Shares, encoded, put
from edl.errors import EdlError
from trainer.roles import Commit, Start, Table
from trainer.server_link import Interrupt, Link, Request, ServerLink, ServerRefused, Writing

WORKERS = 1 << 20  # a generation is a number of its own, and that of the worker who claimed it


class ParameterServers:
    """The servers of one job.

    Args:
        links: one for each, by index.
        run_id: of the job.
        seed: of the job: rows are born from it.
        interrupt: breaks the calls of all links off.
    """

    def __init__(self, links: Sequence[Link], run_id: str, seed: int, interrupt: Interrupt | None = None):
        self._links, self._run_id, self._seed = links, run_id, seed
        self._interrupt = interrupt or Interrupt()
        self._tables: tuple[Table, ...] = ()
        self._last: Callable[[], Commit | None] = lambda: None
        self._generation = 0
        self._found: dict[int, pb.Position] = {}  # where they were when a generation was claimed
        self._start = Start()  # what the next `restore` of step 0 begins with
        owners(len(links))  # computed once, not in the first step

    @classmethod
    def at(cls, addresses: Sequence[str], token: str, run_id: str, seed: int) -> ParameterServers:
        """Those at these addresses, host:port by index."""
        interrupt = Interrupt()
        links = [ServerLink(index, address, token, interrupt) for index, address in enumerate(addresses)]
        return cls(links, run_id, seed, interrupt)

    @property
    def count(self) -> int:
        return len(self._links)

    # --- the loop's side

    def follow(self, tables: Sequence[Table], last: Callable[[], Commit | None]) -> None:
        self._tables, self._last = tuple(tables), last

    def enter(self) -> None:
        self._interrupt.arm()

    def claim(self, worker: int) -> int:
        """Greater than all that a server knows. Of two roots that ask at the same time, as when one has been
        given up, each gets another number: it ends with the worker's."""
        self._found = self._declare()
        newest = max((position.generation for position in self._found.values()), default=0)
        return (newest // WORKERS + 1) * WORKERS + worker % WORKERS

    @property
    def generation(self) -> int:
        return self._generation

    def speak_of(self, generation: int) -> None:
        self._generation = generation

    def leave(self) -> None:
        self._interrupt.arm()

    def cut(self) -> None:
        self._interrupt.cut()

    def begin_with(self, start: Start) -> None:
        """The next `restore` of step 0 begins with these rows: once, for they may be many."""
        self._start = start

    def settle(self, step: int) -> str:
        if why := "; ".join(filter(None, map(self._dropped, self._found, repeat(step)))):
            return why
        if not step and (lost := [index for index, position in self._found.items() if position.empty]):
            # It would begin anew, and this job's rows do not begin as new ones do.
            return f"parameter server {lost[0]} has lost its log and rows"
        request = pb.SettleRequest(
            run_id=self._run_id, generation=self._generation, step=step, last=self._commit(step)
        )
        positions = self._ask("Settle", dict.fromkeys(range(self.count), request))
        behind = (_behind(index, position, step) for index, position in positions.items())
        return "; ".join(filter(None, behind))

    def restore(self, step: int, attempt: str) -> None:
        request = pb.RestoreRequest(
            run_id=self._run_id, generation=self._generation, step=step, attempt=attempt
        )
        if not step and (start := self._start).tables:
            request.start.CopyFrom(
                pb.Start(
                    directory=start.directory, step=start.step, attempt=start.attempt,
                    everything=start.everything, tables=start.tables,
                )
            )  # fmt: skip
        for index, position in self._ask("Restore", dict.fromkeys(range(self.count), request)).items():
            if position.step != step:
                raise ServerRefused(
                    f"parameter server {index} was to go back to step {step:,}, and is at {position.step:,}"
                )
        self._declare()  # to those that came back meanwhile with nothing
        if not step:
            for number, (ids, rows) in self._start.rows.items():
                self._load(number, ids, rows)
            self._start = Start()

    def _load(self, number: int, ids: np.ndarray, rows: np.ndarray) -> None:
        """Give all servers their rows of a table, page by page."""
        most = max(PAGE_BYTES // (8 + 4 * self._tables[number].dim), 1)
        for at in range(0, len(ids), most):
            share = Shares(ids[at : at + most], self.count)
            requests = {
                index: pb.LoadRequest(
                    run_id=self._run_id, generation=self._generation,
                    values=[
                        pb.Gradients(
                            table=number, ids=encoded(share.ids[share.of(index)], IDS),
                            values=encoded(rows[at : at + most][share.of(index)], VALUES),
                        )
                    ],
                )
                for index in range(self.count)
                if share.has(index)
            }  # fmt: skip
            self._ask("Load", requests, known=True)

    def _declare(self) -> dict[int, pb.Position]:
        """To all servers; returns where they are."""
        tables = pb.Tables(
            run_id=self._run_id,
            seed=self._seed,
            tables=[
                pb.Table(
                    name=t.name, dim=t.dim, initializer=t.initializer, optimizer=t.optimizer,
                    own_learning_rate=t.own_learning_rate, min_count=t.min_count, ttl_steps=t.ttl_steps,
                )
                for t in self._tables
            ],
        )  # fmt: skip
        return self._ask("Declare", dict.fromkeys(range(self.count), tables))

    # --- the step's side

    def pull(self, step: int, ids: Sequence[np.ndarray]) -> list[np.ndarray]:
        shares = [Shares(each, self.count) for each in ids]
        last = self._commit(step)
        requests = {
            index: pb.PullRequest(
                run_id=self._run_id, generation=self._generation, step=step, last=last,
                ids=[
                    pb.Ids(table=table, ids=encoded(share.ids[share.of(index)], IDS))
                    for table, share in enumerate(shares)
                    if share.has(index)
                ],
            )
            for index in range(self.count)
        }  # fmt: skip
        found = [np.empty((len(each), t.dim), np.float32) for each, t in zip(ids, self._tables, strict=False)]
        for index, answer in self._ask("Pull", requests, known=True).items():
            asked = requests[index].ids
            if len(answer.rows) != len(asked):
                raise EdlError(f"parameter server {index} has sent rows of {len(answer.rows)} tables, "
                               f"asked for {len(asked)}")  # fmt: skip
            for one, rows in zip(asked, answer.rows, strict=True):
                put(found[one.table], shares[one.table].of(index), rows, index)
        return found

    def all_rows(self, table: int) -> tuple[np.ndarray, np.ndarray]:
        """All rows of the table of this number, of the state that this worker has: ids int64 [n], each once,
        and rows float32 [n, dim]. Where the servers have just gone back to it, it is what they have."""
        last, dim = self._last(), self._tables[table].dim
        request = pb.ListRequest(run_id=self._run_id, table=table, most=max(PAGE_BYTES // (8 + 4 * dim), 1))
        if last is not None:
            request.generation, request.step = self._generation, last.step + 1
            request.last.CopyFrom(self._commit(last.step + 1))
        asked = {index: _copied(request) for index in range(self.count)}
        found: list[tuple[np.ndarray, np.ndarray]] = []
        while asked:
            for index, page in self._ask("List", asked, known=last is not None).items():
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
        found, most = np.empty((len(ids), dim), np.float32), max(PAGE_BYTES // (8 + 4 * dim), 1)
        for at in range(0, len(ids), most):
            share, requests = Shares(ids[at : at + most], self.count), {}
            for index in range(self.count):
                requests[index] = pb.PullRequest()
                requests[index].CopyFrom(request)
                requests[index].ids.add(table=table, ids=encoded(share.ids[share.of(index)], IDS))
            for index, answer in self._ask("Pull", requests, known=last is not None).items():
                put(found[at : at + most], share.of(index), b"".join(answer.rows), index)
        return found

    def stage(self, step: int, rank: int, gradients: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        shares = [Shares(ids, self.count) for ids, _ in gradients]
        requests = {}
        for index in range(self.count):
            theirs = [
                pb.Gradients(
                    table=table,
                    ids=encoded(ids[share.of(index)], IDS),
                    values=encoded(values[share.of(index)], VALUES),
                )
                for table, ((ids, values), share) in enumerate(zip(gradients, shares, strict=True))
                if share.has(index)
            ]
            if theirs:
                requests[index] = pb.StageRequest(
                    run_id=self._run_id, generation=self._generation, step=step, rank=rank, gradients=theirs
                )
        self._ask("Stage", requests, known=True)

    # --- checkpoints

    def take_parts(self, step: int, attempt: str, first: int) -> Callable[[], list[Part]]:
        calls: list[Writing] = [
            link.write_part(
                pb.WritePartRequest(
                    run_id=self._run_id, generation=self._generation, step=step, last=self._commit(step),
                    attempt=attempt, index=first + index, of=first + self.count,
                )
            )
            for index, link in enumerate(self._links)
        ]  # fmt: skip
        for call in calls:
            call.taken()
        return lambda: [_part(call.written()) for call in calls]

    def committed(self, step: int, attempt: str) -> None:
        for link in self._links:
            link.tell("Committed", pb.CommittedRequest(run_id=self._run_id, step=step, attempt=attempt))

    # --- below

    def _dropped(self, index: int, step: int) -> str:
        """Whether a server that lacks the last step has not got its gradients any more: another ring, without
        this worker, has gone on from the step before. In words; empty: it has them."""
        found, last = self._found[index], self._last()
        if found.step != step - 1 or found.empty or (last and last.generation == found.generation):
            return ""
        return f"parameter server {index} has dropped what was staged for step {step:,}"

    def _commit(self, step: int) -> pb.Commit | None:
        """Which step has led to the state of this one."""
        last = self._last()
        if last is None:
            return None
        if last.step != step - 1:
            raise RuntimeError(f"rows of step {step} are asked for, with the commit of step {last.step}")
        return pb.Commit(
            step=last.step, skipped=last.skipped, scale=last.scale, learning_rate=last.learning_rate,
            iteration=last.iteration,
        )  # fmt: skip

    def _ask(self, method: str, requests: Mapping[int, Request], known: bool = False) -> dict[int, Any]:
        """The answers of these servers, by index.

        Args:
            known: to be in this generation.
        """
        generation = self._generation if known else None
        calls = {
            index: self._links[index].begin(method, request, generation)
            for index, request in requests.items()
        }
        try:
            return {index: call.result() for index, call in calls.items()}
        finally:
            for call in calls.values():
                call.forget()


def _copied(request: pb.ListRequest) -> pb.ListRequest:
    copy = pb.ListRequest()
    copy.CopyFrom(request)
    return copy


def _part(written: pb.Written) -> Part:
    return Part(written.name, written.nbytes, written.sha256.hex())


def _behind(index: int, position: pb.Position, step: int) -> str:
    """Why a ring at this step cannot go on with a server that is there; empty: it can."""
    if position.empty and step:
        return f"parameter server {index} has lost its log and rows"
    if position.step != step:
        return f"parameter server {index} is at step {position.step:,}, the ring at step {step:,}"
    return ""
