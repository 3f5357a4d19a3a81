"""A release as it is installed: the chart's object and the workers' pods, read once and then kept up to date.

What the values mean is checked when the object changes, and nowhere else: everybody gets a `JobSpec`,
or the reason why there is none.
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
    """The objects of one release. `open` makes one; who wants to be notified of changes adds itself to
    `on_job` or `on_pod`, and runs `job` and `pods`."""

    def __init__(self, place: Place, api: Api, job: Informer, workers: Informer):
        self.place, self.api, self.job, self.pods = place, api, job, workers
        self.on_job: list[Callable[[], None]] = []
        self.on_pod: list[Callable[[pods.Pod, bool], None]] = []  # the pod, and whether it is gone
        self.status: dict[str, str] = {}  # what an earlier master has written
        self.left = Left()
        self.scale_over = ""  # the id of the last `edl scale` that is superseded
        self.notices: list[tuple[Reason, str]] = []  # reason and message of what people should read
        self._read_version = ""
        self._wanted: Wanted | None = None
        self._template_data: Mapping[str, str] | None = None  # of the chart's object, when its pod was noted

    @classmethod
    async def open(cls, place: Place, api: Api) -> Installed:
        """Read what is there. Waits for an API that is unavailable.

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
        if installed.left.source:  # the chart's text is another one meanwhile
            kept = await until_answered(api.pace, lambda: read(api, place, place.names.source))
            installed.left = installed.left.with_source(kept.get("model.py") or "", "it is not kept anywhere")
        installed.scale_over = installed.left.scale_over
        return installed

    @property
    def workers(self) -> list[pods.Pod]:
        """The pods of this job's workers, of whichever run."""
        return [pod for pod in self.pods.objects.values() if pods.of_release(pod, self.place.fullname)]

    @property
    def found(self) -> Found:
        """What earlier masters have left."""
        return Found.of(self.left, self.workers, self.owner()["uid"])

    @property
    def data(self) -> Mapping[str, str]:
        """What the chart has rendered, and what people have asked for by hand."""
        return (self.job.objects.get(self.place.names.job) or {}).get("data") or {}

    @property
    def source(self) -> str:
        """The text of the model as the chart has rendered it."""
        model = values_of(self.place.names.job, self.data).get("model")
        return str(model.get("source") or "") if isinstance(model, dict) else ""

    def metadata(self, name: str) -> dict[str, Any] | None:
        """Of an object that the master makes for the job's own; None if the release was uninstalled."""
        job = self.job.objects.get(self.place.names.job)
        return None if job is None else made_for(job, name)

    def owner(self) -> dict[str, str]:
        """A reference to the job's object."""
        name = self.place.names.job
        meta = (self.job.objects.get(name) or {}).get("metadata", {})
        return {"apiVersion": "v1", "kind": "ConfigMap", "name": name, "uid": str(meta.get("uid", ""))}

    def wanted(self) -> Wanted:
        """What the job is to be: as the chart has last rendered it, and as somebody has scaled it since."""
        meta = (self.job.objects.get(self.place.names.job) or {}).get("metadata", {})
        version = str(meta.get("resourceVersion", ""))
        if self._wanted is None or version != self._read_version:
            self._read_version, self._wanted = version, self._read()
        return self._wanted

    def template(self, high: bool, run: JobSpec) -> pods.Pod:
        """The worker's pod as the chart has rendered it, for a run that has begun with these values.

        While the chart's object has a refused change that is also in the pod (another claim, say), it is the
        pod of before that change: a refused change has no effect.

        Args:
            high: the one with the higher priority.

        Raises:
            ConfigError: it is not a map in YAML, or only that of a refused change is known.
        """
        self.note_template(run)
        if self._template_data is None:
            keys = ", ".join(run.refused_in_pod(self.wanted()))
            raise ConfigError(f"{keys}: the change is refused, and the worker's pod has it: revert it")
        return template_of(self.place.names.job, self._template_data, HIGH if high else "worker.yaml")

    def note_template(self, run: JobSpec) -> None:
        """The chart's object may have changed: keep its pod, unless a refused change is in it."""
        if not run.refused_in_pod(self.wanted()):
            self._template_data = dict(self.data)

    @property
    def has_priorities(self) -> bool:
        """The chart has rendered a template with the higher priority."""
        return HIGH in self.data

    def numbers(self) -> dict[str, Any]:
        """For the metrics: requests by (verb, resource, status), lists by reason, age of the last news."""
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
            self.notices.append(
                (Reason.ScaleSuperseded, f"`edl scale {scale.workers}` no longer holds: {why}")
            )
            return checked(values)
        return checked({**values, "workers": scale.workers})


HIGH = "worker-high.yaml"
