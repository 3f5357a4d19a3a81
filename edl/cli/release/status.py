# SPDX-License-Identifier: Apache-2.0
"""The status of a release's job, computed from ConfigMaps, pods and Events without I/O.

The chart writes the job's ConfigMap, the master its status, the kubelets the status of the pods. Each is the
authority for the facts that only it can know.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import Any

import yaml

from edl import config
from edl.cli.shared import display
from edl.cli.shared.jobs import ENDED, NO_STATUS, JobSnapshot, Phase, stop_failure
from edl.contract import artifacts, tokens
from edl.contract.heartbeats import WorkerRow
from edl.contract.modes import task_of
from edl.contract.reasons import Reason
from edl.errors import EdlError
from edl.kubernetes import overrides, pods
from edl.kubernetes.informer import Object
from edl.kubernetes.names import Names

MAX_EVENTS = 8
# Reasons why a scheduled pod does not start that are only in Events, not in its status.
ONLY_IN_EVENTS = frozenset(
    {
        "FailedMount",
        "FailedAttachVolume",
        "FailedMapVolume",
        "FailedCreatePodSandBox",
    }
)
LOST_FILES = "what the script saves will be lost with its pod; set output.size or output.existingClaim"
LOST = "the trained model {} lost with the worker's pod; set output.size or output.existingClaim"
LOST_PREDICTIONS = (
    "the predictions will be lost with the workers' pods; set output.size, output.existingClaim or "
    "prediction.dir"
)


@dataclass(frozen=True)
class FoundRelease:
    """A release's job: its names, and its two ConfigMaps at the time of reading."""

    namespace: str
    release: str
    names: Names
    job: Object
    status: Object

    @property
    def told(self) -> Mapping[str, str]:
        """The data of the status ConfigMap, which the master writes."""
        return self.status.get("data") or {}

    @property
    def phase(self) -> str:
        return self.told.get("phase", str(Phase.Starting))

    @property
    def reason(self) -> str:
        return self.told.get("reason", NO_STATUS)

    @property
    def ended(self) -> bool:
        return self.phase in ENDED

    @property
    def report(self) -> dict[str, Any]:
        """The master's summary if the job has ended, else its status; at least phase and reason."""
        in_short = {"phase": self.phase, "reason": self.reason}
        for key in ("summary.json", "status.json"):
            with suppress(KeyError, ValueError):
                report = dict(json.loads(self.told[key]))
                # The phase may be newer than the report: with invalid values, no run begins.
                if "records" in report and report["phase"] == self.phase:
                    freed = self.told.get("servers")
                    return report | in_short | ({"servers_freed": freed} if freed else {})
        return in_short

    def stop_failure(self, asked: str) -> str:
        """Why the stop request with this id failed; empty if it did not."""
        with suppress(ValueError):
            return stop_failure({"stop": json.loads(self.told.get("stop", "null"))}, asked)
        return ""

    @property
    def refused(self) -> str:
        """The values of the chart that are not applied, and why; empty if all are applied."""
        return self.told.get("refused", "")

    @property
    def state(self) -> dict[str, Any]:
        """The state that the master stores for its successor."""
        with suppress(ValueError):
            return dict(json.loads(self.told.get("state", "{}")))
        return {}

    @property
    def values(self) -> dict[str, Any]:
        """The job's values, from the ConfigMap that the chart writes.

        Raises:
            EdlError: the values cannot be read.
        """
        try:
            return dict(json.loads(self.job["data"]["values.json"]))
        except (KeyError, TypeError, ValueError) as error:
            raise EdlError(f"configmap {self.names.job}: cannot read values.json") from error

    @property
    def scaled(self) -> overrides.Scale | None:
        """The number of workers that `edl scale` has set, while it is in force."""
        scale = overrides.Scale.read(self.job.get("data") or {})
        over = scale is None or scale.id == self.state.get("scaleOver") or scale.over(self.values)
        return None if over else scale

    @property
    def mode(self) -> str:
        """The task of the job: train, evaluate or predict."""
        with suppress(EdlError):
            told = self.report.get("task", {}).get("kind") or self.values.get("mode") or "train"
            return task_of(str(told))
        return "train"

    @property
    def model(self) -> str:
        """Location of the trained model; empty: it is lost with the worker's pod."""
        if self.model_file.startswith("/"):
            return f"{self.model_file} in the container of the worker that saved it"
        return self._kept(self.model_file)

    @property
    def model_file(self) -> str:
        """Path of the trained model: in the output directory, or absolute, in its worker's container."""
        return (str(self.report.get("model", "")) if self.ended else "") or artifacts.MODEL

    @property
    def predictions(self) -> str:
        """Location of the predictions; empty: they are lost with the workers' pods."""
        with suppress(EdlError):
            if elsewhere := self.values.get("prediction", {}).get("dir"):
                if elsewhere.startswith("master://"):
                    return self._on_master(artifacts.PREDICTIONS)
                return elsewhere if "://" in elsewhere else f"{elsewhere} of the workers' containers"
        return self._kept(artifacts.PREDICTIONS)

    @property
    def stores(self) -> bool:
        """Whether the workers send what they save to the volume of the master."""
        try:
            spec = yaml.safe_load(self.job["data"]["worker.yaml"])["spec"]
            container = next(c for c in spec["containers"] if c["name"] == pods.CONTAINER)
            return any(variable["name"] == "EDL_RESULTS" for variable in container["env"])
        except (yaml.YAMLError, KeyError, TypeError, StopIteration):
            return False

    @property
    def folder(self) -> str:
        """The folder of this run's results on the volume of the master."""
        return f"run-{self.state.get('runId', '')}"

    def result(self) -> str:
        """Describe the results of the job, or warn that they will be lost; empty if it has none."""
        match self.mode:
            case "evaluate":
                return ""
            case "predict":
                where = self.predictions
                return f"predictions: {where}" if where else f"warning: {LOST_PREDICTIONS}"
        with suppress(EdlError):
            if self.values.get("model", {}).get("script"):
                where = self._kept("what the script saves")
                return f"results: {where}" if where else f"warning: {LOST_FILES}"
        where = self.model
        if self.ended:
            return ""  # `display.result` names the model
        return f"model: {where}, once the job succeeds" if where else f"warning: {LOST.format('will be')}"

    def _on_master(self, name: str) -> str:
        return f"{self.folder}/{name} in persistentvolumeclaim/{self.names.fullname}-storage"

    def _kept(self, name: str) -> str:
        """Describe the location of a file of the output directory; empty if it is lost with the pod."""
        if self.stores:
            return self._on_master(name)
        try:
            pod = yaml.safe_load(self.job["data"]["worker.yaml"])
            volume = next(v for v in pod["spec"]["volumes"] if v["name"] == "output")
        except (yaml.YAMLError, KeyError, TypeError, StopIteration):
            return ""
        if claim := volume.get("persistentVolumeClaim"):
            return f"{name} in persistentvolumeclaim/{claim['claimName']}"
        if folder := volume.get("hostPath"):
            return f"{folder['path']}/{name} on the worker's node"
        return ""

    def selector(self, *components: str) -> str:
        """Label selector of the pods of these components."""
        labels = self.job["metadata"]["labels"]
        of = {pods.NAME: labels.get(pods.NAME, ""), pods.INSTANCE: self.release}
        if pods.JOB in labels:  # older charts lack this label
            of[pods.JOB] = labels[pods.JOB]
        same = ",".join(f"{key}={text}" for key, text in of.items())
        return f"{same},{pods.COMPONENT} in ({','.join(components)})"


