# SPDX-License-Identifier: Apache-2.0
"""One worker's client of all parameter servers in asynchronous SGD (mode=ps).

    lease   the coordinator leases steps to this worker
    pull    current rows of all tables: those of the batch, and the dense weights
    push    a step's gradients, to all other servers first and then to the coordinator

Promise: every server has each step that the coordinator has. Each server accepts a step once, whichever
worker pushes it and however often. So every call can be repeated. A step that reached only some servers,
because its worker died, is computed again and counts on the servers that lack it. The coordinator is the
first server that is not out: server 0, as long as each row is on one server.

A server that rolls back to a checkpoint starts a new `incarnation`: calls of the old one are rejected, as
RingBroken. The root of the next ring resolves that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from edl.contract.proto import ps_pb2 as pb
from edl.trainer.ps_client.async_server_group import (
    AsyncServerGroup,
    furthest_of,
    ranges_of,
    values_of,
)
from edl.trainer.ps_client.calls import Request
from edl.trainer.ps_client.interfaces import Pulled, StepGradients, TrainedOn
from edl.trainer.ps_client.messages import ids_asked, put_together
from edl.trainer.ring.base import RingBroken


class AsyncPsClient(AsyncServerGroup):
    """The servers of one job between two boundaries. Arguments as in AsyncServerGroup."""

    # --- the workers' state beside the weights

    def keep(self, step: int, order: int, ledger: bytes) -> None:
        """Store the ledger on all servers, the coordinator last: so no other server lacks what it has."""
        requests = {
            index: pb.KeepRequest(
                run_id=self._run_id,
                incarnation=self._incarnations[index],
                step=step,
                order=order,
                ledger=ledger,
                repeated=self.progress.repeated,
            )
            for index in self._members
        }
        for some in self._coordinator_last(requests):
            answers = self._ask("Keep", some)
        self._told(answers[self.coordinator])

    def kept(self) -> bytes:
        """The stored ledger; empty: none."""
        first = self.coordinator
        kept: bytes = self._ask("Describe", {first: pb.DescribeRequest(kept=True)})[first].kept.ledger
        return kept

    # --- steps

    def lease_steps(self, worker: int, most: int, limit: int) -> list[int]:
        """Lease at most `most` steps below `limit`; updates `progress`.

        Returns:
            the steps; empty if other workers have leased all that remain.
        """
        first = self.coordinator
        request = pb.LeaseRequest(
            run_id=self._run_id, incarnation=self._incarnations[first], worker=worker, most=most, limit=limit
        )
        leased = self._ask("Lease", {first: request})[first]
        self._told(leased.progress)
        return [step for start, stop in ranges_of(leased.steps) for step in range(start, stop)]

    def rows_now(self, ids: Sequence[np.ndarray]) -> Pulled:
        """Pull current rows.

        Args:
            ids: the unique ids of each table, int64 [n].
        """
        shares = [self._shares(each)[0] for each in ids]
        requests = {
            index: pb.PullRequest(
                run_id=self._run_id, assignment=self._assignment.to_proto(), ids=ids_asked(index, shares)
            )
            for index in self._members
        }
        answers = self._ask("Pull", requests)
        found = put_together(ids, self._tables, shares, requests, answers)
        return Pulled(found, {index: answer.version for index, answer in answers.items()})

    def all_rows(self, table: int, step: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Read all rows of a table.

        Args:
            step: require exactly the steps below it to be in the rows; 0: any.

        Raises:
            RingBroken: a server lacks a step, or has lost its log meanwhile.
            TrainedOn: a server has accepted later steps.
        """
        before = self._incarnations_with(step)
        found = super().all_rows(table)
        for index, incarnation in self._incarnations_with(step).items():
            if incarnation != before[index]:
                raise RingBroken(f"parameter server {index} has lost its log while its rows were read")
        return found

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
            if step and furthest_of({index: told}) > step:
                raise TrainedOn(
                    f"parameter server {index} has accepted steps after step {step:,} of the model"
                )
        return {index: told.incarnation for index, told in found.items()}

    def push(self, made: StepGradients, worker: int, versions: Mapping[int, int]) -> bool:
        """Push a step's gradients to all servers.

        Args:
            versions: the versions of the weights that the step used, by server.

        Returns:
            False if the weights were too old: the step must be computed again.
        """
        shares = [self._shares(ids) for ids, _ in made.gradients]
        requests = {
            index: pb.PushRequest(
                run_id=self._run_id,
                incarnation=self._incarnations[index],
                step=made.step,
                worker=worker,
                version=versions[index],
                learning_rate=made.learning_rate,
                gradients=values_of(index, made.gradients, shares),
                loss=made.loss,
                records=made.records,
                skipped=made.skipped,
            )
            for index in self._members
        }
        for some in self._coordinator_last(requests):
            answers = self._ask("Push", some)
            if self.coordinator in answers:
                self._told(answers[self.coordinator])
            if any(answer.refused for answer in answers.values()):
                return False
        return True

    def drain(self, step: int) -> None:
        """Make all servers apply the waiting steps below `step`. These steps are already accepted."""
        requests = {
            index: pb.DrainRequest(run_id=self._run_id, incarnation=self._incarnations[index], step=step)
            for index in self._members
        }
        self._told(self._ask("Drain", requests)[self.coordinator])

    def find(self) -> None:
        """Update `progress` from the coordinator."""
        first = self.coordinator
        # Drains no steps.
        request = pb.DrainRequest(run_id=self._run_id, incarnation=self._incarnations[first], step=0)
        self._told(self._ask("Drain", {first: request})[first])

    def pause(self, seconds: float) -> None:
        """Wait.

        Raises:
            RingBroken: the ring was cut.
        """
        if self._interrupt.wait(seconds):
            raise RingBroken("the ring was cut")

    def _coordinator_last(self, requests: dict[int, Request]) -> tuple[dict[int, Request], ...]:
        first = self.coordinator
        return {index: one for index, one in requests.items() if index != first}, {first: requests[first]}
