# SPDX-License-Identifier: Apache-2.0
"""`scripts/bench queue`: ten jobs of four workers in a queue of Kueue, edl's beside Jobs that begin again.

Two teams have quota for four workers each, and lend each other what they do not use. One has ten jobs of 60
s with four workers each; the other takes its quota back every 60 s, for 20 s. Kueue admits each worker of
edl by itself, and a Job as a whole: it is suspended when its quota is taken back, and begins again. A step
of edl sleeps in proportion to its records; a pod of a Job starts the same Python, imports the same, and
sleeps for 60 s. So nothing competes for the CPUs of one machine. edl keeps its default checkpoints.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks import report
from benchmarks.lines import Lines
from benchmarks.report import Row
from tests.cluster.cluster import Images, Namespace, Object, new_namespace, push_images, running
from tests.cluster.kueue import built, kueue, queues
from tests.cluster.release import Release, has_ended

JOBS, WORKERS, SECONDS, CPU = 10, 4, 60, 200
AGAIN, BURST = 60, 20  # seconds
LONGEST = 1200.0
LOOP = f"""
import time
import numpy as np
import edl

RECORDS = {SECONDS * 10 * 8 * WORKERS}
count = np.zeros(RECORDS, np.float32)
job = edl.join(data=edl.arrays(np.arange(RECORDS, dtype=np.int32)), state=[count])
for step in job.steps():
    (mine,) = step.records
    time.sleep(0.1 * len(mine) / 8)
    gradient = np.zeros(RECORDS, np.float32)
    gradient[mine] = 1.0 / max(1, len(mine))
    if (mean := step.mean([gradient], loss=1.0)) is not None:
        count += mean[0] > 0

def save(directory):
    assert (count == 1).all()
    (directory / "count").write_bytes(count.tobytes())

job.save(save)
"""


def a_job(namespace: Namespace, images: Images, name: str, queue: str, seconds: int) -> None:
    """Create a Job that Kueue manages, whose pods import what an own loop of edl does, and sleep."""
    requests = {"cpu": f"{CPU}m", "memory": "256Mi"}
    command = ["python", "-P", "-c", f"import edl, numpy, time; time.sleep({seconds})"]
    container = {"name": "main", "image": images["worker"], "command": command}
    pod = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1}
    template = {
        "metadata": {"labels": {"queue": queue}},
        "spec": {**pod, "containers": [{**container, "resources": {"requests": requests}}]},
    }
    size = {"parallelism": WORKERS, "completions": WORKERS, "backoffLimit": 100}
    metadata = {"name": name, "labels": {"kueue.x-k8s.io/queue-name": queue}}
    spec = {"suspend": True, **size, "template": template}
    namespace.apply({"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec})


def of_edl(namespace: Namespace, images: Images, script: Path, name: str) -> None:
    """Install a release that does the same work."""
    requests = {"cpu": f"{CPU}m", "memory": "256Mi"}
    asked = {f"worker.resources.requests.{what}": much for what, much in requests.items()}
    asked |= {"master.resources.requests.cpu": "50m", "master.resources.requests.memory": "128Mi"}
    job = {"training.epochs": "1", "queueName": "team-a", "workers": str(WORKERS)}
    job["worker.podLabels.queue"] = "team-a"
    values = {**images.values, "priorityClass.create": "false", **asked, **job}
    release = Release(namespace, values, name)
    release.install("--set-file", f"model.script={script}")


def ended(change: Object) -> str:
    """The name of a release or Job that has succeeded, or nothing.

    Raises:
        AssertionError: it has failed.
    """
    thing = change["object"]
    phase = (thing.get("data") or {}).get("phase", "")
    assert phase not in ("Failed", "Stopped"), thing
    done = phase == "Succeeded" or thing.get("status", {}).get("completionTime")
    return str(thing["metadata"]["name"]) if done and thing["metadata"]["name"].startswith("job-") else ""


def held(pods: Lines, queue: str, end: float) -> float:
    """For how many seconds pods of a queue had their places, all together."""
    since: dict[str, float] = {}
    until: dict[str, float] = {}
    for at, change in pods.seen:
        pod = change["object"]
        uid = pod["metadata"]["uid"]
        if pod["metadata"]["labels"].get("queue") == queue and pod["spec"].get("nodeName"):
            since.setdefault(uid, at)
            if has_ended(pod) or change["type"] == "DELETED":
                until.setdefault(uid, at)
    return sum(max(0.0, min(until.get(uid, end), end) - at) for uid, at in since.items())


def run(namespace: Namespace, images: Images, script: Path | None) -> tuple[float, float]:
    """The seconds until all jobs have ended, and the share of the quota left to them that was work."""
    cluster, name = namespace.cluster, namespace.name
    kind = "configmaps" if script else "jobs"
    over = threading.Event()

    def other_team() -> None:
        number = 0
        while not over.wait(AGAIN):
            number += 1
            a_job(namespace, images, f"urgent-{number}", "team-b", BURST)

    with (
        Lines(cluster.watching("pods", name, seconds=3600)[1], cluster.env) as pods,
        Lines(cluster.watching(kind, name, seconds=3600)[1], cluster.env) as things,
    ):
        began = time.monotonic()
        (other := threading.Thread(target=other_team)).start()
        try:
            for number in range(JOBS):
                if script:
                    of_edl(namespace, images, script, f"job-{number}")
                else:
                    a_job(namespace, images, f"job-{number}", "team-a", SECONDS)
            things.until(lambda seen: len({ended(c) for _, c in seen} - {""}) == JOBS or None, LONGEST)
            end = time.monotonic()
        finally:
            over.set()
            other.join()
        left = 2 * WORKERS * (end - began) - held(pods, "team-b", end)
        report.say(f"{name}: {end - began:.0f} s, held {held(pods, 'team-a', end):.0f} of {left:.0f}")
        return end - began, JOBS * WORKERS * SECONDS / left


def measure(only: list[str], rounds: int) -> Iterator[list[Row]]:
    found: dict[str, list[tuple[float, float]]] = {"edl": [], "jobs": []}
    home = built()
    assert home, "Kueue is not built: run scripts/dev/kueue"
    with running() as cluster, kueue(cluster, home):
        images = push_images(cluster)
        for side in sorted(found) * rounds:
            with (
                tempfile.TemporaryDirectory(prefix="edl-bench-") as directory,
                new_namespace(cluster, f"bench-{side}") as namespace,
                queues(namespace, **dict.fromkeys(("team-a", "team-b"), f"{WORKERS * CPU}m")),
            ):
                (script := Path(directory) / "train.py").write_text(LOOP)
                found[side].append(run(namespace, images, script if side == "edl" else None))
    for index, (name, unit) in enumerate([("makespan", "s"), ("useful share of the quota", "")]):
        ours, peer = ([figures[index] for figures in found[side]] for side in ("edl", "jobs"))
        yield [Row(f"ten jobs in a queue: {name}", ours, peer, unit, "")]


if __name__ == "__main__":
    sys.exit(report.main("scripts/bench queue", __doc__, ("ten",), measure))
