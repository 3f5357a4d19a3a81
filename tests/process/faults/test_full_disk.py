# SPDX-License-Identifier: Apache-2.0
"""A full disk: the training goes on, and what it was for is written elsewhere, or when there is room."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from edl.contract import artifacts
from edl.contract.reasons import Reason
from edl.journal import audit
from edl.master.core import view
from tests.process.conftest import ROOT, Running
from tests.process.jobs.test_saved import A_Job
from tests.support.jobs.evidence import check_weights
from tests.support.jobs.small_disk import SmallDisk

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system, which takes root"),
]
EDL = [str(Path(sys.executable).with_name("edl"))]
RECORDS = 3000


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallDisk]:
    """The output directory of a job, of 4 MiB; and a temporary directory that goes with the test."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    disk = SmallDisk(tmp_path / "job", mebibytes=4)
    try:
        yield disk
    finally:
        disk.unmount()


async def degraded(job: Running, part: str) -> str:
    return str(await job.until(lambda: view.status(job.job, 0)["degraded"].get(part)))


async def test_with_room_in_time_nothing_is_missing(a_job: A_Job, small_disk: SmallDisk) -> None:
    async with a_job(workers=2, records=RECORDS, epochs=1) as job:
        await job.ring_of(2)
        small_disk.fill()
        assert small_disk.is_full
        job.master.scale(3)  # a decision, which is written down
        assert "No space left on device; it is kept in memory" in await degraded(job, "the journal")
        await job.ring_of(3)  # a worker whose log has no room
        job.go()
        assert "No space left on device" in await degraded(job, "saving")
        small_disk.make_room()
        summary = await job.exact()
    assert summary["model"] == artifacts.MODEL
    assert "the journal works again" in job.noticed(Reason.Recovered)
    assert "the model is saved: model.keras" in job.noticed(Reason.Recovered)


def test_without_room_everything_is_salvaged_and_the_words_say_where(
    tmp_path: Path, small_disk: SmallDisk
) -> None:
    orders = tmp_path / "orders"
    orders.mkdir()
    (orders / "idle").touch()
    environment = {
        **os.environ,
        "EDL_FAULTS": str(orders),
        "EDL_COUNTING_RECORDS": str(RECORDS),
        "XDG_STATE_HOME": str(tmp_path / "state"),
    }
    sets = "workers=2,training.epochs=1,elastic.diskFullTimeoutSeconds=1"
    job = subprocess.Popen(
        [
            *EDL,
            "run",
            str(ROOT / "tests" / "models" / "counting_faulty.py"),
            "--set",
            sets,
            "--output",
            str(tmp_path / "job"),
            "--salvage",
            str(tmp_path / "salvage"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )
    said = []
    with job:
        assert job.stdout is not None
        for line in job.stdout:
            said.append(line)
            if "ring 0 -> " in line:
                small_disk.fill()
                assert small_disk.is_full
                (orders / "idle").unlink()
    out = "".join(said)
    salvaged = tmp_path / "salvage" / "job"
    assert job.returncode == 1, out
    assert (
        f"saving failed: OSError: [Errno 28] No space left on device; the trained model is kept: {salvaged}"
        in out
    )
    assert f"  model     {salvaged}/model.keras\n" in out
    assert f"  kept in   {salvaged}\n" in out
    summary = json.loads((salvaged / artifacts.SUMMARY).read_text())
    assert summary["failed_parts"][0]["part"] == "saving"
    assert check_weights(salvaged / artifacts.MODEL, RECORDS, 1) == ""
    assert "exactly once" in audit.audit(salvaged)
