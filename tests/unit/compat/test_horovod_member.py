# SPDX-License-Identifier: Apache-2.0
"""A worker of a Horovod script, outside of the rings of its job."""

from __future__ import annotations

import pytest

from edl.compat.horovod import member
from edl.trainer.ring.base import RingBroken


class CutOnce:
    """A ring that is cut while it is formed for the first time."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def form(self, rank: int, size: int) -> None:
        self.calls.append(f"form {rank} of {size}")
        if len(self.calls) == 1:
            raise RingBroken("the ring was cut while it was being formed")

    def close(self) -> None:
        self.calls.append("close")


def test_a_late_cut_does_not_end_a_worker_that_forms_its_own_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_ELASTIC"):
        monkeypatch.setenv(name, "")
    worker, ring = object.__new__(member.Worker), CutOnce()
    worker.rank, worker.size, worker.elastic = 1, 2, True
    worker._ring = ring  # type: ignore[assignment]
    worker._form_alone()
    assert ring.calls == ["form 0 of 1", "close", "form 0 of 1"]
