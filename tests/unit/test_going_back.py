"""Ring and parameter servers go back together: what the master makes of it, and its books."""

from __future__ import annotations

import pytest

from edl.contract.books import AuditFailed, Books
from edl.contract.ids import WorkerId
from edl.contract.reasons import Reason
from master.core import events as ev
from tests.stories import Story

WHY = "parameter server 1 has lost its log and rows"


def test_probe() -> None:
    assert WHY
    assert (AuditFailed, Books, WorkerId, Reason, ev, Story, pytest)
