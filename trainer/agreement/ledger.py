"""What of the job is in a model: the number beside the weights, what was left out, and what an evaluation has
found so far, and what the epochs have given.

Model and ledger are one state: they are changed together, and taken over together.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

import numpy as np

from edl.contract.proto import edl_pb2 as pb
from edl.contract.ranges import RangeSet
from edl.errors import EdlError
from edl.trainer.agreement.control import Agreed
from edl.trainer.agreement.epochs import Epochs
from edl.trainer.agreement.interfaces import Commit
from edl.trainer.agreement.metric_values import Value

# Of what travels; 1: with ranges of records instead of steps; 2: without bad records; 3: or rounds; 4: or the
# last commit.
VERSION = 5
HEADER = 16  # bytes: the version, and how long the text is that follows


class LedgerBroken(EdlError):
    """The ranks do not take the same step, or a record of it is missing: nothing is changed any more."""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """What the last evaluation on a split has found."""

    step: int  # that the model was at
    records: int
    metrics: Mapping[str, Value]  # none: it failed


@dataclass(frozen=True, slots=True)
class Ledger:
    """A value; `after` and `after_round` give the next one."""

    step: int = 0  # so many are in the model
    skipped: RangeSet = field(
        default_factory=RangeSet
    )  # those of them that were left out: their gradients were not finite
    bad: Mapping[int, int] = field(default_factory=dict)  # by epoch, from 0: records left out of its steps
    round: int = 0  # so many of the evaluation after that step are made
    totals: bytes = b""  # what the rounds of the present pass have summed up, float64
    evaluated: Mapping[str, Evaluated] = field(default_factory=dict)  # by split
    turn: int = 0  # 1: after that step callbacks have been called, for the next epoch to begin
    epochs: Epochs = field(default_factory=Epochs)
    commit: Commit | None = None  # of the step that led here, for servers; None: there are none, or none did

    def after(self, agreed: Agreed, epoch: int, commit: Commit | None = None) -> Ledger:
        """With the next step.

        Args:
            epoch: in which it is.
            commit: what servers have to know of it, if there are any.
        """
        next_ = replace(self, step=self.step + 1, round=0, totals=b"", turn=0, commit=commit)
        if agreed.records and not agreed.nonfinite:
            next_ = replace(next_, epochs=self.epochs.after(agreed.loss, agreed.records))
        if agreed.nonfinite:
            return replace(next_, skipped=self.skipped.add(self.step, next_.step))
        if agreed.bad:
            return replace(next_, bad={**self.bad, epoch: self.bad.get(epoch, 0) + agreed.bad})
        return next_

    def after_async_phase(self, step: int, loss: float, records: int, left_out: int, epoch: int) -> Ledger:
        """With all steps below `step`, which servers have taken in any order (mode=ps).

        Args:
            loss: of these steps: the sum over their records.
            records: how many these are.
            left_out: how many others they had: those of steps that were not finite.
            epoch: in which they are.
        """
        epochs = replace(self.epochs, loss=self.epochs.loss + loss, records=self.epochs.records + records)
        bad = {**self.bad, epoch: self.bad.get(epoch, 0) + left_out} if left_out else self.bad
        return replace(self, step=step, round=0, totals=b"", turn=0, epochs=epochs, bad=bad)

    def after_round(self, round: int, values: np.ndarray) -> Ledger:
        """With the next round of a pass.

        Args:
            round: which one follows it.
            values: what it adds to the totals, [n].
        """
        before = np.frombuffer(self.totals) if self.totals else 0.0
        return replace(self, round=round, totals=(before + values.astype(np.float64)).tobytes())

    def after_pass(self, round: int, split: str, records: int, metrics: Mapping[str, Value]) -> Ledger:
        """With the last round of a pass, and what the pass has found."""
        found = Evaluated(self.step, records, metrics)
        return replace(self, round=round, totals=b"", evaluated={**self.evaluated, split: found})

    def pack(self) -> np.ndarray:
        """As uint8 [bytes]."""
        return np.frombuffer(b"".join(self.pieces()), np.uint8)

    def pieces(self) -> list[bytes]:
        """What `pack` joins: some may be long, and are not copied."""
        told = {
            "step": self.step, "skipped": list(self.skipped), "bad": list(self.bad.items()),
            "round": self.round, "evaluated": {split: asdict(e) for split, e in self.evaluated.items()},
            "turn": self.turn, "totals": len(self.totals),
            "commit": asdict(self.commit) if self.commit is not None else None,
        }  # fmt: skip
        text = json.dumps(told).encode()
        header = np.array([VERSION, len(text)], np.int64).tobytes()
        return [header, text, self.totals, *self.epochs.pieces()]

    def exact(self) -> bytes:
        """What of it is a whole number: equal wherever the state is. (A metric of an epoch is a result of
        TensorFlow's, which may round it otherwise with another number of threads.)"""
        told = (self.step, list(self.skipped), sorted(self.bad.items()), self.round, self.turn)
        return repr(told).encode()

    @staticmethod
    def unpack(data: np.ndarray) -> Ledger:
        """What another worker has packed.

        Raises:
            LedgerBroken: it runs another version of edl.
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
            told["step"], RangeSet.of(map(tuple, told["skipped"])), dict(told["bad"]),
            told["round"], packed[start:epochs],
            {split: Evaluated(**e) for split, e in told["evaluated"].items()},
            told["turn"], Epochs.unpack(memoryview(packed)[epochs:]),
            Commit(**told["commit"]) if told["commit"] is not None else None,
        )  # fmt: skip

    def left_ring(self, has_state: bool, broken: str, digest: str) -> pb.LeftRing:
        """As it is told to the master."""
        return pb.LeftRing(
            step=self.step,
            has_state=has_state,
            skipped=[pb.Range(start=start, stop=stop) for start, stop in self.skipped],
            broken=broken,
            digest=digest,
            round=self.round,
            turn=self.turn,
            stop=self.epochs.stop,
            stopped_by=self.epochs.stopped_by,
            bad=[pb.BadCount(epoch=epoch, records=count) for epoch, count in self.bad.items()],
        )
