# SPDX-License-Identifier: Apache-2.0
"""Tests that take minutes: each commit runs some of them, and EDL_STORMS=all runs all."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).parents[3]
Case = TypeVar("Case")


def of_this_commit(tests: Sequence[Case], count: int = 1) -> list[Case]:
    """`count` neighbours among the tests; all of them with EDL_STORMS=all, or where the tree is no clone."""
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    if os.environ.get("EDL_STORMS") == "all" or head.returncode != 0:
        return [*tests]
    first = int(head.stdout, 16)
    return [tests[(first + nth) % len(tests)] for nth in range(count)]