def token_secret(found: FoundRelease) -> tuple[str, str]:
    """The Secret with the job's token, and the key in it.

    Raises:
        EdlError: the worker's pod in the job's ConfigMap cannot be read.
    """
    try:
        spec = yaml.safe_load(found.job["data"]["worker.yaml"])["spec"]
        container = next(c for c in spec["containers"] if c["name"] == pods.CONTAINER)
        file = next(e["value"] for e in container["env"] if e["name"] == tokens.FILE)
        source = next(v["secret"] for v in spec["volumes"] if v["name"] == "token")
        return str(source["secretName"]), PurePosixPath(file).name
    except (yaml.YAMLError, KeyError, TypeError, StopIteration) as error:
        raise EdlError(f"configmap {found.names.job}: cannot read worker.yaml") from error


def snapshot(
    found: FoundRelease, there: Sequence[Object], happened: Sequence[Object], warnings: Sequence[Object] = ()
) -> JobSnapshot:
    """Take a snapshot of the job.

    Args:
        there: the pods of master and workers.
        happened: the Events of the job.
        warnings: Events of the namespace about pods and about the controllers that create them.
    """
    news = _latest(events(happened))
    workers = _workers(found.report, there, warnings)
    data = {
        "release": found.release,
        "namespace": found.namespace,
        **found.report,
        "workers": workers,
        "events": news,
    }
    kept = f"configmap/{found.names.status}"
    data["refused"] = found.refused
    notes = [f"not applied: {found.refused}"] if found.refused else []
    left = found.result()
    if found.ended:
        notes += [left] if left else []
        return JobSnapshot(data, kept, found.model or LOST.format("is"), tuple(notes), _given(found))
    notes += [f"worker {w['id']} is pending: {w['delay']}" for w in workers if w["delay"]]
    if problem := master_problem(there, found.names.master, warnings):
        notes.append(f"{problem}; last status: {found.told.get('updated', 'none')}")
    if scale := found.scaled:
        applied = "" if found.told.get("workers") == str(scale.workers) else "; not yet applied by the master"
        notes.append(f"edl scale: {scale.workers} workers in place of the chart's {scale.instead}{applied}")
    if left:
        notes.append(left)
    if news:
        notes.append("")
    notes += [f"{display.age(e['at']):>7} ago  {e['reason']}: {e['message']}" for e in news]
    return JobSnapshot(data, kept, found.model, tuple(notes), _given(found), _age(found))


