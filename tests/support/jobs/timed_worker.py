# SPDX-License-Identifier: Apache-2.0
"""`edl worker` that records the time of each completed step, one per line, in EDL_STEP_TIMES/PID."""

from __future__ import annotations

import functools
import os
import sys
import time
from pathlib import Path
from typing import Any

from edl.contract.workers import WORKER_ENVIRONMENT
from edl.trainer import __main__ as worker
from edl.trainer.session.telemetry import Telemetry


def main() -> int:
    os.environ.update(WORKER_ENVIRONMENT)
    path = Path(os.environ["EDL_STEP_TIMES"], str(os.getpid()))
    times = open(path, "w", buffering=1, encoding="ascii")  # open until this process ends
    done = Telemetry.step_done

    @functools.wraps(done)
    def noted(self: Telemetry, generation: int, *rest: Any, **named: Any) -> None:
        done(self, generation, *rest, **named)
        if generation:  # generation 0 is the warm-up
            times.write(f"{time.monotonic()}\n")

    Telemetry.step_done = noted  # type: ignore[method-assign]
    return worker.main()


if __name__ == "__main__":
    sys.exit(main())
