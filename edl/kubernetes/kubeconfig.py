"""Which cluster, and as whom: the user's kubeconfig as kubectl reads it, else the pod's own account.

lightkube knows servers, certificates, tokens and passwords. What it leaves out of a kubeconfig is an
`Access`: exec plugins of all versions, impersonation, tls-server-name, proxy-url.

The official client's loader (kubernetes 37.0.2 was tried) would not keep the promise below. It knows
tls-server-name and proxy-url; but where the kubeconfig says `as`, it acts as the user, with other rights, and
where a plugin is missing or an auth-provider is not supported any more, it goes on without a token. What is
here would be left to do, around a package of 75 MB that brings eleven others.

Promise: nothing that a kubeconfig says of how to reach a cluster is ignored silently; what is not supported
is refused by name.
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
    """What lightkube does not know of a kubeconfig.

    Args:
        headers: of every request: as whom the user wants to act.
        tls_server_name: that the server's certificate must have; "": that of its address.
        proxy_url: through which the server is reached; None: the environment says it.
        plugin: where the token comes from; None: it is in the kubeconfig.
    """

    headers: tuple[tuple[str, str], ...] = ()
    tls_server_name: str = ""
    proxy_url: str | None = None
    plugin: ExecPlugin | None = None


def load(file: Path | None = None, context: str = "") -> tuple[KubeConfig, Access]:
    """The configuration, with the wanted context as its current one.

    Args:
        file: a kubeconfig; None: those of $KUBECONFIG, else ~/.kube/config, else the account of the pod
            that this process is in.
        context: one of its contexts; "": its current one.

    Raises:
        ConfigError: there is none, it cannot be read, it has no such context, or says what is not supported.
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
    """The files as one. What a name or the current context means, the first that says it decides.

    Raises:
        ConfigError: one of them is not a kubeconfig.
    """
    whole: dict[str, Any] = {"clusters": [], "contexts": [], "users": []}
    for path in reversed(files):  # the last of a name counts
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
    """A cluster, context or user with absolute paths: a kubeconfig names files beside itself."""
    found = dict(item[kind] or {})
    for key in FILES.get(kind, ()):
        if found.get(key):
            found[key] = str(folder / found[key])
    # kubectl runs a plugin that is named with a folder from beside the kubeconfig.
    if (plugin := found.get("exec")) and os.sep in str(plugin.get("command", "")):
        found["exec"] = {**plugin, "command": str(folder / plugin["command"])}
    return {"name": item["name"], kind: found}


def _named(whole: Section, kind: str, name: str) -> dict[str, Any]:
    return next((dict(item[kind]) for item in reversed(whole[f"{kind}s"]) if item["name"] == name), {})


def _access(cluster: Section, user: Section, names: str) -> Access:
    """What lightkube leaves out of the cluster and user of a context.

    Raises:
        ConfigError: it is not supported.
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
    """The cluster, as it is described to a plugin that asks for it."""
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