def _age(found: FoundRelease) -> float:
    """Seconds since the master wrote the status; 0 if it has written none."""
    written = found.told.get("updated")
    return display.seconds_since(written) if written else 0.0


def _given(found: FoundRelease) -> str:
    """The model as the values have it; "" if they cannot be read."""
    with suppress(EdlError):
        return config.parse(found.values).model.name
    return ""


def events(happened: Sequence[Object]) -> list[dict[str, Any]]:
    """Sort Events, oldest first."""
    return [_event(e) for e in sorted(happened, key=lambda e: (str(_event(e)["at"]), _version(e)))]


def _version(thing: Object) -> int:
    """Resource version, which orders Events of the same second; 0 if it is unknown."""
    text = str(thing.get("metadata", {}).get("resourceVersion", ""))
    return int(text) if text.isdecimal() else 0


def _latest(happened: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Select the newest Events, with only the last one about an epoch."""
    epochs = [e for e in happened if e["reason"] == Reason.EpochApplied]
    return [e for e in happened if e not in epochs[:-1]][-MAX_EVENTS:]


def _event(thing: Object) -> dict[str, Any]:
    at = thing.get("lastTimestamp") or thing["metadata"].get("creationTimestamp", "")
    return {"at": at, "reason": thing.get("reason", ""), "message": thing.get("message", "")}


def unexplained(there: Sequence[Object]) -> bool:
    """True if Events may explain why a pod does not run or the master has no pod."""
    silent = any(not (pods.started(pod) or pods.ended(pod) or pods.delay(pod)) for pod in there)
    return silent or not any(pods.component(pod) == "master" for pod in there)


def master_problem(there: Sequence[Object], name: str = "", warnings: Sequence[Object] = ()) -> str:
    """Why no master is running; empty if one is.

    Args:
        name: name of its Deployment, which is the prefix of the names of its ReplicaSets.
        warnings: Events of the namespace.
    """
    masters = [p for p in there if pods.component(p) == "master" and not pods.deleting(p)]
    if not masters:
        why = _last([e for e in warnings if e.get("reason") == "FailedCreate" and _about(e).startswith(name)])
        return f"the master is not running: its Deployment has no pod{why and f' ({why})'}"
    if any(pods.running(p, "master") for p in masters):
        return ""
    whys = (f"{p['metadata']['name']}: {_why_not(p, warnings) or 'it is starting'}" for p in masters)
    return f"the master is not running ({', '.join(whys)})"


def _why_not(pod: Object, warnings: Sequence[Object]) -> str:
    """Why a pod does not run yet, from its status or an Event; empty if unknown."""
    if (why := pods.delay(pod)) or pods.started(pod):
        return why
    name = pod["metadata"]["name"]
    return _last([e for e in warnings if e.get("reason") in ONLY_IN_EVENTS and _about(e) == name])


def _about(event: Object) -> str:
    return str(event.get("involvedObject", {}).get("name", ""))


def _last(warnings: Sequence[Object]) -> str:
    """Message of the newest of these Events; empty if `warnings` is empty."""
    last = max(warnings, key=lambda event: str(_event(event)["at"]), default=None)
    return f"{last['reason']}: {pods.short(last)}" if last is not None else ""


def _workers(
    report: Mapping[str, Any], there: Sequence[Object], warnings: Sequence[Object]
) -> list[dict[str, Any]]:
    """Merge the live pods with the master's last report about the workers."""
    heard = {w["id"]: w for w in report.get("workers", [])}
    numbers = {pods.of(pod)[1] for pod in there}
    # Workers whose pod cannot be created, because of a quota or a missing right.
    rows = [{**w, "node": ""} for w in heard.values() if w["state"] == "pending" and w["id"] not in numbers]
    for pod in there:
        worker = pods.of(pod)[1]
        if worker is None or pods.ended(pod):
            continue
        labels, known = pod["metadata"]["labels"], heard.get(worker, {})
        rank = labels.get(pods.RANK, "")
        rows.append(
            {
                **asdict(WorkerRow(id=worker)),
                **known,
                "handle": pod["metadata"]["name"],
                "rank": int(rank) if rank else None,
                "state": labels.get(pods.STATE, ""),
                "delay": _why_not(pod, warnings),
                "node": pod["spec"].get("nodeName", ""),
            }
        )
    return sorted(rows, key=lambda w: int(w["id"]))
