# SPDX-License-Identifier: Apache-2.0
"""The ledger: what of the job is in a model. It lies beside the weights.

It holds the step, the records that were left out, the results of evaluations, and the history of the epochs.
Model and ledger are one state: they are changed together, and copied together.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TypeAlias

import numpy as np

from edl.contract.proto import edl_pb2 as pb
from edl.contract.ranges import RangeSet
from edl.errors import EdlError
from edl.trainer.agreement.control import Agreed, StepResult
from edl.trainer.agreement.epochs import CallbackUpdate, Epochs
from edl.trainer.agreement.metric_values import Value
from edl.trainer.embedding.interfaces import Commit

# Version of the packed form. A worker of a different version of edl must not read it.
VERSION = 6
HEADER = 16  # bytes: the version, and the length of the text that follows


class LedgerBroken(EdlError):
    """The ranks are at different steps, or a record is missing: no state is changed any more."""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The result of the last evaluation on a split."""

    step: int  # step of the evaluated model
    records: int
    metrics: Mapping[str, Value]  # empty if the evaluation failed


@dataclass(frozen=True, slots=True)
class Ledger:
    """An immutable value; `after` and `after_round` return the next one."""

    step: int = 0  # number of steps in the model
    # Steps that were left out, because their gradients were not finite.
    skipped: RangeSet = field(default_factory=RangeSet)
    bad: Mapping[int, int] = field(default_factory=dict)  # by epoch, from 0: number of records left out
    round: int = 0  # number of evaluation batches made after that step
    totals: bytes = b""  # sums of the evaluation batches of the present pass, float64
    evaluated: Mapping[str, Evaluated] = field(default_factory=dict)  # by split
    callbacks_done: int = 0  # 1 if callbacks were called after that step, for the next epoch to begin
    epochs: Epochs = field(default_factory=Epochs)
    commit: Commit | None = None  # of the last step, for servers; None without servers or steps
    # The ring that made the last change. States of one step are equal only if one ring has made them: after a
    # roll-back, and after a sum that came back to a lost member alone, another ring makes the step once more.
    made_in: int = 0

    def after(self, agreed: Agreed, epoch: int, commit: Commit | None = None, made_in: int = 0) -> Ledger:
        """Add the next step.

        Args:
            epoch: the epoch of the step.
            commit: what the servers need to know of the step; None if there are no servers.
            made_in: the ring that has made it.
        """
        next_ = replace(
            self, step=self.step + 1, round=0, totals=b"", callbacks_done=0, commit=commit, made_in=made_in
        )
        if agreed.records and not agreed.nonfinite:
            next_ = replace(next_, epochs=self.epochs.after(agreed.loss, agreed.records))
        if agreed.nonfinite:
            return replace(next_, skipped=self.skipped.add(self.step, next_.step))
        if agreed.bad:
            return replace(next_, bad={**self.bad, epoch: self.bad.get(epoch, 0) + agreed.bad})
        return next_

    def after_async_phase(self, step: int, loss: float, records: int, left_out: int, epoch: int) -> Ledger:
        """Add all steps below `step`, which servers have applied in any order (mode=ps).

        Args:
            loss: the sum of the losses of these steps' records.
            records: the number of these records.
            left_out: the number of records in steps that were left out, because they were not finite.
            epoch: the epoch of the steps.
        """
        epochs = replace(self.epochs, loss=self.epochs.loss + loss, records=self.epochs.records + records)
        bad = {**self.bad, epoch: self.bad.get(epoch, 0) + left_out} if left_out else self.bad
        return replace(self, step=step, round=0, totals=b"", callbacks_done=0, epochs=epochs, bad=bad)

    def after_round(self, round: int, values: np.ndarray) -> Ledger:
        """Add the next evaluation batch of a pass.

        Args:
            round: the number of the evaluation batch after it.
            values: what the batch adds to the totals, [n].
        """
        before = np.frombuffer(self.totals) if self.totals else 0.0
        return replace(self, round=round, totals=(before + values.astype(np.float64)).tobytes())

    def after_pass(self, round: int, split: str, records: int, metrics: Mapping[str, Value]) -> Ledger:
        """End a pass with its last evaluation batch, and add its result."""
        found = Evaluated(self.step, records, metrics)
        return replace(self, round=round, totals=b"", evaluated={**self.evaluated, split: found})

    def pack(self) -> np.ndarray:
        """Encode the ledger as uint8 [bytes]."""
        return np.frombuffer(b"".join(self.pieces()), np.uint8)

    def pieces(self) -> list[bytes]:
        """The pieces that `pack` joins: some may be long, and are not copied."""
        told = {
            "step": self.step,
            "skipped": list(self.skipped),
            "bad": list(self.bad.items()),
            "round": self.round,
            "evaluated": {split: asdict(e) for split, e in self.evaluated.items()},
            "callbacks_done": self.callbacks_done,
            "totals": len(self.totals),
            "commit": asdict(self.commit) if self.commit is not None else None,
            "made_in": self.made_in,
        }
        text = json.dumps(told).encode()
        header = np.array([VERSION, len(text)], np.int64).tobytes()
        return [header, text, self.totals, *self.epochs.pieces()]

    def exact(self) -> bytes:
        """The whole numbers of the ledger: equal on all members with this state.

        Metrics are left out: TensorFlow may round them differently with a different number of threads.
        """
        told = (self.step, list(self.skipped), sorted(self.bad.items()), self.round, self.callbacks_done)
        return repr(told).encode()

    @staticmethod
    def unpack(data: np.ndarray) -> Ledger:
        """The ledger that a different worker has packed.

        Raises:
            LedgerBroken: the worker runs a different version of edl.
        """
        version, length = data[:HEADER].view(np.int64).tolist()
        if version != VERSION:
            raise LedgerBroken(
                f"the state to take over has version {version}, expected {VERSION}: the workers run "
                "different versions of edl"
            )
        packed = data.tobytes()
        start = HEADER + length
        told = json.loads(packed[HEADER:start])
        epochs = start + told["totals"]
        return Ledger(
            told["step"],
            RangeSet.of(map(tuple, told["skipped"])),
            dict(told["bad"]),
            told["round"],
            packed[start:epochs],
            {split: Evaluated(**e) for split, e in told["evaluated"].items()},
            told["callbacks_done"],
            Epochs.unpack(memoryview(packed)[epochs:]),
            Commit(**told["commit"]) if told["commit"] is not None else None,
            told["made_in"],
        )

    def left_ring(self, has_state: bool, broken: str, digest: str) -> pb.LeftRing:
        """The message for the master about this state."""
        return pb.LeftRing(
            step=self.step,
            has_state=has_state,
            skipped=[pb.Range(start=start, stop=stop) for start, stop in self.skipped],
            broken=broken,
            digest=digest,
            round=self.round,
            callbacks_done=self.callbacks_done,
            stop=self.epochs.stop,
            stopped_by=self.epochs.stopped_by,
            bad=self.bad,
            made_in=self.made_in,
        )


@dataclass(frozen=True, slots=True, eq=False)
class RoundResult:
    """The result of one evaluation batch's all-reduce: it changes the ledger, and no weight."""

    agreed: Agreed
    round: int  # the number of the next one
    ends_epoch: bool  # whether it is the last one of the evaluation that belongs to an epoch
    nbytes: int  # memory that it takes while it is pending
    put: Callable[[Ledger], Ledger]  # returns the ledger with this result


# What a ring adds to the state, the same on all ranks.
Update: TypeAlias = StepResult | RoundResult | CallbackUpdate
