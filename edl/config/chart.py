"""The values that shape the chart's objects, and mean nothing to a process: their types and limits.

Defaults live in chart/values.yaml. `edl run` checks these as Helm does, and makes no use of them.
What is Kubernetes' own (resources, affinity, volumes, ...) is only known to be a map or a list here:
Kubernetes says itself what it does not like.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from edl.config.types import Int, Labels, Object, Objects, Section


class Image(Section):
    registry: str
    tag: str
    pull_policy: Literal["Always", "IfNotPresent", "Never"]
    pull_secrets: Objects


class OneImage(Section):
    repository: str = Field(min_length=1)
    tag: str
    digest: str = Field(
        pattern=r"^(sha256:[0-9a-f]{64})?$", json_schema_extra={"allowed": "sha256: and 64 hex digits"}
    )


class Pod(Section):
    """What the pods of master and workers have in common."""

    image: OneImage
    resources: Object
    env: Objects
    env_from: Objects
    volumes: Objects
    volume_mounts: Objects
    init_containers: Objects
    extra_containers: Objects
    node_selector: Labels
    tolerations: Objects
    affinity: Object
    topology_spread_constraints: Objects
    priority_class_name: str
    runtime_class_name: str
    scheduler_name: str
    termination_grace_period_seconds: Int = Field(ge=0)
    pod_labels: Labels
    pod_annotations: Labels
    pod_security_context: Object
    security_context: Object
    pod_template: Object


class WorkerValues(Pod):
    high_priority_class_name: str


class PriorityClass(Section):
    create: bool
    name: str
    value: Int = Field(ge=-2147483648, le=1000000000)
    preemption_policy: Literal["Never", "PreemptLowerPriority"]


class Token(Section):
    existing_secret: str
    key: str = Field(min_length=1)
    value: str


class Account(Section):
    create: bool
    name: str
    annotations: Labels


class ServiceAccount(Section):
    master: Account
    worker: Account


class Rbac(Section):
    create: bool


class Service(Section):
    type: Literal["ClusterIP", "NodePort", "LoadBalancer"]
    annotations: Labels


class NetworkPolicy(Section):
    enabled: bool
    restrict_egress: bool
    extra_egress: Objects
    clients: Objects
    metrics_from: Objects


class Monitor(Section):
    enabled: bool
    interval: str
    labels: Labels
    relabelings: Objects


class Labelled(Section):
    enabled: bool
    labels: Labels


class Metrics(Section):
    service_monitor: Monitor
    pod_monitor: Monitor
    prometheus_rule: Labelled
    grafana_dashboard: Labelled


class Output(Section):
    existing_claim: str
    host_path: str
    size: str
    storage_class: str
    access_modes: list[Literal["ReadWriteOnce", "ReadWriteMany", "ReadWriteOncePod"]] = Field(min_length=1)


class Chart(Section):
    """All values that are the chart's alone."""

    image: Image
    master: Pod
    worker: WorkerValues
    output: Output
    token: Token
    priority_class: PriorityClass
    service_account: ServiceAccount
    rbac: Rbac
    service: Service
    network_policy: NetworkPolicy
    metrics: Metrics
    extra_objects: list[Any]
    name_override: str = Field(max_length=40)
    fullname_override: str = Field(max_length=40)
    common_labels: Labels
    common_annotations: Labels
    global_: Object = Field(alias="global")
