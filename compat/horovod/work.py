# SPDX-License-Identifier: Apache-2.0
"""What the workers of mode=horovod do, for the master: each runs a script that was written for Horovod."""

from __future__ import annotations

from edl.config import Config
from edl.contract import modes
from edl.master.core.work import Work


class Script(Work):
    """Workers that run a script of Horovod: it reads its own data, and a commit of its state is a step."""

    tasks = (modes.HOROVOD,)
    divides_records = False
    unit = "commit"
    lost_units = "commits"
    start = "the start of its script"
    in_lockstep = False
    notices_cuts = False  # it may compute as long as it likes between two calls of Horovod
    root_is_rank_0 = True
    ends_by_itself = True
    repeats_mistakes = True  # it begins at its top or at its last commit

    def epochs(self, config: Config) -> int:
        """Return 1: the script from its first line to its last."""
        return 1

    def records_per_step(self, config: Config) -> int:
        """Return 1: a step is one commit."""
        return 1

    def rate(self, rates: list[float]) -> float:
        """Return the greatest rate, because the workers commit together."""
        return max(rates, default=0.0)

    def kills_in_vain(self, config: Config) -> int:
        """Return the limit for a script without hvd.elastic lower, because it makes no steps at all."""
        if config.horovod.elastic:
            return super().kills_in_vain(config)
        return config.elastic.max_failures + 1


SCRIPT = Script()
