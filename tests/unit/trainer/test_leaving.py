# SPDX-License-Identifier: Apache-2.0
"""A worker that is asked to end (SIGTERM) leaves within its grace period, out of every wait."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from edl.contract.heartbeats import ServerWait
from edl.contract.proto import edl_pb2 as pb
from edl.trainer.__main__ import Start
from edl.trainer.session.state import Session

GENERATION = 3


class Worker:
    """A ready worker in a ring, whose process gets the signal."""

    def __init__(self, grace_seconds: float):
        self.said: list[pb.FromWorker] = []
        self.cut = threading.Event()
        self.session = Session(0, self.said.append, threading.Event())
        self.session.cuts(self.cut.set)
        self.session.state.form(GENERATION, (0, 1))
        stream: Any = SimpleNamespace(session=self.session)
        self._start = Start(stream)
        self._start.begin()
        self._start.over(grace_seconds)

    def is_asked_to_end(self) -> None:
        self._start.asked_to_end("SIGTERM")
        assert [message.leaving.why for message in self.said] == ["SIGTERM"]


def test_a_worker_that_waits_for_a_server_leaves_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """The server may need the room that the worker is to leave."""
    worker = Worker(grace_seconds=600.0)
    worker.session.waits = lambda: ServerWait(1, "Pull", 3.0, "")
    worker.is_asked_to_end()
    assert worker.cut.is_set()
    assert "leaving now: parameter server 1 does not answer" in capsys.readouterr().err


def test_a_worker_in_a_step_that_takes_longer_than_its_grace_period_breaks_its_ring(
    capsys: pytest.CaptureFixture[str],
) -> None:
    worker = Worker(grace_seconds=0.1)
    worker.is_asked_to_end()
    assert worker.cut.is_set()
    assert "leaving now: the step takes more than 0.1 s" in capsys.readouterr().err


def test_a_worker_that_has_left_its_ring_breaks_none() -> None:
    worker = Worker(grace_seconds=0.1)
    left = pb.FromWorker(generation=GENERATION, left_ring=pb.LeftRing())
    worker.session.state.note(left)
    worker.is_asked_to_end()
    assert not worker.cut.is_set()
