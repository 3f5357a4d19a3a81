# SPDX-License-Identifier: Apache-2.0
"""Masters follow each other: what docs/lost-workers.md and docs/ring.md say of it, on a real Kubernetes.

EDL_SEED and EDL_ROUNDS choose what is cut off from what, and how often.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster, Images, Nodes, Object, new_namespace
from tests.cluster.conftest import new_release
from tests.cluster.release import MASTER, WORKERS, Release, idling, on
from tests.cluster.test_commands import edl
from tests.cluster.test_job import taken_over
from tests.support.jobs import session_worker

pytestmark = pytest.mark.timeout(600)

SEED = int(os.environ.get("EDL_SEED", "6873"))
ROUNDS = int(os.environ.get("EDL_ROUNDS", "2"))
# The survivors' stall when the node of the master and of a worker is lost, by the number of masters.
# With one, Kubernetes has to find it out: 40 s by its default times, and then 10 by the chart's.
MAX_SECONDS = {1: 90.0, 2: 10.0}


def acting(job: Release) -> str:
    holder = job.namespace.get("lease", "edl-master")["spec"].get("holderIdentity") or ""  # released
    return str(holder).rpartition("_")[0]


def are_ready(pods: list[Object], number: int) -> bool:
    alive = [p for p in pods if "deletionTimestamp" not in p["metadata"]]
    conditions = [c for p in alive for c in p["status"].get("conditions") or []]
    ready = sum(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
    return len(alive) == ready == number


def changes(job: Release, known: int = 0) -> list[str]:
    return job.reshaped()[known:]


def stalls(told: list[str]) -> list[float]:
    """The seconds that the survivors of each change of the ring stood still."""
    return [float(found[1]) for text in told if (found := re.search(r" in ([\d.]+) s,", text))]


WORKERS_WANTED = 2


@pytest.fixture(scope="module")
def shared_job(
    cluster: Cluster, images: Images, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Release]:
    """One release for all tests of this file: its masters change, and its two workers train on.

    At the end its weights have to be exact, and no worker may have failed or lost its state.
    """
    with new_namespace(cluster, "masters") as namespace:
        output = tmp_path_factory.mktemp("output")
        job = new_release(namespace, images, output, "edl", **idling(records=48_000))
        folder = obeyed(job).folder
        folder.mkdir()
        folder.chmod(0o777)
        job.install(workers=WORKERS_WANTED)
        failed = request.session.testsfailed
        yield job
        if request.session.testsfailed > failed:
            return  # the failed test's report tells of it, and the job may be in any state
        summary = job.is_exact()
        assert summary["failures"] == []
        assert summary["state_losses"] == 0
        # The journal lacks what other masters did between the terms of the last one, and nothing else.
        assert edl(job, "audit").startswith("exactly once")


@pytest.fixture
def job(shared_job: Release) -> Release:
    """The release, with its ring whole and in motion."""
    shared_job.ring_of(WORKERS_WANTED)
    began = step(shared_job.status)  # a worker without a step cannot measure its stall
    shared_job.until(lambda data: step(data) > began)
    return shared_job


def step(status: dict[str, str]) -> int:
    return int(json.loads(status.get("status.json", "{}")).get("step") or 0)


def has_masters(job: Release, number: int) -> None:
    """Have the Deployment run this many masters, and wait until all of them are ready."""
    job.namespace.kubectl("scale", "deployment/edl-master", f"--replicas={number}")
    job.namespace.until("pods", lambda pods: are_ready(pods, number), MASTER, seconds=120)


def spread(job: Release, nodes: Nodes, masters: int) -> None:
    """Put one of the two workers, and of two masters, on each node.

    The chart only prefers this: while a deleted pod ends, its replacement may come to any node.
    """
    for selector, number in ((MASTER, masters), (WORKERS, WORKERS_WANTED)):
        homes = {name: on(job.namespace, name, selector) for name in nodes.names}
        crowded = max(homes, key=lambda name: len(homes[name]))
        if len(homes[crowded]) > 1:
            job.namespace.cluster.kubectl("cordon", crowded)
            try:
                job.namespace.kubectl("delete", "pod", max(homes[crowded] - {acting(job)}))
                job.namespace.until("pods", partial(are_ready, number=number), selector, seconds=120)
            finally:
                job.namespace.cluster.kubectl("uncordon", crowded)
        assert max(len(on(job.namespace, name, selector)) for name in nodes.names) == 1, selector
    job.ring_of(WORKERS_WANTED)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_rolling_update_of_the_master_stops_nothing(job: Release, replicas: int) -> None:
    has_masters(job, replicas)
    workers = {p["metadata"]["uid"] for p in job.namespace.get("pods", "-l", WORKERS)}
    first, known, before = acting(job), len(job.reshaped()), taken_over(job.namespace.get("events"))
    job.upgrade(
        "--wait",
        master__replicas=replicas,
        workers=WORKERS_WANTED,
        master__podAnnotations__update=f"with-{replicas}",
    )
    others = {p["metadata"]["name"] for p in job.namespace.get("pods", "-l", MASTER)} - {first}
    assert len(others) >= replicas

    def settled(pods: list[Object]) -> bool:
        names = {p["metadata"]["name"] for p in pods}
        return first not in names and are_ready(pods, replicas) and len(names) == replicas

    job.namespace.until("pods", settled, MASTER, seconds=120)
    job.namespace.until("events", lambda events: taken_over(events) > before)
    told = changes(job, known)
    print("stood still:", told)
    assert all("0 records redone" in text for text in told), told
    assert {p["metadata"]["uid"] for p in job.namespace.get("pods", "-l", WORKERS)} == workers


@dataclass(frozen=True)
class Told:
    """What the workers have written down (tests/models/obedient.py)."""

    folder: Path

    def rings(self) -> list[session_worker.Told]:
        """Those that came up, also under another master, in the order of time."""
        return [t for t in session_worker.told_in(self.folder) if t["what"] == "up"]

    def train_together(self, number: int, since: float) -> bool:
        """So many are in the last ring, and each has trained in it, and heard a master, since then."""
        told = session_worker.told_in(self.folder)
        last = next((t for t in reversed(told) if t["what"] == "up"), None)
        begun = max(since, last["at"]) if last else since
        done = {(t["what"], t["worker"]) for t in told if t["at"] > begun}
        return (
            last is not None
            and len(last["members"]) == number
            and done >= {(what, member) for what in ("fed", "active_master") for member in last["members"]}
        )


@contextmanager
def leases(job: Release, file: Path) -> Iterator[Callable[[], list[tuple[int, str]]]]:
    """The holders that the Lease has named since, each with its term."""
    listed, command = job.namespace.cluster.watching("leases", job.namespace.name, seconds=400)

    def seen() -> list[tuple[int, str]]:
        lines = [line for line in file.read_text().splitlines(True) if line.endswith("\n")]
        specs = [thing["spec"] for thing in (*listed, *(json.loads(line)["object"] for line in lines))]
        return [(spec["leaseTransitions"], str(spec.get("holderIdentity") or "")) for spec in specs]

    with (
        open(file, "wb") as out,
        subprocess.Popen(command, stdout=out, env=job.namespace.cluster.env) as watch,
    ):
        try:
            yield seen
        finally:
            watch.kill()


def obeyed(job: Release) -> Told:
    return Told(Path(job.values["output.hostPath"]) / "obeyed")


def test_masters_workers_and_the_api_server_are_cut_off_from_each_other(
    job: Release, nodes: Nodes, tmp_path: Path
) -> None:
    """A few rounds: the simulator has thousands."""
    chance, told = random.Random(SEED), obeyed(job)
    parties = ("acting", "standby", "API server", "worker", "other worker")
    rounds: list[list[tuple[str, str]]] = [[] for _ in range(ROUNDS)]
    for pair in combinations(parties, 2):  # each equally often, for every seed
        for number in chance.sample(range(ROUNDS), max(1, round(0.4 * ROUNDS))):
            rounds[number].append(pair)
    has_masters(job, 2)
    with leases(job, tmp_path / "leases") as held:
        for cuts in rounds:
            masters = {m["metadata"]["name"]: m for m in job.namespace.get("pods", "-l", MASTER)}
            first = acting(job)
            (second,) = masters.keys() - {first}
            workers = [w for w in job.namespace.get("pods", "-l", WORKERS) if w["status"].get("podIP")]
            alive = sorted(w["status"]["podIP"] for w in workers if "deletionTimestamp" not in w["metadata"])
            addresses = [masters[name]["status"]["podIP"] for name in (first, second)]
            where = dict(zip(parties, [*addresses, nodes.machine, *alive[:2]], strict=True))
            seconds = chance.uniform(2, 9)
            nodes.part((where[a], where[b]) for a, b in cuts)
            time.sleep(seconds)  # the masters and workers react meanwhile
            nodes.part()
            healed = time.monotonic()
            until(lambda since=healed: told.train_together(2, since))
            found = f"whole again after {time.monotonic() - healed:.1f} s, term {held()[-1][0]}"
            print(f"{seconds:.1f} s without {', '.join(map(' - '.join, cuts))}: {found}", flush=True)
        terms = held()
    # One master for each term, and terms only grow.
    assert [term for term, _ in terms] == sorted(term for term, _ in terms)
    assert len(dict(terms)) == len({(term, name) for term, name in terms if name})
    assert len(dict(terms)) > 1, "no master followed a different one: choose another seed"
    session_worker.check_terms(told.rings())
    every = session_worker.told_in(told.folder)
    for worker in {t["worker"] for t in every}:
        session_worker.check_terms([t for t in every if t["worker"] == worker and t["what"] != "fed"])
    acts = [m for m in job.namespace.get("pods", "-l", MASTER) if "edl.dev/acting" in m["metadata"]["labels"]]
    assert [m["metadata"]["name"] for m in acts] == [acting(job)]


@pytest.mark.parametrize("replicas", [2, 1])
def test_the_node_of_the_acting_master_and_of_a_worker_loses_its_power(
    job: Release, nodes: Nodes, replicas: int
) -> None:
    has_masters(job, replicas)
    spread(job, nodes, replicas)
    masters = {p["metadata"]["name"]: p["spec"]["nodeName"] for p in job.namespace.get("pods", "-l", MASTER)}
    first = acting(job)
    node = masters[first]
    lost = on(job.namespace, node)
    assert len(lost) == 1
    known = len(job.reshaped())
    nodes.off(node)

    def shrunk(_: list[Object]) -> bool:
        return any("ring 2 -> 1 in " in text for text in changes(job, known))

    job.namespace.until("events", shrunk, seconds=120)
    told = changes(job, known)
    print("stood still:", told)
    assert stalls(told)[0] < MAX_SECONDS[replicas]
    assert acting(job) != first
    assert replicas == 1 or acting(job) in masters

    def replaced(pods: list[Object]) -> bool:
        return (
            len({p["metadata"]["name"] for p in pods if "edl.dev/rank" in p["metadata"]["labels"]} - lost)
            == WORKERS_WANTED
        )

    job.namespace.until("pods", replaced, WORKERS, seconds=90)


def until(so: Callable[..., bool], seconds: float = 60) -> None:
    """Workers write into files: they are looked at now and again."""
    deadline = time.monotonic() + seconds
    while not so():
        assert time.monotonic() < deadline, f"not so after {seconds:.0f} s"
        time.sleep(0.1)
