# SPDX-License-Identifier: Apache-2.0
"""The command line against a release on a real cluster: one job from its install to its end."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import yaml

from edl.contract.reasons import Reason
from tests.cluster.cluster import Namespace
from tests.cluster.release import WORKERS, Release, talking

EDL = str(Path(sys.executable).with_name("edl"))


def start(job: Release, *words: object, config: Path | None = None) -> subprocess.Popen[str]:
    where = ["--release", job.name, "--namespace", job.namespace.name]
    how = ["--kubeconfig", str(config)] if config else []
    return subprocess.Popen(
        [EDL, *map(str, words), *where, *how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=job.namespace.cluster.env,
    )


def edl(job: Release, *words: object, code: int = 0, config: Path | None = None) -> str:
    """What a command prints; where it is to fail, what it complains of."""
    command = start(job, *words, config=config)
    out, err = command.communicate(timeout=120)
    assert command.returncode == code, out + err
    assert "Traceback" not in err
    return err if code else out


def somebody_who_may_look(namespace: Namespace, folder: Path) -> Path:
    """The kubeconfig of an account with the rights of the ClusterRole `view`."""
    namespace.kubectl("create", "serviceaccount", "jane")
    account = f"--serviceaccount={namespace.name}:jane"
    namespace.kubectl("create", "rolebinding", "jane", "--clusterrole=view", account)
    config = yaml.safe_load(Path(namespace.cluster.kubeconfig).read_text())
    token = namespace.kubectl("create", "token", "jane").strip()
    config["users"] = [{"name": user["name"], "user": {"token": token}} for user in config["users"]]
    path = folder / "jane"
    path.write_text(yaml.safe_dump(config))
    return path


def test_a_job_from_its_install_to_its_end(release: Callable[..., Release], tmp_path: Path) -> None:
    # Which workers there are is checked by number: none may be lost for a second of silence under load.
    sets = {"model.module": "counting", "elastic.heartbeatTimeoutSeconds": "20"}
    job = release(**talking(workers="3"), **sets)
    job.install()
    waited = edl(job, "wait", "--for", "training", "--timeout", "2m")
    # Training means that there is a ring, which may not have made its first step.
    trains = r"Training: (\d workers? \(generation \d+\)|the ring of generation \d+ is being )"
    assert re.match(trains, waited), waited
    job.ring_of(3)
    jane = somebody_who_may_look(job.namespace, tmp_path)

    named = edl(job, "logs", "worker", code=1, config=jane).rpartition(": ")[2]
    lines = job.namespace.kubectl(*shlex.split(named)[1:]).splitlines()
    assert any(re.match(r'\[pod/edl-worker-\d/worker\] .*"what": "up"', line) for line in lines)
    labelled = f"{WORKERS},edl.dev/state=member,edl.dev/rank"
    job.namespace.until("pods", lambda pods: len(pods) == 3, labelled)
    told = edl(job, "status", config=jane)
    assert re.match(r"counting: Training, 3 workers \(generation \d+\)", told), told
    for n in range(3):
        assert re.search(rf"{n} +edl-worker-{n} +[012] +member +\d.* n[12]", told), told
    assert "RingFormed: ring 0 -> " in told
    assert 'cannot patch resource "configmaps"' in edl(job, "scale", 2, code=1, config=jane)

    assert "workers is 65 and maxWorkers is 64" in edl(job, "scale", 65, code=1)
    assert edl(job, "scale", 2) == "workers 3 -> 2\n"
    job.ring_of(2)
    said = job.upgrade(logLevel="debug")
    assert "But `edl scale` has set 2 workers, and that remains in effect" in said
    assert edl(job, "scale", 4) == "workers 2 -> 4\n", "the upgrade has left it alone"
    job.ring_of(4)
    said = job.upgrade(workers=3)
    assert "`edl scale 3" in said, "the chart still says 3"
    said = job.upgrade(workers=2)
    assert "`edl scale` had set 4 workers; this release's number replaces it" in said
    job.ring_of(2)
    assert any(event.startswith(Reason.ScaleSuperseded) for event in job.events())

    waiting = start(job, "wait", config=jane)
    stopped = edl(job, "stop", "--discard")
    assert f"helm uninstall edl -n {job.namespace.name}" in stopped
    assert waiting.communicate(timeout=60)[0] == "Stopped: stopped by edl stop\n"
    assert waiting.returncode == 1
    testing = subprocess.Popen(
        ["helm", "--namespace", job.namespace.name, "test", "edl"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=job.namespace.cluster.env,
    )
    assert edl(job, "stop").startswith("the job has ended: Stopped, stopped by edl stop\n")
    assert edl(job, "wait", "--for", "stopped") == "Stopped: stopped by edl stop\n"
    assert json.loads(edl(job, "status", "-o", "json"))["phase"] == "Stopped"
    assert "kept in   configmap/edl-status\n" in edl(job, "status")
    assert "failed" in testing.communicate(timeout=120)[0]
    assert re.search(
        "the master .* does not answer|the job has ended", job.namespace.kubectl("logs", "edl-test")
    )

    job.namespace.helm("uninstall", "edl", "--wait")
    gone = edl(job, "status", code=1)
    assert gone == f"edl: release edl not found in namespace {job.namespace.name}; no edl releases found\n"
