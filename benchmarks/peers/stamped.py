# SPDX-License-Identifier: Apache-2.0
"""Has edl's workers write down each completed step and work for it, as the scripts of the peers do."""

from functools import wraps
from typing import Any

import numpy as np
from job import BATCH, done, work

from edl.trainer.session.telemetry import Telemetry


def stamp_steps() -> None:
    original = Telemetry.step_done

    @wraps(original)
    def noted(self: Telemetry, generation: int, rank: int, step: int, trained: int, agreed: Any) -> None:
        work(trained)
        done(step - 1, agreed.synced_ranks, np.arange((step - 1) * BATCH, step * BATCH))
        original(self, generation, rank, step, trained, agreed)

    Telemetry.step_done = noted  # type: ignore[method-assign]
