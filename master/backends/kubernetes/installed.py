# SPDX-License-Identifier: Apache-2.0
"""An installed release: the chart's object and the workers' pods, read once and then kept up to date.

The values are validated when the object changes, and nowhere else. All users get a `JobSpec`, or the reason
why the values are invalid.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import structlog

from edl.contract.reasons import Reason
from edl.errors import ConfigError
from edl.kubernetes import overrides, pods
from edl.kubernetes.client import Api
from edl.kubernetes.informer import Informer, Object
from edl.master.backends.kubernetes.release import Found, Left, Place, made_for, template_of, values_of
from edl.master.backends.kubernetes.retry import until_answered
from edl.master.backends.kubernetes.status import read
from edl.master.spec import Invalid, JobSpec, Wanted, checked

log = structlog.get_logger()


class Installed:
    """A cache of the objects of one release, created by `open`.

    To be notified of changes, add a callback to `on_job` or `on_pod`, and run `job` and `pods`.
    """

    def __init__(self, place: Place, api: Api, job: Informer, workers: Informer):
        self.place, self.api, self.job, self.pods = place, api, job, workers
        self.on_job: list[Callable[[], None]] = []
        self.on_pod: list[Callable[[pods.Pod, bool], None]] = []  # the pod, and whether it is gone
        self.status: dict[str, str] = {}  # written by an earlier master
        self.left = Left()
        self.scale_over = ""  # the id of the last `edl scale` that is superseded
        self.notices: list[tuple[Reason, str]] = []  # reason and message of Events to record
        self._read_version = ""
        self._wanted: Wanted | None = None
        self._template_data: Mapping[str, str] | None = None  # the chart's object of `note_template`

    @classmethod
    async def open(cls, place: Place, api: Api) -> Installed:
        """Read the release's objects. Waits while the API is unavailable.

        Raises:
            ConfigError: the job's object is missing or cannot be read, or the account lacks a right.
        """

        def job_changed(thing: Object, vanished: bool) -> None:
            if vanished:
                log.warning(f"configmap {place.names.job} is gone: the release was uninstalled")
                return
            for tell in installed.on_job:
                tell()

        def pod_changed(pod: Object, vanished: bool) -> None:
            if pods.of_release(pod, place.fullname):
                for tell in installed.on_pod:
                    tell(pod, vanished)

        only = {"fieldSelector": f"metadata.name={place.names.job}"}
        job = Informer(api, place.path("configmaps"), only, job_changed)
        selector = {"labelSelector": pods.selector(place.release)}
        installed = cls(place, api, job, Informer(api, place.path("pods"), selector, pod_changed))
        await until_answered(api.pace, job.list)
        if place.names.job not in job.objects:
            raise ConfigError(f"configmap {place.names.job}: not found in namespace {place.namespace}")
        values_of(place.names.job, installed.data)
        status = await until_answered(api.pace, lambda: read(api, place, place.names.status))
        await until_answered(api.pace, installed.pods.list)
        installed.status = {key: text for key, text in status.items() if text is not None}
        installed.left = Left.read(installed.status)
        if installed.left.source:
            installed.left = installed.left.with_source(installed.source, "")
        if installed.left.source:  # the chart's text has changed since
            kept = await until_answered(api.pace, lambda: read(api, place, place.names.source))
            installed.left = installed.left.with_source(kept.get("model.py") or "", "it is not kept anywhere")
        installed.scale_over = installed.left.scale_over
        return installed

    @property
    def workers(self) -> list[pods.Pod]:
        """The pods of this job's workers, of all runs."""
        return [pod for pod in self.pods.objects.values() if pods.of_release(pod, self.place.fullname)]

    @property
    def found(self) -> Found:
        """The state of earlier masters."""
        return Found.of(self.left, self.workers, self.owner()["uid"])

    @property
    def data(self) -> Mapping[str, str]:
        """Data of the job's object: rendered by the chart, and changed by commands such as `edl scale`."""
        return (self.job.objects.get(self.place.names.job) or {}).get("data") or {}

    @property
    def source(self) -> str:
        """The text of the model as the chart has rendered it."""
        model = values_of(self.place.names.job, self.data).get("model")
        return str(model.get("source") or "") if isinstance(model, dict) else ""

    def metadata(self, name: str) -> dict[str, Any] | None:
        """Metadata of an object that the job's object owns; None if the release was uninstalled."""
        job = self.job.objects.get(self.place.names.job)
        return None if job is None else made_for(job, name)

    def owner(self) -> dict[str, str]:
        """A reference to the job's object."""
        name = self.place.names.job
        meta = (self.job.objects.get(name) or {}).get("metadata", {})
        return {"apiVersion": "v1", "kind": "ConfigMap", "name": name, "uid": str(meta.get("uid", ""))}

    def wanted(self) -> Wanted:
        """The requested values: those that the chart last rendered, changed by a later `edl scale`."""
        meta = (self.job.objects.get(self.place.names.job) or {}).get("metadata", {})
        version = str(meta.get("resourceVersion", ""))
        if self._wanted is None or version != self._read_version:
            self._read_version, self._wanted = version, self._read()
        return self._wanted

    def template(self, high: bool, run: JobSpec) -> pods.Pod:
        """Return the chart's template of a worker's pod, for a run that has begun with these values.

        A refused change of the values (of a volume claim, say) may also be in the rendered pod. Then the
        template from before that change is returned, so that a refused change has no effect.

        Args:
            high: return the template with the higher priority.

        Raises:
            ConfigError: the template is not a map in YAML, or only the one with a refused change is known.
        """
        self.note_template(run)
        if self._template_data is None:
            keys = ", ".join(run.refused_in_pod(self.wanted()))
            raise ConfigError(f"{keys}: the change is refused, and the worker's pod has it: revert it")
        return template_of(self.place.names.job, self._template_data, HIGH if high else "worker.yaml")

    def note_template(self, run: JobSpec) -> None:
        """Keep the present template of the chart, unless a refused change is in it."""
        if not run.refused_in_pod(self.wanted()):
            self._template_data = dict(self.data)

    @property
    def has_priorities(self) -> bool:
        """True if the chart has rendered a template with the higher priority."""
        return HIGH in self.data

    def numbers(self) -> dict[str, Any]:
        """Metrics: requests by (verb, resource, status), lists by reason, age of the last watch event."""
        return {
            "requests": dict(self.api.requests),
            "relists": dict(self.pods.relists),
            "watch_age_seconds": self.pods.age,
            "api_up": self.api.api_up,
        }

    def _read(self) -> Wanted:
        try:
            values = values_of(self.place.names.job, self.data)
        except ConfigError as error:
            return Invalid(str(error))  # without values: the run keeps all of its own
        scale = overrides.Scale.read(self.data)
        if scale is None or scale.id == self.scale_over:
            return checked(values)
        if why := scale.over(values):
            self.scale_over = scale.id
            self.notices.append((Reason.ScaleSuperseded, f"`edl scale {scale.workers}` is superseded: {why}"))
            return checked(values)
        return checked({**values, "workers": scale.workers})


HIGH = "worker-high.yaml"
