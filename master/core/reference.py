# SPDX-License-Identifier: Apache-2.0
"""What the first workers reported of the model and the data, with which later workers are compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from edl.master.core.facts import SampleLoss


@dataclass(slots=True)
class Reference:
    """The job's model and data, as the first worker that reported each has them.

    Args:
        held_out: records of each split that the ring evaluates on.
        digests: of the records of a split.
        model: fingerprint of the model.
    """

    held_out: dict[str, int] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    model: str = ""
    sample_loss: SampleLoss | None = None

    def hold_out(self, records: Mapping[str, int]) -> None:
        """Record the sizes of the splits."""
        self.held_out = dict(records)

    def has_records(self, split: str, digest: str) -> bool:
        """Whether the split has records with this digest; the first digest becomes the job's."""
        return self.digests.setdefault(split, digest) == digest

    def is_model(self, fingerprint: str) -> bool:
        """Whether the model has this fingerprint; the first one becomes the job's."""
        self.model = self.model or fingerprint
        return self.model == fingerprint

    def loss_beside(self, found: SampleLoss) -> SampleLoss:
        """Return the loss that this one is compared with; the first one becomes the job's."""
        if self.sample_loss is None:
            self.sample_loss = found
        return self.sample_loss
