# SPDX-License-Identifier: Apache-2.0
"""Settings and shared fixtures of the unit tests.

Hypothesis has no deadline per example, because the machine may be busy. Its failures print a blob that
replays them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.ps.async_server import Start, starting

settings.register_profile("edl", deadline=None, print_blob=True)
settings.load_profile("edl")


@pytest.fixture
def start(tmp_path: Path) -> Start:
    return starting(tmp_path)
