"""All parameter servers of a job in which workers take steps in any order (mode=ps), as one worker sees them.

    take    the coordinator says which steps this worker makes
    pull    rows as they are now, of all tables: those of the batch, and the dense weights
    push    what a step has to teach, to all servers but the coordinator, and then to that one

Promise: a step that the coordinator has, all servers have. Each server takes each step once, whoever brings
it and however often: so every call may be made again, and a step that was pushed to some servers only,
because its worker died, is made again and counts where it is missing. The coordinator is the first server
that is not out: server 0, as long as each row is on one server.

A server that went back to a checkpoint is on another `line`: whoever speaks of the one before is refused, and
finds that as RingBroken. The root of the next ring sees to it.

**Another arrangement**: when all have taken the same steps, they stand still, those that are to have more
rows fetch them, and all go over, one of them first. Where that one is, all belong: the root of each ring has
all servers stand still, and go on in the newest arrangement that one of them knows (`take_charge`). Whoever
was a root before is not heard any more.

**Where each row is on two servers**, both take each step, each in its own order: so each copy has learned
each step once, and they differ as much as steps do that are made in another order. A server that is away
is left out; it comes back as one that is to have more rows. If only those come back that were left out, they
know themselves as members and go on: what they lack is made again, as of servers that have lost their logs.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np

from edl.contract.proto import ps_pb2 as pb
from edl.contract.ranges import Range, RangeSet
from edl.contract.rows.placement import Arrangement
from edl.contract.rows.shares import IDS, PAGE_BYTES, VALUES, Shares, encoded
from edl.trainer.embedding.interfaces import Start, Table
from edl.trainer.ps_client.client import ParameterServers
from edl.trainer.ps_client.interfaces import Pulled, StepGradients, TrainedOn, Whole
from edl.trainer.ps_client.link import Interrupt, Link, Request, ServerRefused
from edl.trainer.ps_client.messages import ids_asked, put_together, start_told
from edl.trainer.ps_client.recovery import Going, going
from edl.trainer.ring.base import RingBroken

LAST = 1 << 62  # more steps than any job has
NOWHERE = -1  # no step: rows need not move
Values = Sequence[tuple[np.ndarray, np.ndarray]]  # of each table: ids int64 [n], float32 [n, dim]


class StepServers(ParameterServers):
    """The servers of one job.

    Args:
        links, run_id, seed, interrupt, replicas, connect, addresses: as of ParameterServers.
        grads_to_wait, max_staleness, scale_rate: see ps.proto, Asynchronous.
    """

    def __init__(
        self, links: Sequence[Link], run_id: str, seed: int, interrupt: Interrupt | None = None,
        grads_to_wait: int = 1, max_staleness: int = 0, scale_rate: bool = False, replicas: int = 1,
        connect: Callable[[int, str], Link] | None = None, addresses: Sequence[str] = (),
    ):  # fmt: skip
        super().__init__(links, run_id, seed, interrupt, replicas, connect, addresses)
        self._asynchronous = pb.Asynchronous(
            grads_to_wait=grads_to_wait, max_staleness=max_staleness, scale_rate=scale_rate
        )
        self._lines: dict[int, str] = {}
        self._known: dict[bytes, tuple[Shares, ...]] = {}  # of ids that are asked for again and again
        self._there: tuple[int, ...] = ()  # servers that have rows, or are to have some, and answer
        self._claimed = 0  # the generation in which this worker has had servers stand still
        self.furthest = 0  # of the steps that any server has taken, the one after the last
        self.progress = Whole()  # as the coordinator has told it last

    def declare(self, tables: Sequence[Table]) -> None:
        """The tables of this job, for all calls from now on."""
        self._tables = tuple(tables)

    @property
    def coordinator(self) -> int:
        return self._arrangement.coordinator

    # --- where they are

    def look(self, patient: bool = False) -> dict[int, pb.Description]:
        """What each server has, and of which line it is: calls from now on are of that one.

        Args:
            patient: nobody can be done without.
        """
        self._ask("Declare", dict.fromkeys(self._members, self._tables_told()), patient=patient)
        found = self._ask("Describe", dict.fromkeys(self._members, pb.DescribeRequest()), patient=patient)
        self._lines = {index: told.line for index, told in found.items()}
        self.furthest = _furthest(found)
        return found

    def begin(self, values: Values, only: Iterable[int] | None = None) -> None:
        """The job begins, with these rows.

        Args:
            only: on these servers; None: on all.
        """
        asked, start = tuple(self._members if only is None else only), self._start
        attempt = secrets.token_hex(8) if start.tables or start.rows else ""
        pages = [*self._pages_of(start), values] if attempt else [values]
        for number, page in enumerate(pages):
            shares = [self._shares(ids) for ids, _ in page]
            requests = {
                index: pb.BeginRequest(
                    run_id=self._run_id, values=_of(index, page, shares), attempt=attempt, page=number,
                    arrangement=self._arrangement.told(), since=self._claimed,
                    more=number + 1 < len(pages),
                    start=start_told(start) if attempt and not number else None,
                )
                for index in asked
            }  # fmt: skip
            for index, progress in self._ask("Begin", requests).items():
                self._lines[index] = progress.line
        self._start = Start()

    def _pages_of(self, start: Start) -> Iterator[Values]:
        """The rows that the job begins with, and that no server can read by itself."""
        nothing = [(np.zeros(0, np.int64), np.zeros((0, t.dim), np.float32)) for t in self._tables]
        for number, (ids, rows) in start.rows.items():
            most = max(PAGE_BYTES // (8 + 4 * self._tables[number].dim), 1)
            for at in range(0, len(ids), most):
                here = slice(at, at + most)
                yield [*nothing[:number], (ids[here], rows[here]), *nothing[number + 1 :]]

    def go_back(self, step: int, attempt: str) -> None:
        """All servers go back to the checkpoint of this step; 0: they have nothing then."""
        self._restore(self._members, step, attempt, self._claimed)

    def bring_back(self, lost: Sequence[int], step: int, attempt: str) -> None:
        """Servers that have lost all that they had begin with their parts of that checkpoint. What they lack
        then is made again, once they are introduced."""
        self._restore(lost, step, attempt, 0)

    def introduce(self) -> None:
        """Tell the coordinator in which line the others are, and what they lack there: that is made again,
        whatever the coordinator has. Before anybody makes a step with them."""
        first = self.coordinator
        for index, told in self.look().items():
            if index == first:
                continue
            lack = RangeSet.of([(0, LAST)]).minus(_ranges(told.taken))
            request = pb.ReopenRequest(
                run_id=self._run_id, line=self._lines[first], server=index, server_line=told.line,
                steps=pb.Steps(bounds=[bound for piece in lack for bound in piece]),
            )  # fmt: skip
            progress = self._ask("Reopen", {first: request})[first]
            self._lines[first] = progress.line
            self._told(progress)

    def _restore(self, some: Iterable[int], step: int, attempt: str, generation: int) -> None:
        request = pb.RestoreRequest(
            run_id=self._run_id, generation=generation, step=step, attempt=attempt,
            arrangement=self._arrangement.told(),
        )  # fmt: skip
        self._ask("Restore", dict.fromkeys(some, request))
        self.look()

    # --- another arrangement

    def take_charge(self, worker: int, step: int = 0) -> bool:
        """The root of a new ring: from now on no earlier one is heard, and all servers go on in the
        arrangement in which they have the rows. A move that was begun is ended, or given up.

        Args:
            step: that all servers had reached in the ring before. If those that answer have not, one that is
                away has more, and is waited for.

        Returns:
            whether rows are lost that were on two servers: then all servers are to go back.
        """
        of = self._stand_still(worker, step)
        self._go_on(of)
        return bool(of.missing)

    def moves_at(self) -> int:
        """The step at which rows can move to where they are to be: when all below it are made, all servers
        have the same ones. NOWHERE: they are there."""
        return self.furthest if self.moves else NOWHERE

    def move_rows(self, worker: int) -> tuple[int, str]:
        """Have the rows moved to where they are to be. By one worker, while nobody makes a step.

        Returns:
            the step at which they can, since not all servers have the same steps now; NOWHERE: they have
                moved, or stay.
            why they stay where they are; empty: they do not.

        Raises:
            RingBroken: it is called off. One arrangement is whole then, and the next root finds it.
        """
        place = self._stand_still(worker)
        of, to, why = place.arrangement, self._wanted.without(self._positions.away), ""
        told = self._ask("Describe", dict.fromkeys(of.members, pb.DescribeRequest()))
        first = told[of.coordinator]
        if any(one.taken != first.taken or one.waiting or one.position.empty for one in told.values()):
            self._go_on(place)
            self.look()
            return self.furthest, ""
        if to == of or not to.is_whole:  # who was to have more rows is away
            self._go_on(place)
            self.introduce()
            return NOWHERE, ""
        fetch = pb.FetchRequest(
            run_id=self._run_id, generation=self._claimed, of=of.told(), to=to.told(),
            addresses=self._addresses, steps=first.taken, version=max(one.version for one in told.values()),
            kept=self._ask("Kept", {of.coordinator: pb.KeptRequest(run_id=self._run_id)})[of.coordinator],
        )  # fmt: skip
        gaining = [index for index in to.members if (to.held(index) & ~of.held(index)).any()]
        try:
            self._ask("Fetch", dict.fromkeys(gaining, fetch))
        except ServerRefused as error:
            self._go_on(place)
            why = str(error)
        else:
            self._go_on(Going(to, fetched=self._claimed))
        self.introduce()
        return NOWHERE, why

    def restart_as(self, servers: int) -> None:
        """None of them has rows that count: so many begin, as those did whose checkpoint is gone back to, if
        there are so many; then the rows move, also to a second server. Each has a part of its own then, of
        whatever steps."""
        if 0 < servers <= len(self._links):
            self.adopt(Arrangement(servers))

    def adopt(self, arrangement: Arrangement, addresses: Sequence[str] = ()) -> None:
        super().adopt(arrangement, addresses)
        self._known.clear()

    def _stand_still(self, worker: int, step: int = 0) -> Going:
        """Have all servers stand still that answer, and all that are needed. Returns in which arrangement
        they can go on.

        Args:
            step: as of `take_charge`.
        """
        self._claimed = self.claim(worker)
        while True:
            self._claims_above = self._claimed  # the next must be greater, whatever servers have lost
            most, away = self._expected(self._positions), self._positions.away
            self._there = tuple(index for index in range(most) if index not in away)
            request = pb.SettleRequest(run_id=self._run_id, generation=self._claimed)
            told = self._ask("Settle", dict.fromkeys(self._there, request))
            of = going(told)
            if of is None:
                if not away:  # else that one may have all of it
                    return Going(self._wanted)
            elif not away or not ({*of.missing} & {*away} or _behind(told, of, step)):
                if of.arrangement.servers > len(self._links):
                    raise RingBroken(
                        f"rows are on {of.arrangement}, and the master has named {len(self._links)} so far"
                    )
                return of
            self._find_late(away[:1])  # it may have what is missing
            self._claimed = self._next_generation()

    def _go_on(self, of: Going) -> None:
        """Have all servers go on, in this arrangement."""
        to = of.arrangement
        request = pb.ArrangeRequest(
            run_id=self._run_id, generation=self._claimed, to=to.told(), since=of.since or self._claimed,
            fetched=of.fetched,
        )  # fmt: skip
        first = to.coordinator
        for some in ([first], [index for index in self._there if index != first]):
            self._ask("Arrange", dict.fromkeys(some, request))
        self.adopt(to)

    # --- what the workers have to know beside the weights

    def keep(self, step: int, order: int, ledger: bytes) -> None:
        """All servers keep it: the coordinator last, so that it is nowhere lost that has it."""
        requests = {
            index: pb.KeepRequest(
                run_id=self._run_id, line=self._lines[index], step=step, order=order, ledger=ledger,
                repeated=self.progress.repeated,
            )
            for index in self._members
        }  # fmt: skip
        for some in self._coordinator_last(requests):
            answers = self._ask("Keep", some)
        self._told(answers[self.coordinator])

    def kept(self) -> bytes:
        """Empty: nothing was kept yet."""
        first = self.coordinator
        kept: bytes = self._ask("Kept", {first: pb.KeptRequest(run_id=self._run_id)})[first].ledger
        return kept

    # --- steps

    def take(self, worker: int, most: int, limit: int) -> list[int]:
        """Steps below `limit` that this worker is to make; none: there are none that nobody makes. How far
        all are is in `progress` then."""
        first = self.coordinator
        request = pb.TakeRequest(
            run_id=self._run_id, line=self._lines[first], worker=worker, most=most, limit=limit
        )
        taken = self._ask("Take", {first: request})[first]
        self._told(taken.progress)
        return [step for start, stop in _ranges(taken.steps) for step in range(start, stop)]

    def rows_now(self, ids: Sequence[np.ndarray]) -> Pulled:
        """
        Args:
            ids: of each table, int64 [n], each once.
        """
        shares = [self._shares(each)[0] for each in ids]
        requests = {
            index: pb.PullRequest(
                run_id=self._run_id, arrangement=self._arrangement.told(), ids=ids_asked(index, shares)
            )
            for index in self._members
        }
        answers = self._ask("Pull", requests)
        found = put_together(ids, self._tables, shares, requests, answers)
        return Pulled(found, {index: answer.version for index, answer in answers.items()})

    def all_rows(self, table: int, step: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """
        Args:
            step: all below it are in the rows, and no others are; 0: it does not matter.

        Raises:
            RingBroken: a server lacks one or has another one, or has lost its log meanwhile.
        """
        before = self._lines_with(step)
        found = super().all_rows(table)
        for index, line in self._lines_with(step).items():
            if line != before[index]:
                raise RingBroken(f"parameter server {index} has lost its log while its rows were read")
        return found

    def _lines_with(self, step: int) -> dict[int, str]:
        """In which line each server has all steps below this one. Raises: RingBroken, if one has not. For one
        that is away it waits, as for its rows."""
        found = self._ask("Describe", dict.fromkeys(self._members, pb.DescribeRequest()), patient=True)
        for index, told in found.items():
            if told.position.empty:
                raise RingBroken(f"parameter server {index} has lost its log and rows")
            if told.waiting or not _ranges(told.taken).covers(0, step):
                raise RingBroken(f"parameter server {index} has lost its log, and some of {step:,} steps")
            if step and _furthest({index: told}) > step:
                raise TrainedOn(f"parameter server {index} has taken steps after the {step:,} of the model")
        return {index: told.line for index, told in found.items()}

    def push(self, made: StepGradients, worker: int, versions: Mapping[int, int]) -> bool:
        """Bring a step's gradients. False: a server refuses them, since the weights were too old; the step is
        to be made again.

        Args:
            versions: of the weights that they were made with, on each server.
        """
        shares = [self._shares(ids) for ids, _ in made.gradients]
        requests = {
            index: pb.PushRequest(
                run_id=self._run_id, line=self._lines[index], step=made.step, worker=worker,
                version=versions[index], learning_rate=made.learning_rate,
                gradients=_of(index, made.gradients, shares),
                loss=made.loss, records=made.records, skipped=made.skipped,
            )
            for index in self._members
        }  # fmt: skip
        for some in self._coordinator_last(requests):
            answers = self._ask("Push", some)
            if self.coordinator in answers:
                self._told(answers[self.coordinator])
            if any(answer.refused for answer in answers.values()):
                return False
        return True

    def drain(self, step: int) -> None:
        """All steps below it are here: have all servers apply what waits for others."""
        requests = {
            index: pb.DrainRequest(run_id=self._run_id, line=self._lines[index], step=step)
            for index in self._members
        }
        self._told(self._ask("Drain", requests)[self.coordinator])

    def find(self) -> None:
        """Have the coordinator tell how far the job is."""
        first = self.coordinator
        request = pb.DrainRequest(run_id=self._run_id, line=self._lines[first], step=0)  # of no steps
        self._told(self._ask("Drain", {first: request})[first])

    def pause(self, seconds: float) -> None:
        """Raises: RingBroken, as soon as the ring is cut."""
        if self._interrupt.wait(seconds):
            raise RingBroken("the ring was cut")

    def _told(self, progress: pb.Progress) -> None:
        p = progress
        self.progress = Whole(p.step, p.loss, p.records, p.version, p.repeated)

    def _shares(self, ids: np.ndarray) -> tuple[Shares, ...]:
        """Who is asked for which of these ids, and who has them beside that one. Those of the dense weights
        are the same again and again."""
        key = id(ids).to_bytes(8, "little")
        if not ids.flags.writeable and (known := self._known.get(key)) is not None and known[0].ids is ids:
            return known
        of = self._arrangement
        shares = tuple(Shares(ids, of, second) for second in ((False, True) if of.copies > 1 else (False,)))
        if not ids.flags.writeable:
            self._known[key] = shares
        return shares

    def _coordinator_last(self, requests: dict[int, Request]) -> tuple[dict[int, Request], ...]:
        first = self.coordinator
        return {index: one for index, one in requests.items() if index != first}, {first: requests[first]}


def _of(index: int, values: Values, shares: Sequence[Sequence[Shares]]) -> list[pb.Gradients]:
    """What of them a server is told, of all their copies."""
    found = []
    for table, ((ids, rows), copies) in enumerate(zip(values, shares, strict=True)):
        if mine := [share.of(index) for share in copies if share.has(index)]:
            here = mine[0] if len(mine) == 1 else np.concatenate(mine)
            found.append(
                pb.Gradients(table=table, ids=encoded(ids[here], IDS), values=encoded(rows[here], VALUES))
            )
    return found


def _behind(told: Mapping[int, pb.Position], of: Going, step: int) -> bool:
    """Whether servers that are to go on have not reached this step."""
    return any(index in told and told[index].step < step for index in of.arrangement.members)


def _furthest(told: Mapping[int, pb.Description]) -> int:
    return max((one.taken.bounds[-1] for one in told.values() if one.taken.bounds), default=0)


def _ranges(steps: pb.Steps) -> RangeSet:
    bounds = list(steps.bounds)
    pairs: list[Range] = list(pairwise(bounds))[::2]
    return RangeSet.of(pairs)
