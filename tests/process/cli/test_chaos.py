# SPDX-License-Identifier: Apache-2.0
"""`edl chaos` on a real job with parameter servers, and on the pods of a release."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from edl.cli.shared import storm
from edl.cli.shared.storm import Kind
from edl.contract import artifacts
from tests.process.cli.test_release_audit import a_job as a_finished_job
from tests.process.cli.test_release_audit import upload
from tests.process.cli.test_release_status import TOLD
from tests.support.jobs.commands import EDL, ROOT, a_long_job, edl
from tests.support.kubernetes.release_commands import Cluster, pod, says

ROWS = str(ROOT / "tests/models/counting_rows.py")


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


def a_seed(kinds: list[Kind], wanted: list[Kind], seconds: float = 0.0) -> int:
    """The first seed whose storm begins with these faults, each with a pause of at least so many seconds."""

    def fits(seed: int) -> bool:
        planned = list(itertools.islice(storm.plan(seed, kinds), len(wanted)))
        return [f.kind for f in planned] == wanted and all(f.seconds >= seconds for f in planned)

    return next(filter(fits, itertools.count()))


def events(output: Path, kind: str) -> list[dict[str, Any]]:
    lines = (output / artifacts.JOURNAL).read_text().splitlines()
    found = [json.loads(line).get("event", {}) for line in lines]
    return [event for event in found if event.get("type") == kind]


def test_a_storm_on_workers_and_servers_is_survived_and_accounted_for() -> None:
    kinds = [Kind.kill, Kind.server]
    seed = a_seed(kinds, kinds)
    with a_long_job("mode=hybrid,ps.servers=1,checkpoint.dir=", model=ROWS) as (_, output):
        options = [f"--seed={seed}", "--faults=2", "--every=0s", "--only=server,kill", "-o", "json"]
        done = edl("chaos", "job", *options)
        assert done.returncode == 0, done.stdout + done.stderr
        begins = f"edl: job job\nedl: seed {seed}: 2 faults (kill, server)\nedl: 1: kill worker "
        assert done.stderr.startswith(begins)
        told = json.loads(done.stdout)
        assert (told["kind"], told["seed"]) == ("ChaosReport", seed)
        assert told["faults"] == {"kill": 1, "server": 1}
        assert (told["phase"], told["workers"], told["target"]) == ("Training", 2, 2)
        assert told["exact"] and "each of their records counted once" in told["audit"]
        assert told["recoveries"]["count"] == 2 and told["unrecovered"] == []
        assert told["stalls"]["count"] >= 2, "a worker was lost, and one has joined"
        assert [event["signal"] for event in events(output, "Gone")] == ["SIGKILL"]

        seed = a_seed([Kind.stop], [Kind.stop], seconds=15)
        chaos = subprocess.Popen(
            [*EDL, "chaos", "job", f"--seed={seed}", "--only=stop"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert chaos.stderr is not None
        line = next(line for line in chaos.stderr if line.startswith("edl: 1: stop worker"))
        victim = psutil.Process(int(line.rpartition("(")[2].rstrip(")\n")))
        while victim.status() != psutil.STATUS_STOPPED:
            assert chaos.poll() is None
        chaos.send_signal(signal.SIGINT)
        out, err = chaos.communicate(timeout=60)
        assert (chaos.returncode, "interrupted" in err) == (130, True), err
        assert "faults    1: 1 stop\n" in out and "counted once" in out
        assert victim.status() != psutil.STATUS_STOPPED
    refused = edl("chaos", "job")
    assert (refused.returncode, refused.stderr) == (1, "edl: job job\nedl: job: the job has ended: Stopped\n")


async def test_pods_of_the_release_are_deleted_and_evicted_and_no_others(
    cluster: Cluster, tmp_path: Path
) -> None:
    """The master is played: it replaces a worker that is gone, and makes a step."""
    (tmp_path / "job").mkdir()
    a_finished_job(tmp_path / "job")
    upload(cluster, tmp_path / "job")
    cluster.put("pods", {"metadata": {"name": "edl-worker-9", "labels": {}}, "spec": {}, "status": {}})
    step, alive = 0, {number: pod(cluster, "worker", number) for number in (0, 1)}

    async def train() -> None:
        nonlocal step
        while True:
            for number, name in list(alive.items()):
                if cluster.objects["pods"].get(name, {}).get("metadata", {}).get("deletionTimestamp", "") or (
                    name not in cluster.objects["pods"]
                ):
                    del alive[number]
                    alive[number + 2] = pod(cluster, "worker", number + 2)
            step += 1
            members = [{"id": n, "handle": name, "state": "member"} for n, name in alive.items()]
            # The status also has a pod that is not of this release.
            members.append({"id": 9, "handle": "edl-worker-9", "state": "member"})
            status = TOLD | {
                "step": step,
                "workers": members,
                "generation": 1,
                "target": 3,
                "checkpoint": None,
            }
            status |= {"servers": [], "task": {"kind": "train", "mode": "train", "step": step}}
            says(cluster, "Training", **{"status.json": json.dumps(status)})
            await asyncio.sleep(0.02)

    kinds = [Kind.kill, Kind.term]
    seed = a_seed(kinds, kinds)
    playing = asyncio.create_task(train())
    try:
        done = await cluster.edl("chaos", "--release", "edl", "--seed", seed, "--faults", 2, "--every", "0s")
    finally:
        playing.cancel()
    assert "edl: release edl in namespace" in done.err and "(kill, term)" in done.err
    assert done.out.startswith("faults    2: 1 kill, 1 term\n"), done
    hit = [(r.verb, r.name) for r in cluster.requests if r.verb in ("delete", "eviction")]
    assert [verb for verb, _ in hit] == ["delete", "eviction"]
    assert all(name.startswith("edl-worker-") and name != "edl-worker-9" for _, name in hit), hit
    assert "edl-worker-9" in cluster.objects["pods"]
    refused = await cluster.edl("chaos", "--release", "edl", "--only", "stop")
    assert "--only stop: this job cannot be hit by it (expected kill, term, server)" in refused.err
