# SPDX-License-Identifier: Apache-2.0
"""A release of the chart in a test's namespace: installed with helm, watched with kubectl."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edl.contract import artifacts
from edl.contract.reasons import Reason
from tests.cluster.cluster import ROOT, Namespace, Object
from tests.support.jobs.evidence import check_weights

CHART = ROOT / "chart"
SESSION_WORKER = ROOT / "tests" / "support" / "jobs" / "session_worker.py"
WORKERS = "app.kubernetes.io/component=worker"
MASTER = "app.kubernetes.io/component=master"
# Small, so that four workers fit on the two nodes with room for a fifth.
SMALL = {
    "worker.resources.requests.cpu": "400m",
    "worker.resources.requests.memory": "512Mi",
    "worker.terminationGracePeriodSeconds": "10",
    "export.verify": "false",  # takes seconds at the end of each job
}


class Release:
    """One release, by the same commands as a user's."""

    def __init__(self, namespace: Namespace, values: dict[str, str], name: str = "edl"):
        self.namespace, self.values, self.name = namespace, values, name
        self.full = name if "edl" in name else f"{name}-edl"

    def install(self, *flags: str, **sets: object) -> None:
        self.namespace.helm("install", self.name, CHART, *self._sets(sets), *flags)

    def upgrade(self, *flags: str, ok: bool = True, **sets: object) -> str:
        return self.namespace.helm("upgrade", self.name, CHART, *self._sets(sets), *flags, ok=ok)

    def _sets(self, sets: dict[str, object]) -> list[str]:
        every = {**SMALL, **self.values, **{key.replace("__", "."): v for key, v in sets.items()}}
        words = []
        for key, value in every.items():
            words += [_flag(key), f"{key}={value}"]
        return words

    # --- what is so

    @property
    def status(self) -> dict[str, str]:
        found = self.namespace.get("configmap", f"{self.full}-status")
        return dict(found.get("data") or {})

    def until(self, so: Callable[[dict[str, str]], object], seconds: float = 120) -> dict[str, str]:
        """Until something is so of the status ConfigMap's data; what it says then."""

        def mine(things: list[Object]) -> dict[str, str]:
            named = (t for t in things if t["metadata"]["name"] == f"{self.full}-status")
            return next((t.get("data") or {} for t in named), {})

        return mine(self.namespace.until("configmaps", lambda things: so(mine(things)), seconds=seconds))

    def phase(self, *phases: str, seconds: float = 180) -> dict[str, str]:
        return self.until(lambda data: data.get("phase") in phases, seconds)

    def ring_of(self, size: int, seconds: float = 180) -> dict[str, str]:
        """Until there is a ring of that size, all of whose members have the state."""

        def is_up(data: dict[str, str]) -> bool:
            change = json.loads(data.get("status.json", "{}")).get("last_change")
            whole = bool(change) and change["up_seconds"] is not None and len(change["members"]) == size
            return whole and data.get("phase") == "Training" and data.get("ringSize") == str(size)

        return self.until(is_up, seconds)

    def workers(self, phase: str = "Running") -> list[str]:
        pods = self.namespace.get("pods", "-l", f"{WORKERS},app.kubernetes.io/instance={self.name}")
        alive = [
            p for p in pods if p["status"]["phase"] == phase and "deletionTimestamp" not in p["metadata"]
        ]
        return sorted((p["metadata"]["name"] for p in alive), key=lambda n: int(re.findall(r"\d+$", n)[0]))

    def told(self, *words: str, reason: str = "", seconds: float = 60) -> Object:
        """The first Event of the release of that reason whose message has all these words; waits for it."""

        def find(events: list[Object]) -> Object | None:
            mine = (
                e
                for e in events
                if e["involvedObject"]["name"] == f"{self.full}-job" and reason in ("", e["reason"])
            )
            return next((e for e in mine if all(word in e["message"] for word in words)), None)

        found = find(self.namespace.until("events", find, seconds=seconds))
        assert found is not None
        return found

    def events(self) -> list[str]:
        """`reason: message` of each event on the release's object, oldest first."""
        found = self.namespace.get("events", "--sort-by=.lastTimestamp")
        return [
            f"{e['reason']}: {e['message']}"
            for e in found
            if e["involvedObject"]["name"] == f"{self.full}-job"
        ]

    def reshaped(self) -> list[str]:
        """Return the Events about changes of the ring, oldest first."""
        return [event for event in self.events() if event.startswith(Reason.RingReshaped)]

    def master(self) -> Object:
        """The pod of the master that acts."""
        pods = self.namespace.get("pods", "-l", MASTER)
        holder = self.namespace.get("lease", f"{self.full}-master").get("spec", {}).get("holderIdentity", "")
        (pod,) = [
            p
            for p in pods
            if "deletionTimestamp" not in p["metadata"]
            and (len(pods) == 1 or holder.rpartition("_")[0] == p["metadata"]["name"])
        ]
        return pod

    def summary(self) -> dict[str, Any]:
        return dict(json.loads(self.status["summary.json"]))

    def go(self) -> None:
        """Have a job that idles train what is left, at full speed."""
        (Path(self.values["output.hostPath"]) / "go").touch()

    def is_exact(self) -> dict[str, Any]:
        """The job succeeds, and the weights of its model count each record once an epoch; its summary.

        Raises:
            AssertionError: something speaks against that.
        """
        self.go()
        data = self.phase("Succeeded", "Failed", "Stopped", seconds=300)
        assert data["phase"] == "Succeeded", data
        summary = self.summary()
        records, epochs = summary["records"], summary["task"]["epochs"]
        assert records["applied"] == epochs * records["size"]
        assert len(set(summary["digests"].values())) == 1
        model = Path(self.values["output.hostPath"]) / artifacts.MODEL
        assert check_weights(model, records["size"], epochs) == ""
        return summary

    def stop(self) -> dict[str, Any]:
        """Have the job end before it has trained all records; its summary."""
        command = "edl", "stop", "--discard", "--release", self.name, "--namespace", self.namespace.name
        self.namespace.cluster.run(Path(sys.executable).with_name(command[0]), *command[1:])
        self.phase("Stopped")
        return self.summary()


