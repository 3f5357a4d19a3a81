"""What of the job is in a model: the number beside the weights, and what was left out.

Model and ledger are one state: they are changed together, and taken over together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from edl.contract.proto import edl_pb2 as pb
from edl.contract.ranges import RangeSet
from edl.errors import EdlError
from trainer.control import Agreed

VERSION = 3  # of what travels; 1: with ranges of records instead of steps; 2: without bad records


class LedgerBroken(EdlError):
    """The ranks do not take the same step, or a record of it is missing: nothing is changed any more."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """A value; `after` gives the next one."""

    step: int = 0  # so many are in the model
    skipped: RangeSet = field(
        default_factory=RangeSet
    )  # those of them that were left out: their gradients were not finite
    bad: Mapping[int, int] = field(default_factory=dict)  # by epoch, from 0: records left out of its steps

    def after(self, agreed: Agreed, epoch: int) -> Ledger:
        """With the next step.

        Args:
            epoch: in which it is.
        """
        step = self.step + 1
        if agreed.nonfinite:
            return replace(self, step=step, skipped=self.skipped.add(self.step, step))
        if agreed.bad:
            return replace(self, step=step, bad={**self.bad, epoch: self.bad.get(epoch, 0) + agreed.bad})
        return replace(self, step=step)

    def pack(self) -> np.ndarray:
        """As uint8 [bytes]."""
        pairs = [*self.skipped, *self.bad.items()]
        flat = [VERSION, self.step, len(self.skipped.ranges), *(n for pair in pairs for n in pair)]
        return np.array(flat, np.int64).view(np.uint8)

    @staticmethod
    def unpack(data: np.ndarray) -> Ledger:
        """What another worker has packed.

        Raises:
            LedgerBroken: it runs another version of edl.
        """
        version, *numbers = data.view(np.int64).tolist()
        if version != VERSION:
            raise LedgerBroken(
                f"the state to take over has version {version}, expected {VERSION}: the workers run "
                "different versions of edl"
            )
        step, skips, *flat = numbers
        pairs = list(zip(flat[::2], flat[1::2], strict=True))
        return Ledger(step, RangeSet.of(pairs[:skips]), dict(pairs[skips:]))

    def left_ring(self, has_state: bool, broken: str, digest: str) -> pb.LeftRing:
        """As it is told to the master."""
        return pb.LeftRing(
            step=self.step,
            has_state=has_state,
            skipped=[pb.Range(start=start, stop=stop) for start, stop in self.skipped],
            broken=broken,
            digest=digest,
            bad=[pb.BadCount(epoch=epoch, records=count) for epoch, count in self.bad.items()],
        )
