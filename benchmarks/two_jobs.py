# SPDX-License-Identifier: Apache-2.0
"""Two jobs that do not both fit, elastic and by gang scheduling: the shape of ElasticDL's experiment 1.

There are six slots, and each job has four workers. The second is submitted when the first has done
a quarter of its work. There are three sides:

- elastic: the second begins with the two slots that are free, and has four when the first has ended.
- shared: three workers of each job, half of the slots, have priority. So the third of the second job
  takes the place of the fourth of the first, and each has three until the first has ended.
- gang: the second waits until all four fit, and both keep their four to their end.

A slot is a request of 600m of CPU: three fit on each of the two nodes of 2 CPUs, and the rest is
for the two masters. So it is Kubernetes' own scheduler that fills the slots, on every side. Gang
scheduling is what Kueue does with a group of pods: they are made with a scheduling gate, and the
gates of all four are taken away together, as soon as four slots are free.

A worker's step is sleep, in proportion to its records, so that the jobs do not compete for the
CPUs of one machine, and half the workers take twice as long.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.lines import Lines, Seen
from benchmarks.report import Row
from tests.cluster.cluster import ROOT, Cluster, Images, Namespace, Object, new_namespace
from tests.cluster.release import Release, counting, has_ended, is_worker

SLOTS, GANG = 6, 4
MODEL = ROOT / "tests" / "models" / "counting_busy.py"
EPOCHS = 4  # so that a quarter is an epoch
RECORDS, BATCH, RECORD_SECONDS = 30_000, 32, 0.005  # 150 s; steps of 40 ms with four workers, 80 with two
SECONDS = 400.0  # for a job to end
GATE = "worker.podTemplate.spec.schedulingGates[0].name"


@dataclass(frozen=True)
class Side:
    """One way to share the slots.

    Args:
        values: of both jobs.
        beside: how many workers the second job has while the first one trains.
    """

    values: dict[str, str]
    beside: int


SIDES = {
    "elastic": Side({}, SLOTS - GANG),
    "shared": Side({"onDemandWorkers": str(SLOTS // 2)}, SLOTS // 2),
    "gang": Side({"minWorkers": str(GANG), GATE: "edl.test/gang"}, 0),
}


@dataclass(frozen=True)
class Outcome:
    """What a pair of jobs took, in seconds.

    Args:
        makespan: from the first submit to the last success.
        busy: summed over all workers, from when each had its slot until it had ended.
        wait: from the submit of the second job to its first ring.
        speed: steps a second of the second job beside the first; with all its workers, if it waits for that.
    """

    makespan: float
    busy: float
    wait: float
    speed: float


class Pair:
    """The two jobs of one side."""

    def __init__(self, namespace: Namespace, images: Images, output: Path, side: Side):
        self.namespace, self.images, self.output, self.side = namespace, images, output, side
        self.pods, self.maps = (
            Lines(namespace.cluster.watching(kind, namespace.name, seconds=3600)[1], namespace.cluster.env)
            for kind in ("pods", "configmaps")
        )

    def submit(self, name: str) -> tuple[Release, float]:
        """A job, and when it was submitted."""
        folder = self.output / name
        folder.mkdir()
        folder.chmod(0o777)
        values = {
            **self.images.values,
            **counting(RECORDS, 0),
            "worker.env[1].name": "EDL_RECORD_SECONDS",
            "worker.env[1].value": str(RECORD_SECONDS),
            "output.hostPath": str(folder),
            "training.epochs": str(EPOCHS),
            "training.batchSize": str(BATCH),
            "workers": str(GANG),
            "worker.resources.requests.cpu": "600m",
            **self.side.values,
        }
        release, at = Release(self.namespace, values, name), time.monotonic()
        release.install("--set-file", f"model.source={MODEL}")
        if GATE in values:
            self._admit(name)
        return release, at

    def _admit(self, name: str) -> None:
        """What a gang scheduler does: let the job's pods go, all at once, when all of them fit."""
        pods = self.pods.until(lambda seen: _fitting(seen, name), SECONDS)
        patch = json.dumps({"spec": {"schedulingGates": None}})
        things = {"apiVersion": "v1", "kind": "List", "items": pods}
        self.namespace.kubectl("patch", "-f", "-", "--patch", patch, text=json.dumps(things))

    def status(self, name: str, so: Callable[[dict[str, str]], object]) -> float:
        """When the API server reported a status of the job that fulfills a condition."""

        def mine(change: Object) -> object:
            thing = change["object"]
            return thing["metadata"]["name"] == f"{name}-edl-status" and so(thing.get("data") or {})

        return self.maps.when(mine, SECONDS)

    def run(self) -> Outcome:
        one, first_at = self.submit("one")
        self.status("one", lambda data: data.get("epoch", "").startswith("2/"))
        two, second_at = self.submit("two")
        began_at = self.status("two", lambda data: data.get("phase") == "Training")
        ends = [self.status(name, lambda d: d.get("phase") == "Succeeded") for name in ("one", "two")]
        one.is_exact()
        summary = two.is_exact()
        busy = self.pods.until(_busy, SECONDS)
        return Outcome(max(ends) - first_at, busy, began_at - second_at, _speed(summary, self.side.beside))

    def close(self) -> None:
        self.pods.close()
        self.maps.close()


