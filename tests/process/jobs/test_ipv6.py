# SPDX-License-Identifier: Apache-2.0
"""Where there is nothing but IPv6, as in an IPv6-only cluster's pods: a network namespace of the test's own.

Its one interface has no IPv4 address. (The loopback has 127.0.0.1, as in any pod.)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from edl.config import values
from tests.process.conftest import ROOT

pytestmark = pytest.mark.process

ADDRESS = "fd00:ed1::1"
INTERFACE = "eth0"
NETWORK = f"""
set -e
ip link set lo up
ip link add {INTERFACE} type veth peer name beyond
ip link set {INTERFACE} up
ip link set beyond up
ip address add {ADDRESS}/64 dev {INTERFACE} nodad
export EDL_RING_INTERFACE={INTERFACE}
exec "$@"
"""
# A master and two workers, each told its address as people would write it.
JOB = f"""
import subprocess, sys
output, values = sys.argv[1:]
command = [sys.executable, "-m", "edl.master", "--backend", "external", "--listen", "[{ADDRESS}]:8500"]
command += ["--output", output, "--values", values]
master = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
address = master.stdout.readline().strip()
assert address == "[{ADDRESS}]:8500", address
workers = [subprocess.Popen([sys.executable, "-m", "edl.trainer", "--master", address]) for _ in range(2)]
sys.exit(master.wait() or max(worker.wait() for worker in workers))
"""


def inside(*command: str, **environment: str) -> None:
    """Run it in a network namespace that has nothing but IPv6."""
    if os.geteuid() != 0:
        pytest.skip("only root can make a network namespace")
    words = ["unshare", "--net", "bash", "-c", NETWORK, "bash", *command]
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", **environment}
    done = subprocess.run(
        words, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout


def test_a_ring_breaks_and_forms_again_as_anywhere() -> None:
    chosen = "dies or cut_reaches"
    inside(
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-m",
        "process",
        "-k",
        chosen,
        "tests/contract/test_ring.py",
    )


def test_a_job_trains_from_its_first_record_to_its_last(tmp_path: Path) -> None:
    said = values.load([], ["workers=2", "minWorkers=2", "training.epochs=2"])
    (tmp_path / "values.json").write_text(json.dumps(said))
    inside(
        sys.executable, "-c", JOB, str(tmp_path / "job"), str(tmp_path / "values.json"), EDL_TOKEN="a-token"
    )
    summary = json.loads((tmp_path / "job" / "summary.json").read_text())
    assert summary["phase"] == "Succeeded"
    assert summary["records"]["applied"] == 2 * 1438
