# SPDX-License-Identifier: Apache-2.0
"""Storms of real faults on real workers, each of a new seed: the last line must say EXACT.

A storm takes minutes, so that each commit has one of them; EDL_STORMS=all runs all.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from edl.contract import artifacts
from tests.support.jobs.by_commit import of_this_commit

ROOT = Path(__file__).parents[3]
FAULTS = 24


def storm(*arguments: str, faults: int = FAULTS, library: str = "tf") -> str:
    """What scripts/storm says of a storm that has lost nothing; `library` has the state of an own loop."""
    done = subprocess.run(
        [ROOT / "scripts/storm", "--faults", str(faults), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "EDL_COUNTING_STATE": library},
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("EXACT")
    seen = int(re.search(r"^faults +(\d+) in", done.stdout, re.M)[1])  # type: ignore[index]
    assert seen >= faults, "a storm without faults proves nothing"
    return done.stdout


def of_steps_with_several_sums() -> None:
    """The faults of tests/process/faults/test_faults.py are of steps with one. float16 holds exactly what
    each weight counts, so compression changes nothing."""
    model = ["--model", "counting_many.py", "--records", "20000", "--epochs", "4"]
    said = storm("--workers", "3", *model, "--set", "training.compression=float16")
    between = re.search(r"(\d+) killed between the sums", said)
    assert between and int(between[1]) > 0, "no worker was killed between the sums of a step"


def of_workers_and_servers() -> None:
    """Some servers lose what they have written: then ring and servers go back, and nothing counts twice."""
    sizes = ["--records", "4000", "--epochs", "5"]
    storm("--workers", "3", "--model", "counting_rows.py", "--servers", "2", *sizes, faults=12)


def of_servers_that_have_all_weights() -> None:
    """Each on two of three: also the first server, which hands out steps, is killed and done without."""
    sizes = ["--records", "4000", "--epochs", "5", "--set", "ps.replicas=2", "--set", "ps.timeoutSeconds=1"]
    storm(
        "--workers", "3", "--model", "counting_rows.py", "--servers", "3", "--mode", "ps", *sizes, faults=12
    )


def of_workers_and_their_readers() -> None:
    """Processes that read TFRecord files are killed, too, and the process that they are forked from."""
    said = storm("--workers", "3", "--model", "counting_files.py", "--set", "data.workers=2")
    assert "reader" in said, "no reader was hit"


def of_an_elastic_horovod_script() -> None:
    """Each ring begins at the last commit, and all ranks count right in the end."""
    storm("--workers", "3", "--model", "counting_horovod.py", "--epochs", "40", faults=12)


def of_a_full_disk() -> None:
    """The small disk with all files of a job is full at times, and away before the next job."""
    storm("--workers", "3", "--disk", "64", faults=10)


def of_a_deterministic_own_loop() -> None:
    """Also the master is killed; the bits are those of one worker, and the network that of the loop alone."""
    pytest.importorskip("torch")
    model = ["--model", "counting_loop.py", "--records", "1000", "--epochs", "4"]
    storm("--workers", "3", "--deterministic", *model, faults=5, library="torch")


STORMS = (
    of_steps_with_several_sums,
    of_workers_and_servers,
    of_servers_that_have_all_weights,
    of_workers_and_their_readers,
    of_an_elastic_horovod_script,
    *[of_a_full_disk] * (os.geteuid() == 0),  # to mount a disk takes root
    of_a_deterministic_own_loop,
)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("storm_of", of_this_commit(STORMS), ids=lambda of: of.__name__)
def test_a_storm_loses_nothing(storm_of: Callable[[], None]) -> None:
    storm_of()


@pytest.mark.timeout(200)
def test_a_storm_that_is_ended_leaves_no_process(tmp_path: Path) -> None:
    journal = tmp_path / "round-0" / "job" / artifacts.JOURNAL
    words = [str(ROOT / "scripts/storm"), "--faults", "1000", "--workers", "2", "--keep", str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL) as process:
        while not (journal.exists() and '"JoinedRing"' in journal.read_text()):
            assert process.poll() is None
            time.sleep(0.05)  # no event of another process says that its job trains
        assert len(of_the_storm(tmp_path)) >= 4, "a master, a fork server and workers"
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    assert of_the_storm(tmp_path) == []


def of_the_storm(directory: Path) -> list[psutil.Process]:
    """The processes that have a storm's directory in their environment."""
    of_all = psutil.process_iter(["environ"])
    return [p for p in of_all if (p.info["environ"] or {}).get("EDL_FAULTS", "").startswith(str(directory))]
