# SPDX-License-Identifier: Apache-2.0
"""Parsers of a release's objects: its place, the chart's rendered values, and the state of earlier masters.

All functions are pure: they convert dictionaries to values, and send no requests.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import structlog
import yaml
from pydantic import TypeAdapter

from edl.config import model_check
from edl.contract.ids import RunId, WorkerId
from edl.contract.phases import Phase
from edl.errors import ConfigError
from edl.kubernetes import pods
from edl.kubernetes.names import Names
from edl.master.core import facts
from edl.master.spec import Invalid, JobSpec, Wanted, checked

log = structlog.get_logger()

PAST = TypeAdapter(facts.Past)  # as JSON, in the status
SAYS_NO_VERSION = "0.1.0"  # masters of this version of edl do not write their version


@dataclass(frozen=True)
class Place:
    """This master's place in Kubernetes, which the chart passes in environment variables."""

    namespace: str
    release: str
    fullname: str  # prefix of the names of all objects of the release
    address: str  # host:port of the master, as workers reach it
    pod: str = ""  # the master's own pod
    pod_uid: str = ""
    server_address: str = ""  # host:port of a parameter server, {} for its index; empty without servers

    @classmethod
    def from_environment(cls) -> Place:
        """Read the place from the environment.

        The variables are EDL_NAMESPACE, EDL_RELEASE, EDL_FULLNAME, EDL_MASTER_ADDRESS, POD_NAME, POD_UID and
        EDL_SERVER_ADDRESS.

        Raises:
            ConfigError: one of the first four is missing.
        """
        names = ("EDL_NAMESPACE", "EDL_RELEASE", "EDL_FULLNAME", "EDL_MASTER_ADDRESS")
        if missing := [n for n in names if not os.environ.get(n)]:
            raise ConfigError(
                f"{', '.join(missing)}: not in the environment; the chart sets it in the master's pod"
            )
        namespace, release, fullname, address = (os.environ[n] for n in names)
        own = (os.environ.get(name, "") for name in ("POD_NAME", "POD_UID", "EDL_SERVER_ADDRESS"))
        return cls(namespace, release, fullname, address, *own)

    @property
    def names(self) -> Names:
        return Names(self.fullname)

    def path(self, kind: str, name: str = "", group: str = "api/v1") -> str:
        """Return the API path of the namespace's objects of a kind (`pods`), or of one object."""
        return "/".join(filter(None, (f"/{group}/namespaces/{self.namespace}", kind, name)))


@dataclass(frozen=True)
class Left:
    """The state that an earlier master has written into the status, for the next master.

    Args:
        run_id: the id of its run, "" if it had no run.
        next_id: the id of its next worker.
        values: the values that the run was started with; None if unknown.
        ended: the phase in which the run ended, "" if it has not ended.
        ended_at: the time of that end, in seconds since 1970; 0 if the run has not ended.
        scale_over: the id of the last `edl scale` that was superseded.
        source: the digest of the model's text if the values lack the text; "" if they do not.
        version: the version of edl of the run's masters and workers; "" if unknown.
        phase: the last phase.
        started_at: when the run began, in seconds since 1970; 0 if unknown.
        began_with: the state of a different training that the run began with, in words.
        requested: the `runId` of the values that the run was started with.
        past: the history of the run; None if unknown.
        written_at: when this was written, in seconds since 1970; 0 if unknown.
    """

    run_id: str = ""
    next_id: int = 0
    values: dict[str, Any] | None = None
    ended: str = ""
    ended_at: float = 0.0
    scale_over: str = ""
    source: str = ""
    version: str = ""
    phase: str = ""
    started_at: float = 0.0
    began_with: str = ""
    requested: str = ""
    past: facts.Past | None = None
    written_at: float = 0.0

    @classmethod
    def read(cls, data: Mapping[str, str]) -> Left:
        """Parse the data of the status ConfigMap; parts that cannot be parsed count as missing."""
        left = cls()
        try:
            if "summary.json" in data:
                at = datetime.fromisoformat(data["endedAt"]).timestamp()
                left = replace(left, ended=data["phase"], ended_at=at)
            state, values = json.loads(data.get("state", "{}")), json.loads(data.get("values", "null"))
            if isinstance(state.get("runId"), str) and isinstance(state.get("nextId"), int):
                known = values if isinstance(values, dict) else None
                left = replace(
                    left,
                    run_id=state["runId"],
                    next_id=state["nextId"],
                    values=known,
                    scale_over=str(state.get("scaleOver", "")),
                    source=str(state.get("source", "")),
                    version=str(state.get("version", SAYS_NO_VERSION)),
                    phase=str(data.get("phase", "")),
                    started_at=float(state.get("startedAt", 0)),
                    began_with=str(state.get("beganWith", "")),
                    requested=str(state.get("requested", "")),
                )
                if "past" in data:
                    left = replace(left, past=PAST.validate_json(data["past"]))
                if "updated" in data:
                    left = replace(left, written_at=datetime.fromisoformat(data["updated"]).timestamp())
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            log.warning(f"the status of an earlier master cannot be read, and is not used: {error!r}")
        return left

    def with_source(self, text: str, otherwise: str) -> Left:
        """Add this text of the model to the values, if its digest is the one that they lack.

        Args:
            otherwise: why the values count as unknown if the digest differs; "" leaves them as they are, so
                that a different text can be tried.
        """
        if self.values is not None and model_check.digest(text) == self.source:
            model = {**self.values.get("model", {}), "source": text}
            return replace(self, values={**self.values, "model": model}, source="")
        if not otherwise:
            return self
        log.warning(f"the values of run {self.run_id} are unknown: model.source {self.source}: {otherwise}")
        return replace(self, values=None, source="")


