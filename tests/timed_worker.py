"""`edl worker` that notes when each of its steps was done: one time a line, in EDL_STEP_TIMES/PID."""

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
    times = open(path, "w", buffering=1, encoding="ascii")  # to the end of this process
    done = Telemetry.step_done

    @functools.wraps(done)
    def noted(self: Telemetry, generation: int, *rest: Any, **named: Any) -> None:
        done(self, generation, *rest, **named)
        if generation:  # in no ring it warms up
            times.write(f"{time.monotonic()}\n")

    Telemetry.step_done = noted  # type: ignore[method-assign]
    return worker.main()


if __name__ == "__main__":
    sys.exit(main())
