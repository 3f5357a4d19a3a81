# SPDX-License-Identifier: Apache-2.0
"""The digits. A prediction of them waits in its second round until a file says go."""

import time
from pathlib import Path
from typing import Any

from edl.zoo.digits import data, model

__all__ = ["data", "feed", "model"]

OUTPUT = Path("/var/lib/edl")  # for all workers at once
GO, PARTS = OUTPUT / "go", OUTPUT / "predictions"
ROUND = 16  # parts


def feed(records: Any) -> Any:
    while len(list(PARTS.glob("part-*"))) >= ROUND and not GO.exists():
        time.sleep(0.1)
    return records
