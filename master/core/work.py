# SPDX-License-Identifier: Apache-2.0
"""What a job's workers do, as far as the master's decisions depend on it: `Job` is given one `Work`.

The workers of most jobs run edl's loop, which divides records among them. A program of a different kind
is a subclass, in the room of what it was written for (`edl.integrations`); the core knows none of them.
"""

from __future__ import annotations

from typing import ClassVar

from edl.config import Config
from edl.contract import modes
from edl.master.core.failures import MAX_IN_VAIN


class Work:
    """Workers that run edl's loop, also with `model.script`: each step takes records of the job's data."""

    tasks: ClassVar[tuple[str, ...]] = (modes.TRAIN, "evaluate", "predict")  # of `Config.task`
    # The steps are parts of the job's records: the number of records is known, and so is the end.
    divides_records: ClassVar[bool] = True
    unit: ClassVar[str] = "record"  # what a step consists of
    lost_units: ClassVar[str] = "records of training"  # units whose effect is lost, in messages
    start: ClassVar[str] = "its first record"  # where the job begins, in messages
    # A member's step k proves that each member of its ring has step k - 1, also to a new master.
    in_lockstep: ClassVar[bool] = True
    # A member leaves a ring that was cut within `cut_seconds`, and joins the next one with its state.
    notices_cuts: ClassVar[bool] = True
    root_is_rank_0: ClassVar[bool] = False  # the members take the state of rank 0
    # A worker ends by itself, and the job with the last one; else one worker saves the trained model.
    ends_by_itself: ClassVar[bool] = False
    # A new worker begins at the last step, so the same mistake before the next step is in the user's code.
    repeats_mistakes: ClassVar[bool] = False

    def epochs(self, config: Config) -> int:
        """Return the number of epochs to train."""
        return config.training.epochs if config.trains else 0

    def records_per_step(self, config: Config) -> int:
        """Return the number of units in a step."""
        return config.training.batch_size

    def rate(self, rates: list[float]) -> float:
        """Return the units per second of a ring with these rates of its members."""
        return sum(rates)

    def kills_in_vain(self, config: Config) -> int:
        """Return after how many killed workers in a row, without a step of the ring, the job fails."""
        return MAX_IN_VAIN


RECORDS = Work()
