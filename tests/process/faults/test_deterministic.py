# SPDX-License-Identifier: Apache-2.0
"""training.deterministic on real workers: a killed one leaves no trace in the bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edl.journal.audit import same
from tests.process.conftest import MODELS

LOOP = f"model.script={MODELS / 'counting_loop.py'}"


@pytest.mark.parametrize("library", ["keras", "torch"])
async def test_a_job_with_a_killed_root_has_the_bits_of_one_worker(
    a_job: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    pytest.importorskip(library)
    values: list[str] = ["training.deterministic=true"]
    how: dict[str, Any] = {"epochs": 3, "model": "counting_bits.py"}
    if library != "keras":
        monkeypatch.setenv("EDL_COUNTING_STATE", library)
        values, how = [LOOP, *values], {"epochs": 3, "own_fork_server": True}
    async with a_job(*values, workers=1, **how) as alone:
        await alone.exact()
    before = alone.output.rename(tmp_path / "alone")
    async with a_job(*values, workers=3, **how) as job:
        members = await job.ring_of(3)
        await job.stepping(3)
        job.kill(members[0])
        await job.ring_of(3, without=members[:1])
        await job.exact()
    assert same(before, job.output) == f"the same bits after each of 3 epochs as {job.output}"
