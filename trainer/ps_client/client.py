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

from collections.abc import Sequence

import numpy as np

from edl.contract.proto import ps_pb2 as pb
from edl.contract.rows.shares import IDS, PAGE_BYTES, VALUES, Shares, encoded
from edl.trainer.embedding.interfaces import Commit, Start
from edl.trainer.ps_client.calls import ServerAway, ServerRefused
from edl.trainer.ps_client.messages import commit_to_proto, ids_asked, places, put_together, start_to_proto
from edl.trainer.ps_client.pending import Begun
from edl.trainer.ps_client.recovery import why_behind
from edl.trainer.ps_client.server_group import ServerGroup
from edl.trainer.ring.base import RingBroken


class PsClient(ServerGroup):
    """The servers of one job, as a ring with synchronous steps uses them. Arguments as in ServerGroup."""

    # --- forming a ring

    def start_generation(self, step: int) -> str:
        """As the root of a new ring, report the ring's step to all servers.

        Returns:
            why ring and servers must roll back; "" if all servers are at this step.

        Raises:
            RingBroken: the ring was cut before all servers had answered.
        """
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
        """Have all servers restore the checkpoint of this step; 0: they begin again.

        Raises:
            RingBroken: the ring was cut before all servers had answered.
            ServerRefused: a server cannot restore it.
        """
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
                index: pb.BeginRequest(
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
            self._ask("Begin", requests, known=True)

    def move(self, step: int) -> str:
        """As the root, have the rows moved. All members in sync hold the state of this step.

        Returns:
            why the rows stay where they are; "" if they moved.

        Raises:
            RingBroken: the ring was cut. One assignment is complete then, and the next root finds it.
        """
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

    def stage(self, step: int, rank: int, gradients: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        self.begin_stage(step, rank, gradients).result()

    def begin_stage(
        self, step: int, rank: int, gradients: Sequence[tuple[np.ndarray, np.ndarray]]
    ) -> Begun[None]:
        all_places = [places(ids, self._assignment) for ids, _ in gradients]
        requests = {}
        for index in self._members:
            request = pb.PushRequest(run_id=self._run_id, generation=self._generation, step=step, rank=rank)
            for table, ((ids, values), told) in enumerate(zip(gradients, all_places, strict=True)):
                if (here := told(index)) is not None:  # `add` avoids a copy that a list would cost
                    request.gradients.add(
                        table=table, ids=encoded(ids[here], IDS), values=encoded(values[here], VALUES)
                    )
            if request.gradients:
                requests[index] = request
        return Begun(self._begin("Push", requests, known=True), lambda _: None)