def _flag(key: str) -> str:
    """How helm is given a value: a model's is its file, a variable of the environment is always a text."""
    if key == "model.source":
        return "--set-file"
    return "--set-string" if key.endswith("].value") else "--set"


def counting(records: int, sleep: float) -> dict[str, str]:
    """Values for the counting model of so many records, with so many seconds of work in a step."""
    return {
        "model.module": "counting",
        "worker.env[0].name": "EDL_COUNTING_RECORDS",
        "worker.env[0].value": str(records),
        "worker.env[1].name": "EDL_COUNTING_SLEEP",
        "worker.env[1].value": str(sleep),
    }


def idling(records: int = 24_000, **more: str) -> dict[str, str]:
    """Values for a job of the counting model that all but idles until `Release.go`."""
    size = {"worker.env[0].name": "EDL_COUNTING_RECORDS", "worker.env[0].value": str(records)}
    model = {"model.source": str(ROOT / "tests" / "models" / "obedient.py")}
    return {**model, **size, "training.epochs": "1", "workers": "4", **more}


def talking(**more: str) -> dict[str, str]:
    """Values for a job whose workers have no model (tests/support/jobs/session_worker.py).

    They start in a second, and serve tests whose claims are not about training. The job never finishes;
    `Release.stop` ends it.
    """
    container = "worker.podTemplate.spec.containers[0]"
    command = f"{{python,-P,/var/lib/edl/{SESSION_WORKER.name}}}"
    return {f"{container}.name": "worker", f"{container}.command": command, **more}


def in_ring(pods: list[Object]) -> list[Object]:
    return [p for p in pods if "edl.dev/rank" in p["metadata"]["labels"]]


def on(namespace: Namespace, node: str, selector: str = WORKERS) -> set[str]:
    """The names of the living workers, or other pods of the selector, on a node."""
    pods = namespace.get(
        "pods", "-l", selector, f"--field-selector=spec.nodeName={node},status.phase=Running"
    )
    return {p["metadata"]["name"] for p in pods if "deletionTimestamp" not in p["metadata"]}


def is_worker(pod: Object) -> bool:
    return pod["metadata"].get("labels", {}).get("app.kubernetes.io/component") == "worker"


def has_ended(pod: Object) -> bool:
    return pod["status"]["phase"] in ("Succeeded", "Failed")
