# SPDX-License-Identifier: Apache-2.0
"""Types and limits of the values that shape the chart's objects only; processes do not use them.

Defaults are in chart/values.yaml. `edl run` validates these values like Helm, and ignores them otherwise.
Most fields of Kubernetes (affinity, tolerations, ...) are only checked to be a map or a list here, because
Kubernetes validates them itself. Checked in detail is what Kubernetes would reject late, when the master
creates a pod.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from edl.config.messages import shown
from edl.config.types import (
    Annotations,
    Container,
    Count,
    Int,
    Interval,
    Labels,
    Mount,
    Named,
    Object,
    ObjectName,
    Objects,
    PodTemplate,
    Positive,
    Prefix,
    PullSecret,
    Registry,
    Repository,
    Resources,
    SecretKey,
    Section,
    Size,
    Suffix,
    Tag,
    Variable,
    amount,
)


class Image(Section):
    """`image`: the registry, tag and pull rules that all images share."""

    registry: Registry
    tag: Tag
    pull_policy: Literal["Always", "IfNotPresent", "Never"]
    pull_secrets: list[PullSecret]


class OneImage(Section):
    """`*.image`: one image, by tag or by digest; empty keys take those of `image`."""

    repository: Repository
    tag: Tag
    digest: str = Field(
        pattern=r"^(sha256:[0-9a-f]{64})?$", json_schema_extra={"allowed": "sha256: and 64 hex digits"}
    )


class AnyPod(Section):
    """The keys that all pods share."""

    resources: Resources
    env: list[Variable]
    env_from: Objects
    volumes: list[Named]
    volume_mounts: list[Mount]
    init_containers: list[Container]
    extra_containers: list[Container]
    node_selector: Labels
    tolerations: Objects
    affinity: Object
    topology_spread_constraints: Objects
    priority_class_name: ObjectName
    runtime_class_name: ObjectName
    scheduler_name: ObjectName
    termination_grace_period_seconds: Count = Field(ge=0)
    pod_labels: Labels
    pod_annotations: Annotations
    pod_security_context: Object
    security_context: Object
    pod_template: PodTemplate


class OwnImage(Section):
    """A component that has an image of its own."""

    image: OneImage


class Pod(AnyPod, OwnImage):
    """A pod with an image of its own."""


class Storage(Section):
    """A claim that the chart creates: its size and storage class."""

    size: Size
    storage_class: ObjectName


class ServerPod(AnyPod):
    """`ps`, the keys for the pods of parameter servers; `Servers` in edl/config/job.py has the job's own."""

    port: Int = Field(ge=1024, lt=1 << 16)
    clients: Objects
    storage: Storage


class MasterValues(Pod):
    """`master`: the pod of the master, and its standbys."""

    replicas: Int = Field(ge=1, le=3)
    unreachable_toleration_seconds: Count = Field(ge=0)


class WorkerValues(Pod):
    """`worker`: the pods of workers. The master creates them."""

    gpus: Count = Field(ge=0)
    shared_memory: Size
    spot: Literal["", "gke", "eks", "aks", "karpenter"]
    on_demand_priority_class_name: ObjectName


class Tls(Section):
    """`tls`: the Secret with the certificates; empty for no TLS."""

    existing_secret: ObjectName


class PriorityClass(Section):
    """`priorityClass`: the class of the job's pods, and whether the chart creates it."""

    create: bool
    name: ObjectName
    value: Int = Field(ge=-2147483648, le=1000000000)
    preemption_policy: Literal["Never", "PreemptLowerPriority"]


class KubernetesApi(Section):
    """`kubernetesApi`: the limits of the master's requests; `qps` is per second."""

    qps: Positive
    burst: Count = Field(ge=1)


class Token(Section):
    """`token`: the job's token, as a value or in a Secret."""

    existing_secret: ObjectName
    key: SecretKey
    value: str


class Account(Section):
    """One service account: its name, and whether the chart creates it."""

    create: bool
    name: ObjectName
    annotations: Annotations


class ServiceAccount(Section):
    """`serviceAccount`: the accounts under which master and workers run."""

    master: Account
    worker: Account


class Rbac(Section):
    """`rbac`: whether the chart creates the master's role."""

    create: bool


class AdmissionPolicy(Section):
    """`admissionPolicy`: whether the cluster shall restrict what the master's account may create."""

    enabled: bool


_CLUSTER_IP = Field(
    pattern="^(None|[0-9a-fA-F:.]+)?$", json_schema_extra={"allowed": "None, or an IP address"}
)


