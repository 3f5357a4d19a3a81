# SPDX-License-Identifier: Apache-2.0
"""The cluster and the credentials, from the user's kubeconfig (read as by kubectl) or the pod's account.

lightkube supports servers, certificates, tokens and passwords. `Access` holds the other parts of a
kubeconfig: exec plugins of all versions, impersonation, tls-server-name, proxy-url.

The official client's loader (kubernetes 37.0.2 was tried) would not keep the promise below. It supports
tls-server-name and proxy-url. But if the kubeconfig has `as`, it acts as the user, with different rights; and
if a plugin is missing or an auth-provider is not supported any more, it continues without a token. The code
here would still be necessary, in addition to a package of 75 MB that needs eleven others.

Promise: no part of a kubeconfig about how to reach a cluster is ignored silently. Unsupported parts are
refused by name.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from lightkube.config.kubeconfig import SERVICE_ACCOUNT, KubeConfig
from lightkube.core.exceptions import ConfigError as LightkubeError

from edl.errors import ConfigError
from edl.kubernetes.exec_plugin import ExecPlugin

DEFAULT = "~/.kube/config"
FILES = {
    "cluster": ("certificate-authority",),
    "user": ("client-certificate", "client-key", "tokenFile"),
}
Section = Mapping[str, Any]


@dataclass(frozen=True)
class Access:
    """The parts of a kubeconfig that lightkube does not support.

    Args:
        headers: headers of every request, which name the identity that the user wants to act as.
        tls_server_name: name that the server's certificate must have; "": the name in its address.
        proxy_url: proxy of the server; None: the environment decides.
        plugin: source of the token; None: the token is in the kubeconfig.
    """

    headers: tuple[tuple[str, str], ...] = ()
    tls_server_name: str = ""
    proxy_url: str | None = None
    plugin: ExecPlugin | None = None


def load(file: Path | None = None, context: str = "") -> tuple[KubeConfig, Access]:
    """Load the configuration, and make the requested context its current one.

    Args:
        file: a kubeconfig; None: those of $KUBECONFIG, else ~/.kube/config, else the account of the pod
            that this process is in.
        context: name of a context; "": the current context of the kubeconfig.

    Raises:
        ConfigError: no kubeconfig was found, it cannot be read, it lacks the context, or it has unsupported
            parts.
    """
    variable = os.environ.get("KUBECONFIG", "")
    files = [file] if file else [Path(name) for name in variable.split(os.pathsep) if name]
    there = [path for path in files or [Path(DEFAULT).expanduser()] if path.exists()]
    if not there and not files and Path(SERVICE_ACCOUNT).exists():
        return KubeConfig.from_service_account(SERVICE_ACCOUNT), Access()
    if not there:
        where = " or ".join(map(str, files)) or f"{DEFAULT} ($KUBECONFIG and --kubeconfig are not set)"
        raise ConfigError(f"kubeconfig not found: {where}")
    names = ", ".join(str(path) for path in there)
    whole = _merged(there)
    if context:
        whole["current-context"] = context
    try:
        config = KubeConfig.from_dict(whole)
    except (LightkubeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{names}: not a kubeconfig: {error}") from error
    known = f"known contexts: {', '.join(config.contexts)}" if config.contexts else "it has no contexts"
    if config.current_context is None:
        raise ConfigError(f"{names}: no current context; choose one with --context ({known})")
    if config.current_context not in config.contexts:
        raise ConfigError(f"{names}: unknown context {config.current_context} ({known})")
    chosen = config.contexts[config.current_context]
    cluster = _named(whole, "cluster", chosen.cluster)
    return config, _access(cluster, _named(whole, "user", chosen.user or ""), names)


def _merged(files: list[Path]) -> dict[str, Any]:
    """Merge kubeconfig files. For each name, and for the current context, the first file that has it wins.

    Raises:
        ConfigError: a file is not a kubeconfig.
    """
    whole: dict[str, Any] = {"clusters": [], "contexts": [], "users": []}
    for path in reversed(files):  # the last entry of a name counts
        try:
            one = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
            for kind in ("clusters", "contexts", "users"):
                whole[kind] += [
                    _absolute(item, kind[:-1], path.absolute().parent) for item in one.get(kind) or []
                ]
            whole["current-context"] = one.get("current-context") or whole.get("current-context")
        except OSError as error:
            raise ConfigError(f"{path}: cannot read: {error.strerror}") from error
        except (yaml.YAMLError, RecursionError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path}: not a kubeconfig") from error
    return whole


def _absolute(item: Section, kind: str, folder: Path) -> dict[str, Any]:
    """Make the paths of a cluster, context or user absolute: they are relative to the kubeconfig."""
    found = dict(item[kind] or {})
    for key in FILES.get(kind, ()):
        if found.get(key):
            found[key] = str(folder / found[key])
    # kubectl resolves a plugin's relative path with a folder from the kubeconfig's folder.
    if (plugin := found.get("exec")) and os.sep in str(plugin.get("command", "")):
        found["exec"] = {**plugin, "command": str(folder / plugin["command"])}
    return {"name": item["name"], kind: found}


def _named(whole: Section, kind: str, name: str) -> dict[str, Any]:
    return next((dict(item[kind]) for item in reversed(whole[f"{kind}s"]) if item["name"] == name), {})


def _access(cluster: Section, user: Section, names: str) -> Access:
    """Read the parts of a context's cluster and user that lightkube does not support.

    Raises:
        ConfigError: a part is not supported here either.
    """
    if "auth-provider" in user:
        raise ConfigError(
            f"{names}: auth-provider is not supported (Kubernetes 1.26 removed it); use an exec plugin"
        )
    proxy = cluster.get("proxy-url") or None
    if proxy and not str(proxy).startswith(("http://", "https://")):
        raise ConfigError(f"{names}: proxy-url {proxy} is not supported (expected http:// or https://)")
    wanted = {"impersonate-user": user.get("as"), "impersonate-uid": user.get("as-uid")}
    headers = [(name, str(value)) for name, value in wanted.items() if value]
    headers += [("impersonate-group", str(group)) for group in user.get("as-groups") or []]
    headers += [
        (f"impersonate-extra-{key.lower()}", str(value))
        for key, values in (user.get("as-user-extra") or {}).items()
        for value in values
    ]
    plugin = ExecPlugin.read(user["exec"], _cluster_info(cluster)) if user.get("exec") else None
    return Access(tuple(headers), str(cluster.get("tls-server-name") or ""), proxy, plugin)


def _cluster_info(cluster: Section) -> dict[str, Any]:
    """Describe the cluster for a plugin that requests it."""
    keys = (
        "server",
        "tls-server-name",
        "insecure-skip-tls-verify",
        "certificate-authority-data",
        "proxy-url",
    )
    info = {key: cluster[key] for key in keys if cluster.get(key)}
    if (file := cluster.get("certificate-authority")) and Path(file).is_file():
        info["certificate-authority-data"] = base64.b64encode(Path(file).read_bytes()).decode()
    for extension in cluster.get("extensions") or []:
        if extension.get("name") == "client.authentication.k8s.io/exec":
            info["config"] = extension.get("extension")
    return info
