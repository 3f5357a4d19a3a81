# SPDX-License-Identifier: Apache-2.0
"""The loss of the first records, which the master compares between workers (trainer/step/sample_loss.py)."""

from __future__ import annotations

from dataclasses import asdict

from edl.contract.proto import edl_pb2 as pb
from edl.trainer.parts.part import Part
from edl.trainer.step.interfaces import SampleLoss


class SampleReport(Part):
    """Reports the sample loss of this worker's model, which the warm-up has found."""

    def __init__(self, found: SampleLoss):
        self._found = found

    def ready(self, message: pb.Ready) -> None:
        message.sample_loss.CopyFrom(pb.SampleLoss(**asdict(self._found)))