class Service(Section):
    """`service`: how the master is reached."""

    type: Literal["ClusterIP", "NodePort", "LoadBalancer"]
    cluster_ip: Annotated[str, _CLUSTER_IP] = Field(alias="clusterIP")
    annotations: Annotations


class NetworkPolicy(Section):
    """`networkPolicy`: which peers may connect to the job's pods, and which the pods may connect to."""

    enabled: bool
    restrict_egress: bool
    extra_egress: Objects
    clients: Objects
    metrics_from: Objects


class Monitor(Section):
    """A ServiceMonitor or PodMonitor of the Prometheus operator."""

    enabled: bool
    interval: Interval
    labels: Labels
    relabelings: Objects


class Labelled(Section):
    """An object that other programs find by its labels."""

    enabled: bool
    labels: Labels


class Metrics(Section):
    """`metrics`: the objects for Prometheus and Grafana."""

    service_monitor: Monitor
    pod_monitor: Monitor
    prometheus_rule: Labelled
    grafana_dashboard: Labelled


class MasterStorage(Storage):
    """`storage`: the master's claim for journal, checkpoints and model, where these have no other place."""

    keep: bool


class Output(Section):
    """`output`: the volume for the trained model, the journal and the summary."""

    existing_claim: ObjectName
    host_path: str
    size: Size
    storage_class: ObjectName
    access_modes: list[Literal["ReadWriteOnce", "ReadWriteMany", "ReadWriteOncePod"]] = Field(min_length=1)


class Chart(Section):
    """All values that are the chart's alone."""

    enabled: bool
    image: Image
    image_pull_secrets: list[PullSecret]
    node_selector: Labels
    tolerations: Objects
    pod_labels: Labels
    pod_annotations: Annotations
    queue_name: ObjectName
    master: MasterValues
    worker: WorkerValues
    ps: ServerPod
    output: Output
    storage: MasterStorage
    token: Token
    tls: Tls
    priority_class: PriorityClass
    kubernetes_api: KubernetesApi
    service_account: ServiceAccount
    rbac: Rbac
    admission_policy: AdmissionPolicy
    service: Service
    network_policy: NetworkPolicy
    metrics: Metrics
    extra_objects: list[Any]
    name_override: Suffix
    fullname_override: Prefix
    common_labels: Labels
    common_annotations: Annotations
    global_: Object = Field(alias="global")


MOUNTED_AT = {"checkpoint": "checkpoint.dir", "data": "data.mountPath", "model": "model.mountPath"}
_MOUNTED = {"worker": tuple(MOUNTED_AT), "ps": ("checkpoint",)}
OWN_MOUNTS = ("/tmp", "/var/lib/edl", "/etc/edl/token", "/etc/edl/tls")  # mounts that the chart itself adds


def impossible(flat_values: Mapping[str, Any]) -> list[str]:
    """List mistakes that Kubernetes would report late: two mounts at one path, a request above its limit.

    Args:
        flat_values: the values without other mistakes, by dotted key.
    """
    return [
        line
        for component in ("master", "worker", "ps")
        for line in (*_mounted_twice(_mounts(component, flat_values)), *_above(component, flat_values))
    ]


def _mounts(component: str, flat_values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The key and the path of each mount that the values add to a component."""
    for place in _MOUNTED.get(component, ()):
        there = flat_values.get(f"{place}.existingClaim") or flat_values.get(f"{place}.hostPath")
        if there and (path := flat_values.get(key := MOUNTED_AT[place])):
            yield key, path
    for n, mount in enumerate(flat_values.get(f"{component}.volumeMounts") or []):
        yield f"{component}.volumeMounts.{n}.mountPath", mount["mountPath"]


def _mounted_twice(mounts: Iterable[tuple[str, str]]) -> Iterator[str]:
    known = dict.fromkeys(OWN_MOUNTS, "")
    for key, path in mounts:
        place = path.rstrip("/")
        if earlier := known.setdefault(place, key):
            if earlier != key:
                yield f"{key} is {shown(path)}, as {earlier} is: mount paths must differ"
        else:
            yield f"{key} is {shown(path)}: edl mounts a volume of its own there"


def _above(component: str, flat_values: Mapping[str, Any]) -> Iterator[str]:
    resources = flat_values.get(f"{component}.resources") or {}
    limits = resources.get("limits") or {}
    for name, wanted in sorted((resources.get("requests") or {}).items()):
        least, most = amount(wanted), amount(limits.get(name))
        if least is not None and most is not None and least > most:
            key = f"{component}.resources"
            yield (
                f"{key}.requests.{name} is {shown(wanted)} and {key}.limits.{name} is {shown(limits[name])}: "
                "a request must not be larger than its limit"
            )
