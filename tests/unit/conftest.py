"""Settings of the unit tests: no deadline per example, for the machine may be busy; and a failure
of hypothesis prints what replays it. And fixtures that several modules share."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

from tests.any_order import Start, starting

settings.register_profile("edl", deadline=None, print_blob=True)
settings.load_profile("edl")


@pytest.fixture
def start(tmp_path: Path) -> Start:
    return starting(tmp_path)
