# SPDX-License-Identifier: Apache-2.0
"""ElasticDL's cluster_spec as values: what it changes of a pod or of a Service.

A file of Python is run once, here on the client; ElasticDL's master ran it in the cluster. Its `with_pod` is
given a pod of each kind, and the difference becomes the pod's podTemplate. The file imports
`kubernetes.client`, which need not be installed: an object of any of its classes has the given attributes.
"""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from edl.config import values
from edl.errors import ConfigError

PODS = ("master", "worker", "ps")
_CAPITALS = {"ip": "IP", "ipc": "IPC", "pid": "PID", "uid": "UID"}  # as in hostIPC; not at the beginning


class _Object:
    """An object of Kubernetes' client: attributes that were not given are None."""

    def __init__(self, **attributes: Any):
        vars(self).update(attributes)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class _Client(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("V1"):
            return type(name, (_Object,), {})
        raise AttributeError(name)


def overlays(path: str, text: str, job_name: str) -> dict[str, Any]:
    """Return the values of a cluster_spec.

    Args:
        path: a file of Python with an object `cluster`; empty without one.
        text: the same as JSON; empty without one.

    Raises:
        ConfigError: the file or the text is not a cluster_spec.
    """
    found: dict[str, Any] = {}
    if path:
        found = values.merge(found, _of_python(Path(path), job_name))
    if text:
        found = values.merge(found, _of_json(text))
    return found


def _of_python(path: Path, job_name: str) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"--cluster_spec: there is no file {path}")
    with _kubernetes():
        try:
            cluster = runpy.run_path(str(path)).get("cluster")
        except Exception as error:
            raise ConfigError(f"--cluster_spec: {path}: {type(error).__name__}: {error}") from error
        if cluster is None:
            raise ConfigError(f"--cluster_spec: {path}: has no object `cluster`")
        found: dict[str, Any] = {}
        for kind in PODS:
            pod = _pod(kind, job_name)
            before = _plain(pod)
            try:
                after = _plain(cluster.with_pod(pod))
            except Exception as error:
                raise ConfigError(
                    f"--cluster_spec: {path}: with_pod() of a {kind} pod: {type(error).__name__}: {error}"
                ) from error
            if changed := _difference(before, after):
                found[kind] = {"podTemplate": changed}
        service = _Object(metadata=_Object(labels={}, annotations={}), spec=_Object())
        if hasattr(cluster, "with_service"):
            spec = _plain(cluster.with_service(service)).get("spec", {})
            found |= _service(spec)
    return found


def _of_json(text: str) -> dict[str, Any]:
    try:
        spec = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--cluster_spec_json: not JSON: {error}") from error
    known = {"pod_spec", "service_spec", *(f"{kind}_pod_spec" for kind in PODS)}
    if not isinstance(spec, dict) or set(spec) - known:
        raise ConfigError(f"--cluster_spec_json: expected an object with keys of {', '.join(sorted(known))}")
    found: dict[str, Any] = {}
    for kind in PODS:
        for part in (spec.get("pod_spec"), spec.get(f"{kind}_pod_spec")):
            for key, value in (part or {}).items():
                found = values.merge(found, {kind: _of_part(key, value)})
    return found | _service(spec.get("service_spec") or {})


def _of_part(key: str, value: Any) -> dict[str, Any]:
    if key in ("labels", "annotations"):
        return {"podTemplate": {"metadata": {key: value}}}
    if key in ("tolerations", "affinity"):
        return {"podTemplate": {"spec": {key: value}}}
    if key == "env":
        return {"env": value}
    raise ConfigError(
        f"--cluster_spec_json: {key}: expected labels, annotations, tolerations, affinity or env"
    )


def _service(spec: dict[str, Any]) -> dict[str, Any]:
    """The values of the master's Service, the only one of a job that has a type to choose.

    Raises:
        ConfigError: the specification has something else than a type and a cluster IP.
    """
    if others := set(spec) - {"type", "clusterIP"}:
        raise ConfigError(
            f"cluster_spec: of a Service, edl takes type and clusterIP, not {', '.join(sorted(others))}"
        )
    return {"service": spec} if spec else {}


def _pod(kind: str, job_name: str) -> _Object:
    labels = {"app": "elasticdl", "elasticdl-job-name": job_name, "elasticdl-replica-type": kind}
    container = _Object(name=kind, env=[], volume_mounts=[], resources=_Object())
    metadata = _Object(name=f"elasticdl-{job_name}-{kind}", labels=labels, annotations={})
    return _Object(metadata=metadata, spec=_Object(containers=[container], volumes=[], tolerations=[]))


def _plain(value: Any) -> Any:
    """Objects as maps with Kubernetes' names of fields."""
    if isinstance(value, _Object):
        return {_camel(name): _plain(v) for name, v in vars(value).items() if v is not None}
    if isinstance(value, dict):
        return {key: _plain(v) for key, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def _camel(name: str) -> str:
    first, *rest = name.strip("_").split("_")
    return first + "".join(_CAPITALS.get(part, part.capitalize()) for part in rest)


def _difference(before: Any, after: Any) -> Any:
    """What `after` adds to `before`, or changes: maps key by key, containers in order, other lists whole."""
    found: dict[str, Any] = {}
    for key, value in after.items():
        old = before.get(key)
        if value == old:
            continue
        if isinstance(value, dict) and isinstance(old, dict):
            value = _difference(old, value)
        elif key == "containers" and isinstance(old, list):
            pairs = zip(value, [*old, *[{}] * len(value)], strict=False)
            value = [{"name": c["name"], **_difference(b, c)} for c, b in pairs if c != b]
        found[key] = value
    return found


@contextmanager
def _kubernetes() -> Iterator[None]:
    """Inside this context, `from kubernetes import client` gives the stand-in."""
    package, client = ModuleType("kubernetes"), _Client("kubernetes.client")
    package.client = client  # type: ignore[attr-defined]
    names = {"kubernetes": package, "kubernetes.client": client}
    before = {name: sys.modules.get(name) for name in names}
    sys.modules.update(names)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
