"""Masters follow each other: what docs/lost-nodes.md and docs/ring.md say of it, on a real Kubernetes.

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
from itertools import combinations
from pathlib import Path

import pytest

from edl.contract.reasons import Reason
from tests.cluster.cluster import Nodes, Object
from tests.cluster.release import MASTER, WORKERS, Release, idling, on
from tests.cluster.test_commands import edl
from tests.process import session_worker

pytestmark = pytest.mark.timeout(600)

SEED = int(os.environ.get("EDL_SEED", "6873"))
ROUNDS = int(os.environ.get("EDL_ROUNDS", "5"))
# That survivors stand still when the node of the master and of a worker is lost, by the number of masters.
# With one, Kubernetes has to find it out: 40 s by its default times, and then 10 by the chart's.
MOST_SECONDS = {1: 90.0, 2: 10.0}


def acting(job: Release) -> str:
    holder = job.namespace.get("lease", "edl-master")["spec"]["holderIdentity"]
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


def installed(job: Release, replicas: int, workers: int = 2) -> Release:
    job.install(workers=workers, master__replicas=replicas)
    job.namespace.until("pods", lambda pods: are_ready(pods, replicas), MASTER)
    job.ring_of(workers)
    begun = int(job.status["progress"].strip("%"))  # a worker without a step does not know how long it stands
    job.until(lambda d: int(d["progress"].strip("%")) > begun + 1)
    return job


@pytest.mark.parametrize("replicas", [2, 1])
def test_the_node_of_the_acting_master_and_of_a_worker_loses_its_power(
    release: Callable[..., Release], nodes: Nodes, replicas: int
) -> None:
    job = installed(release(**idling()), replicas)
    masters = {p["metadata"]["name"]: p["spec"]["nodeName"] for p in job.namespace.get("pods", "-l", MASTER)}
    assert len(set(masters.values())) == replicas, "each on a node of its own"
    first = acting(job)
    node = masters[first]
    lost = on(job.namespace, node)
    assert len(lost) == 1
    known = len(job.reshaped())
    nodes.off(node)
    job.told("ring 2 -> 1 in ", reason=Reason.RingReshaped, seconds=120)
    told = changes(job, known)
    print("stood still:", told)
    assert stalls(told)[0] < MOST_SECONDS[replicas]
    assert acting(job) != first
    assert replicas == 1 or acting(job) in masters

    def replaced(pods: list[Object]) -> bool:
        return (
            len({p["metadata"]["name"] for p in pods if "edl.dev/rank" in p["metadata"]["labels"]} - lost)
            == 2
        )

    job.namespace.until("pods", replaced, WORKERS, seconds=90)
    summary = job.is_exact()
    assert summary["failures"] == []
    assert summary["state_losses"] == 0


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_rolling_update_of_the_master_stops_nothing(release: Callable[..., Release], replicas: int) -> None:
    job = installed(release(**idling()), replicas)
    workers = {p["metadata"]["uid"] for p in job.namespace.get("pods", "-l", WORKERS)}
    first, known = acting(job), len(job.reshaped())
    job.upgrade("--wait", master__replicas=replicas, workers=2, master__podAnnotations__update="another")
    before = {p["metadata"]["name"] for p in job.namespace.get("pods", "-l", MASTER)} - {first}
    assert len(before) >= replicas

    def settled(pods: list[Object]) -> bool:
        names = {p["metadata"]["name"] for p in pods}
        return first not in names and are_ready(pods, replicas) and len(names) == replicas

    job.namespace.until("pods", settled, MASTER, seconds=120)
    job.told("a new master took over")
    told = changes(job, known)
    print("stood still:", told)
    assert all("0 records redone" in text for text in told), told
    assert {p["metadata"]["uid"] for p in job.namespace.get("pods", "-l", WORKERS)} == workers
    summary = job.is_exact()
    assert summary["state_losses"] == 0


def test_a_second_master_stands_by_and_the_service_leads_to_the_first(
    release: Callable[..., Release],
) -> None:
    job = installed(release(**idling()), 1)
    first = acting(job)
    job.namespace.kubectl("scale", "deployment/edl-master", "--replicas=2")
    masters = job.namespace.until("pods", lambda pods: are_ready(pods, 2), MASTER)
    (second,) = {p["metadata"]["name"] for p in masters} - {first}
    assert "stands by" in job.namespace.kubectl("logs", second)
    assert acting(job) == first

    def leads_to(name: str) -> Callable[[list[Object]], bool]:
        def so(pods: list[Object]) -> bool:
            return [p["metadata"]["name"] for p in pods if "edl.dev/acting" in p["metadata"]["labels"]] == [
                name
            ]

        return so

    job.namespace.until("pods", leads_to(first), MASTER)
    known = len(job.reshaped())
    job.namespace.kubectl("delete", "pod", first, "--wait=false")
    job.namespace.until("pods", leads_to(second), MASTER)
    job.told("a new master took over")
    print("stood still:", changes(job, known))
    summary = job.is_exact()
    assert summary["state_losses"] == 0


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
            and done >= {(what, member) for what in ("fed", "acting") for member in last["members"]}
        )


@contextmanager
def leases(job: Release, file: Path) -> Iterator[Callable[[], list[tuple[int, str]]]]:
    """Whom the Lease has named since: each term, and its holder."""
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


def test_masters_workers_and_the_api_server_are_cut_off_from_each_other(
    release: Callable[..., Release], nodes: Nodes, tmp_path: Path
) -> None:
    chance, job = random.Random(SEED), release(**idling())
    told = Told(Path(job.values["output.hostPath"]) / "obeyed")
    told.folder.mkdir()
    told.folder.chmod(0o777)
    parties = ("acting", "standby", "API server", "worker", "other worker")
    rounds: list[list[tuple[str, str]]] = [[] for _ in range(ROUNDS)]
    for pair in combinations(parties, 2):  # each as often, whatever the seed
        for number in chance.sample(range(ROUNDS), max(1, round(0.4 * ROUNDS))):
            rounds[number].append(pair)
    installed(job, 2)
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
            time.sleep(seconds)  # for whatever happens meanwhile
            nodes.part()
            healed = time.monotonic()
            until(lambda since=healed: told.train_together(2, since))
            found = f"whole again after {time.monotonic() - healed:.1f} s, term {held()[-1][0]}"
            print(f"{seconds:.1f} s without {', '.join(map(' - '.join, cuts))}: {found}", flush=True)
        summary = job.is_exact()
        terms = held()
    # One master for each term, and terms only grow.
    assert [term for term, _ in terms] == sorted(term for term, _ in terms)
    assert len(dict(terms)) == len({(term, name) for term, name in terms if name})
    assert len(dict(terms)) > 1, "no master followed another one: choose another seed"
    session_worker.check_terms(told.rings())
    every = session_worker.told_in(told.folder)
    for worker in {t["worker"] for t in every}:
        session_worker.check_terms([t for t in every if t["worker"] == worker and t["what"] != "fed"])
    acts = [m for m in job.namespace.get("pods", "-l", MASTER) if "edl.dev/acting" in m["metadata"]["labels"]]
    assert [m["metadata"]["name"] for m in acts] == [acting(job)]
    assert summary["failures"] == []
    # Its journal lacks what others did between its terms, and nothing else.
    assert edl(job, "audit").startswith("exactly once")


def until(so: Callable[[], bool], seconds: float = 60) -> None:
    """Workers write into files: they are looked at now and again."""
    deadline = time.monotonic() + seconds
    while not so():
        assert time.monotonic() < deadline, f"not so after {seconds:.0f} s"
        time.sleep(0.1)