@dataclass(frozen=True)
class Found:
    """The state of earlier masters that a starting master has found.

    Args:
        run_id: the id of the run of an earlier master, None without such a run.
        earlier: the values that this run was started with; None if unknown.
        next_id: the id of the next worker. Pods of other runs count too, so no pod name is used twice.
        workers: workers of this run whose pods have not ended: id and pod name, "" if the pod does not run
            yet.
        ended: the phase in which this run ended, "" if it has not ended.
        ended_at: the time of that end, in seconds since 1970.
        version: the version of edl of this run's masters and workers; "" if unknown.
        started: there has been a ring, so the workers may hold the only copy of the state.
        requested: the `runId` of the values that the run was started with.
    """

    run_id: RunId | None
    earlier: JobSpec | None
    next_id: int
    workers: tuple[tuple[WorkerId, str], ...]
    ended: str
    ended_at: float
    version: str = ""
    started: bool = True
    requested: str = ""

    @classmethod
    def of(cls, left: Left, known: Iterable[pods.Pod], owner: str) -> Found:
        """Derive the state from the status and the existing pods.

        Args:
            owner: UID of the job's object. Pods with a different owner are of a release of this name that was
                uninstalled a moment ago: they are being deleted, and their run has ended.
        """
        known = list(known)
        living = [p for p in known if not pods.ended(p) and pods.owned_by(p, owner)]
        runs = {pods.of(p)[0] for p in living}
        run_id = left.run_id or (runs.pop() if len(runs) == 1 else None)
        numbers = [worker for p in known if (worker := pods.of(p)[1]) is not None]
        workers = (
            (worker, p["metadata"]["name"] if pods.running(p) else "")
            for p in living
            if (worker := pods.of(p)[1]) is not None and pods.of(p)[0] == run_id
        )
        next_id = max([left.next_id, *(n + 1 for n in numbers)])
        run = RunId(run_id) if run_id else None
        spec = checked(left.values) if left.values is not None else None
        if isinstance(spec, Invalid):
            log.warning(f"the values of run {run_id} are invalid in this version of edl: {spec.why}")
            spec = None
        return cls(
            run,
            spec,
            next_id,
            tuple(sorted(workers)),
            left.ended,
            left.ended_at,
            left.version,
            left.phase != Phase.Starting,
            left.requested,
        )

    def foreign(self, version: str) -> bool:
        """True if a master of this version cannot continue the run: its workers have a different version."""
        return self.run_id is not None and not self.ended and self.version not in ("", version)

    def another_requested(self, wanted: Wanted) -> bool:
        """True if the values request a new run: their `runId` differs. Invalid values request nothing."""
        return isinstance(wanted, JobSpec) and wanted.config.run_id != self.requested

    @property
    def holds_state(self) -> bool:
        """True if running workers may hold the run's trained state."""
        return self.started and any(pod for _, pod in self.workers)


def made_for(job: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Metadata of an object that the master creates; the job's object owns it, so both are deleted together.

    Args:
        job: the job's ConfigMap.
    """
    meta = job["metadata"]
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": meta["name"], "uid": meta["uid"]}
    labels = {**(meta.get("labels") or {}), pods.MANAGER: pods.OURS}
    labels = {key: value for key, value in labels.items() if not key.startswith("helm.sh/")}
    return {"name": name, "labels": labels, "ownerReferences": [owner]}


def values_of(job: str, data: Mapping[str, str]) -> dict[str, Any]:
    """The job's values in the chart's ConfigMap of that name.

    Raises:
        ConfigError: they are not a JSON object.
    """
    try:
        values = json.loads(data.get("values.json", ""))
    except ValueError as error:
        raise ConfigError(f"configmap {job}: values.json is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"configmap {job}: values.json is not a map of keys")
    return values


def template_of(job: str, data: Mapping[str, str], key: str) -> pods.Pod:
    """Parse the template of a worker's pod under that key.

    Raises:
        ConfigError: it is not a map in YAML that JSON can hold.
    """
    try:
        pod = json.loads(_as_json(data.get(key, "")))
    except (yaml.YAMLError, TypeError) as error:
        raise ConfigError(f"configmap {job}: {key} is not valid: {error}") from error
    if not isinstance(pod, dict):
        raise ConfigError(f"configmap {job}: {key} is not a pod")
    return pod


@functools.lru_cache(maxsize=4)
def _as_json(text: str) -> str:
    """Convert YAML to JSON. Cached, because parsing takes milliseconds and is needed for each worker."""
    return json.dumps(yaml.safe_load(text), sort_keys=True)  # TypeError for dates and some keys