def _fitting(seen: Seen, name: str) -> list[Object] | None:
    """The gated pods of a job, if there are all of them and slots for all."""
    pods = {c["object"]["metadata"]["name"]: c["object"] for _, c in seen if is_worker(c["object"])}
    gated = [p for p in pods.values() if p["spec"].get("schedulingGates")]
    used = [p for p in pods.values() if p not in gated and not has_ended(p)]
    mine = [p for p in gated if p["metadata"]["labels"]["app.kubernetes.io/instance"] == name]
    return mine if len(mine) == GANG and len(used) + GANG <= SLOTS else None


def _busy(seen: Seen) -> float | None:
    """The seconds that all workers together had a slot, once all have ended."""
    since: dict[str, float] = {}
    until: dict[str, float] = {}
    for at, change in seen:
        pod = change["object"]
        if is_worker(pod) and pod["spec"].get("nodeName"):
            since.setdefault(pod["metadata"]["uid"], at)
        if is_worker(pod) and has_ended(pod):
            until.setdefault(pod["metadata"]["uid"], at)
    return sum(until[uid] - since[uid] for uid in since) if set(since) == set(until) else None


def _speed(summary: dict[str, Any], size: int) -> float:
    """Steps a second in rings of that size, which were followed by others; 0: in all there were."""
    if not size:
        return float(summary["step"] / summary["goodput_seconds"]["useful"])
    stretches = [(a, b) for a, b in pairwise(summary["generations"]) if len(a["members"]) == size]
    seconds = sum(b["formed_at"] - a["formed_at"] for a, b in stretches)
    return float(sum(b["step"] - a["step"] for a, b in stretches) / seconds)


def measure(cluster: Cluster, images: Images, rounds: int) -> list[Row]:
    """All sides in turns, so that a noisy minute hits each."""
    found: dict[str, list[Outcome]] = {name: [] for name in SIDES}
    for number in range(rounds):
        for name, side in SIDES.items():
            with (
                tempfile.TemporaryDirectory(prefix="edl-bench-") as directory,
                new_namespace(cluster, f"bench-{name}") as namespace,
            ):
                output = Path(directory)
                output.chmod(0o755)
                pair = Pair(namespace, images, output, side)
                try:
                    outcome = pair.run()
                finally:
                    pair.close()
            found[name].append(outcome)
            told = ", ".join(f"{what} {value:.3g}" for what, value in vars(outcome).items())
            report.say(f"round {number + 1}: {name}: {told}")
    return [row for name in ("elastic", "shared") for row in _rows(name, found[name], found["gang"])]


def _rows(name: str, ours: Sequence[Outcome], gang: Sequence[Outcome]) -> Iterator[Row]:
    def both(value: Callable[[Outcome], float]) -> tuple[list[float], list[float]]:
        return [value(o) for o in ours], [value(o) for o in gang]

    yield _row(f"two jobs, {name}: makespan", *both(lambda o: o.makespan), 0.80)
    yield _row(f"two jobs, {name}: worker-seconds", *both(lambda o: o.busy), 1.03)
    yield Row(f"two jobs, {name}: wait of the second", *both(lambda o: o.wait), "s", "ElasticDL: 23 s")
    workers = f"{SIDES[name].beside} workers (peer: {GANG})"
    yield Row(f"two jobs, {name}: steps a second, {workers}", *both(lambda o: o.speed), "", "")


def _row(name: str, ours: Sequence[float], peer: Sequence[float], most: float) -> Row:
    ratios = [a / b for a, b in zip(ours, peer, strict=True)]
    row = Row(f"{name} (ratio {report.spread(ratios)})", list(ours), list(peer), "s", f"ratio <= {most:g}")
    row.met = (row.ratio or 1) <= most
    return row
