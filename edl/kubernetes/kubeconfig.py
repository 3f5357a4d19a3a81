"""Which cluster, and as whom: the user's kubeconfig as kubectl reads it, else the pod's own account."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import yaml
from lightkube.config.kubeconfig import SERVICE_ACCOUNT, KubeConfig
from lightkube.core.exceptions import ConfigError as LightkubeError

from edl.errors import ConfigError

DEFAULT = "~/.kube/config"
PLUGINS = "client.authentication.k8s.io/v1beta1"  # the newest that lightkube knows
FILES = {
    "cluster": ("certificate-authority",),
    "user": ("client-certificate", "client-key", "tokenFile"),
}


def load(file: Path | None = None, context: str = "") -> KubeConfig:
    """The configuration, with the wanted context as its current one.

    Args:
        file: a kubeconfig; None: those of $KUBECONFIG, else ~/.kube/config, else the account of the pod
            that this process is in.
        context: one of its contexts; "": its current one.

    Raises:
        ConfigError: there is none, it cannot be read, or it has no such context.
    """
    said = os.environ.get("KUBECONFIG", "")
    files = [file] if file else [Path(name) for name in said.split(os.pathsep) if name]
    there = [path for path in files or [Path(DEFAULT).expanduser()] if path.exists()]
    if not there and not files and Path(SERVICE_ACCOUNT).exists():
        return KubeConfig.from_service_account(SERVICE_ACCOUNT)
    if not there:
        where = " or ".join(map(str, files)) or f"{DEFAULT}, and neither $KUBECONFIG nor --kubeconfig is said"
        raise ConfigError(f"no kubeconfig: there is no {where}")
    found = _merged(there)
    found.current_context = context or found.current_context
    names = ", ".join(str(path) for path in there)
    if found.current_context is None:
        raise ConfigError(f"{names}: no context is chosen; say --context ({_known(found)})")
    if found.current_context not in found.contexts:
        raise ConfigError(f"{names}: there is no context {found.current_context} ({_known(found)})")
    return found


def _known(config: KubeConfig) -> str:
    return f"there are: {', '.join(config.contexts)}" if config.contexts else "there are none"


def _merged(files: list[Path]) -> KubeConfig:
    """The files as one. What a name or the current context means, the first that says it decides.

    Raises:
        ConfigError: one of them is no kubeconfig.
    """
    whole: dict[str, Any] = {"clusters": [], "contexts": [], "users": []}
    for path in reversed(files):  # lightkube takes the last of a name
        try:
            one = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
            for kind in ("clusters", "contexts", "users"):
                whole[kind] += [
                    _ours(item, kind[:-1], path.absolute().parent) for item in one.get(kind) or []
                ]
            whole["current-context"] = one.get("current-context") or whole.get("current-context")
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
        except (yaml.YAMLError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path}: this is no kubeconfig") from error
    try:
        return KubeConfig.from_dict(whole)
    except (LightkubeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{', '.join(map(str, files))}: this is no kubeconfig: {error}") from error


def _ours(item: dict[str, Any], kind: str, folder: Path) -> dict[str, Any]:
    """A cluster, context or user as lightkube takes it: whole paths, and plugins of all versions."""
    said = dict(item[kind] or {})
    for key in FILES.get(kind, ()):
        if said.get(key):
            said[key] = str(folder / said[key])
    if plugin := said.get("exec"):
        # The versions differ in what a plugin is told; it answers the same. lightkube tells it nothing.
        info = {"apiVersion": plugin["apiVersion"], "kind": "ExecCredential", "spec": {"interactive": False}}
        told = {"name": "KUBERNETES_EXEC_INFO", "value": json.dumps(info)}
        said["exec"] = {**plugin, "apiVersion": PLUGINS, "env": [*(plugin.get("env") or []), told]}
    return {"name": item["name"], kind: said}
