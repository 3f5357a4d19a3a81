"""A release as its objects tell it: where it is, what the chart has rendered, what earlier masters have left.

Nothing here talks to anybody: dictionaries in, values out.
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
SAYS_NO_VERSION = "0.1.0"  # whose masters did not write it


@dataclass(frozen=True)
class Place:
    """Where in Kubernetes this master is: what the chart tells it by its environment."""

    namespace: str
    release: str
    fullname: str  # what the names of all the release's objects begin with
    address: str  # host:port of the master, as workers reach it
    pod: str = ""  # the master's own
    pod_uid: str = ""
    server_address: str = ""  # host:port of a parameter server, {} for its index; empty: the chart makes none

    @classmethod
    def from_environment(cls) -> Place:
        """As EDL_NAMESPACE, EDL_RELEASE, EDL_FULLNAME, EDL_MASTER_ADDRESS, POD_NAME, POD_UID and
        EDL_SERVER_ADDRESS say.

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
        """Of the namespace's objects of a kind (`pods`), or of one of them."""
        return "/".join(filter(None, (f"/{group}/namespaces/{self.namespace}", kind, name)))


@dataclass(frozen=True)
class Left:
    """What an earlier master has written into the status, for the next one.

    Args:
        run_id: of its run, "" if there is none.
        next_id: of its next worker.
        values: with which the run was started; None if unknown.
        ended: the phase in which the run has ended, "" if it has not.
        ended_at: when, in seconds since 1970; 0 if it has not.
        scale_over: the id of the last `edl scale` that does not hold any more.
        source: the digest of the model's text, which the values lack; "" if they lack none.
        version: of edl, of the run's masters and workers; "" if unknown.
        phase: the last one.
        started_at: when the run has begun, in seconds since 1970; 0 if unknown.
        began_with: what of another training it has begun with, in words.
        requested: the `runId` of the values that the run was started with.
        past: what the run has done; None if unknown.
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
        """From the status ConfigMap's data; whatever is not sound is as if it were not there."""
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
        """With this text of the model in the values, if it is the one that they lack.

        Args:
            otherwise: why the values count as unknown if it is not; "": another text may be tried.
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
    """What earlier masters have left when a master starts.

    Args:
        run_id: of the run that an earlier master has left, None if there is none.
        earlier: what that run was started with; None if unknown.
        next_id: of the next worker. Counts pods of other runs too: no name
            is used twice.
        workers: of that run, whose pods have not ended: id and pod name, "" for one that does not run yet.
        ended: the phase in which that run has ended, "" if it has not.
        ended_at: when, in seconds since 1970.
        version: of edl, of that run's masters and workers; "" if unknown.
        started: there has been a ring, so its workers may hold what nobody else has.
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
        """From the status and the pods that are there.

        Args:
            owner: UID of the job's object. The pods of another one are those of a release of this name that
                was uninstalled a moment ago: they are on their way out, and their run has ended with it.
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
            run, spec, next_id, tuple(sorted(workers)), left.ended, left.ended_at, left.version,
            left.phase != Phase.Starting, left.requested,
        )  # fmt: skip

    def foreign(self, version: str) -> bool:
        """A master of this version cannot go on with the run: workers speak with their own version only."""
        return self.run_id is not None and not self.ended and self.version not in ("", version)

    def another_requested(self, wanted: Wanted) -> bool:
        """Whether the values request another run: their `runId` differs. (Invalid values request nothing.)"""
        return isinstance(wanted, JobSpec) and wanted.config.run_id != self.requested

    @property
    def holds_state(self) -> bool:
        """Workers run that may hold what the run has learned."""
        return self.started and any(pod for _, pod in self.workers)


def made_for(job: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The metadata of an object that the master makes for the job's own: it is deleted with it.

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
    """The worker's pod under that key.

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
    """Of YAML. To read a worker's takes milliseconds, and each of a thousand is made from it."""
    return json.dumps(yaml.safe_load(text), sort_keys=True)  # it has dates, and keys of any kind
