# SPDX-License-Identifier: Apache-2.0
"""The eight scenarios of Horovod's elastic tests (test/integration/elastic_common.py of its repository).

Each scenario names what edl does differently: it replaces lost workers, and has no list of bad hosts. Stock
Horovod skips all_hosts_blacklisted and min_hosts_timeout (its issue 2030).
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from edl.contract import artifacts
from edl.net.master_client import Client
from tests.process.jobs.test_horovod_scripts import EDL, own_folder
from tests.support.jobs.by_commit import of_this_commit

__all__ = ["own_folder"]  # a fixture

SCRIPT = str(Path(__file__).parents[2] / "models" / "horovod_scripts" / "schedule.py")
# A busy machine may keep a worker from sending heartbeats for seconds.
SETTINGS = "local.startMethod=fork,elastic.heartbeatTimeoutSeconds=60"
SECONDS = 120


def replay(
    flags: str,
    exits: Mapping[tuple[int, int], Sequence[int]] | None = None,
    mode: str = "exception",
    epochs: int = 3,
    sizes: Sequence[int] = (),
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run the script. Return the job's summary, and what rank 0 has recorded of each epoch.

    Args:
        exits: the first ranks of the workers that end, by epoch and batch.
        mode: how they end: exception or kill.
        sizes: the ring's size in each epoch; rank 0 waits for a change at the end of an epoch.
    """
    script = [SCRIPT, "--record", "epochs", "--epochs", str(epochs), "--exit-mode", mode]
    due = {f"{epoch},{batch}": ranks for (epoch, batch), ranks in (exits or {}).items()}
    script += ["--exits", json.dumps(due), "--sizes", json.dumps(sizes), "--seconds", str(SECONDS)]
    command = [EDL, "horovod", *flags.split(), "--output-filename", "job", "--set", SETTINGS, *script]
    with open("out", "w") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        try:
            for epoch, size in enumerate(sizes[1:]):
                until(lambda: len(recorded()) > epoch, process)  # noqa: B023
                Client(artifacts.read_contact(Path("job"))).scale(size)
            process.wait(SECONDS)
        finally:
            process.terminate()
    for log in [Path("out"), *sorted(Path("job/logs").glob("worker-*.log"))]:
        print(f"--- {log}\n{log.read_text()[-2000:]}")
    return json.loads(Path("job/summary.json").read_text()), recorded()


def recorded() -> list[dict[str, Any]]:
    """What rank 0 has recorded, an entry for each epoch."""
    log = Path("epochs")
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def until(happens: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + SECONDS
    while not happens():
        assert process.poll() is None and time.monotonic() < deadline, Path("out").read_text()
        time.sleep(0.05)


def each(epochs: Sequence[Mapping[str, Any]], *keys: str) -> list[tuple[Any, ...]]:
    return [tuple(epoch[key] for key in keys) for epoch in epochs]


def hosts_added_and_removed() -> None:
    """2 -> 4 -> 2, then 1 -> 2 -> 1: `edl scale` stands for the hosts that Horovod's driver discovers."""
    sizes = (2, 4, 2, 1, 2, 1)
    summary, epochs = replay("-np 2 --min-np 1 --max-np 4", sizes=sizes, epochs=len(sizes))
    assert summary["phase"] == "Succeeded" and summary["failures"] == []
    first = epochs[0]["rendezvous"]  # 2 if the second worker was ready later than the first one
    assert first in (1, 2)
    assert each(epochs, "size", "rendezvous") == [(size, first + k) for k, size in enumerate(sizes)]
    assert {epoch["start_rank"] for epoch in epochs} == {0}, "the oldest worker stays"


def single_rank_failure_and_min_hosts_timeout() -> None:
    """Rank 0 is killed. Stock goes on with fewer ranks, or fails below --min-np; edl replaces it."""
    flags = "-np 2 --min-np 2 --host-discovery-script ./discover.sh --elastic-timeout 1"
    summary, epochs = replay(flags, {(1, 0): [0]}, mode="kill")
    assert summary["phase"] == "Succeeded" and summary["failures"] == []
    assert summary["workers_created"] == 3
    keys = ("epoch", "commits", "start_rank", "rank", "size", "rendezvous")
    assert each(epochs, *keys) == [(0, 10, 0, 0, 2, 1), (1, 21, 1, 0, 2, 2), (2, 32, 1, 0, 2, 2)]


def fault_tolerance_without_scaling_and_all_hosts_blacklisted_and_resurrected() -> None:
    """A rank of each host raises, one after the other. Each is replaced, as elastic.maxFailures allows two.

    `--reset-limit 2` is elastic.maxFailures=2 in edl.
    """
    flags = "-np 3 --min-np 3 -H localhost:2,127.0.0.1:1 --set elastic.maxFailures=2"
    summary, epochs = replay(flags, {(1, 0): [1], (3, 0): [0]}, epochs=5)
    assert summary["phase"] == "Succeeded" and [f["worker"] for f in summary["failures"]] == [1, 0]
    assert [epoch["size"] for epoch in epochs] == [3] * 5
    assert [epoch["start_rank"] for epoch in epochs] == [0, 0, 0, 2, 2]
    assert epochs[-1]["commits"] == 54


def all_ranks_failure_and_reset_limit() -> None:
    """All ranks raise: more than elastic.maxFailures allows."""
    summary, epochs = replay("-np 2 --min-np 2 --set elastic.maxFailures=1", {(1, 0): [0, 1]})
    assert summary["phase"] == "Failed" and len(summary["failures"]) == 2
    assert "ends at epoch 1, batch 0" in summary["reason"]
    assert [epoch["epoch"] for epoch in epochs] == [0]


SCENARIOS = (
    hosts_added_and_removed,
    single_rank_failure_and_min_hosts_timeout,
    fault_tolerance_without_scaling_and_all_hosts_blacklisted_and_resurrected,
    all_ranks_failure_and_reset_limit,
)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("scenario", of_this_commit(SCENARIOS), ids=lambda of: of.__name__)
def test_the_scenarios_of_horovods_elastic_tests(scenario: Callable[[], None]) -> None:
    scenario()
