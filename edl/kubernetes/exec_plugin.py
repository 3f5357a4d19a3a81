# SPDX-License-Identifier: Apache-2.0
"""Tokens from the exec plugin of a kubeconfig (client.authentication.k8s.io): the login of clouds.

Promise: the plugin runs when a token is needed, and again when the token has expired or is refused. Its
standard error is shown to the user.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx2 as httpx

from edl.errors import ConfigError

EARLY = timedelta(seconds=10)  # refresh a token this early: a request takes time, and clocks differ


@dataclass
class ExecPlugin(httpx.Auth):
    """The plugin of one user of a kubeconfig.

    Args:
        command: the command with its arguments.
        environment: additional environment variables.
        version: version of the plugin's protocol.
        cluster: the description of the cluster that the plugin requests; None: it requests none.
        hint: how to install the plugin.
        needs_terminal: the plugin asks questions.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]
    version: str
    cluster: Mapping[str, Any] | None
    hint: str
    needs_terminal: bool
    _token: str = field(default="", repr=False)
    _expires: datetime | None = None

    @classmethod
    def read(cls, said: Mapping[str, Any], cluster: Mapping[str, Any]) -> ExecPlugin:
        """Read the `exec` section of a user in a kubeconfig.

        Raises:
            ConfigError: the command or the version is missing.
        """
        try:
            return cls(
                (str(said["command"]), *map(str, said.get("args") or [])),
                {str(e["name"]): str(e["value"]) for e in said.get("env") or []},
                str(said["apiVersion"]),
                cluster if said.get("provideClusterInfo") else None,
                str(said.get("installHint") or ""),
                said.get("interactiveMode") == "Always",
            )
        except (KeyError, TypeError) as error:
            raise ConfigError(
                f"kubeconfig: user.exec: invalid ({error!r}); expected command and apiVersion"
            ) from error

    async def async_auth_flow(self, request: httpx.Request) -> AsyncGenerator[httpx.Request, httpx.Response]:
        """Add the plugin's token to each request. Renew it when it expires, or when the API rejects it."""
        if not self._token or (self._expires is not None and datetime.now(UTC) >= self._expires - EARLY):
            await self.refresh()
        request.headers["Authorization"] = f"Bearer {self._token}"
        if (yield request).status_code == 401:
            await self.refresh()
            request.headers["Authorization"] = f"Bearer {self._token}"
            yield request

    async def refresh(self) -> None:
        """Run the plugin, and keep the token that it prints.

        Raises:
            ConfigError: the plugin failed, or printed no token.
        """
        interactive = sys.stdin is not None and sys.stdin.isatty()
        if self.needs_terminal and not interactive:
            raise ConfigError(f"{self.command[0]}: needs a terminal (interactiveMode: Always)")
        spec: dict[str, Any] = {"interactive": interactive}
        if self.cluster is not None:
            spec["cluster"] = dict(self.cluster)
        info = json.dumps({"apiVersion": self.version, "kind": "ExecCredential", "spec": spec})
        try:
            process = await asyncio.create_subprocess_exec(
                *self.command,
                stdin=None if interactive else asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                env={**os.environ, **self.environment, "KUBERNETES_EXEC_INFO": info},
            )
        except OSError as error:
            hint = f"; {self.hint}" if self.hint else ""
            raise ConfigError(
                f"{self.command[0]}: cannot run the exec plugin: {error.strerror}{hint}"
            ) from error
        out, _ = await process.communicate()
        if process.returncode:
            raise ConfigError(
                f"{self.command[0]}: the exec plugin failed with exit code {process.returncode}"
            )
        try:
            status = json.loads(out)["status"]
            token, expires = status.get("token"), status.get("expirationTimestamp")
            self._expires = datetime.fromisoformat(expires) if expires else None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{self.command[0]}: the exec plugin printed no ExecCredential") from error
        if not token:
            raise ConfigError(
                f"{self.command[0]}: the exec plugin printed no token (client certificates are not supported)"
            )
        self._token = str(token)
