# SPDX-License-Identifier: Apache-2.0
"""What the master compares between workers: the loss of the first records, and digests of all records.

trainer/step/sample_loss.py computes the loss; readers whose records each worker computes by itself have a
digest (edl/data/same.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from edl.contract.proto import edl_pb2 as pb
from edl.trainer.parts.part import LoopPart
from edl.trainer.step.interfaces import SampleLoss


class SampleReport(LoopPart):
    """Reports the sample loss of this worker's model and the digests of its records.

    Args:
        found: the loss; None if it cannot be compared.
        digests: by split.
    """

    def __init__(self, found: SampleLoss | None, digests: Mapping[str, str]):
        self._found, self._digests = found, digests

    def ready(self, message: pb.Ready) -> None:
        message.digests.update(self._digests)
        if self._found is not None:
            message.sample_loss.CopyFrom(pb.SampleLoss(**asdict(self._found)))
