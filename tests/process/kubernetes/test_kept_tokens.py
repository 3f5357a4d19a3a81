# SPDX-License-Identifier: Apache-2.0
"""A token that a rendered chart replaces: later masters accept the one that running workers have."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest
from lightkube.config.kubeconfig import KubeConfig
from lightkube.config.models import Cluster, User

from edl.contract.tokens import FILE, MAX_KEPT, Tokens
from edl.kubernetes.client import Api
from edl.kubernetes.timing import Timing
from edl.master.backends.kubernetes import Place
from edl.master.cluster import kept_tokens
from edl.master.cluster.kept_tokens import keep_tokens
from tests.support.fakes.kubernetes_api import KubernetesApi
from tests.support.fakes.kubernetes_cluster import NAMESPACE

pytestmark = pytest.mark.waits

PLACE = Place(NAMESPACE, "edl", "edl", "edl-master:8500")


class Release:
    """A release whose Secret is applied again and again, and the masters that follow each other."""

    def __init__(self, server: KubernetesApi, mount: Path, api: Api):
        self._server, self._mount, self._api = server, mount, api

    def apply(self, token: str) -> None:
        """Replace the key of the chart, as kubectl and Helm do: keys of others stay."""
        data = self._server.objects["secrets"].get("edl-token", {}).get("data", {})
        self._server.put(
            "secrets",
            {
                "metadata": {"name": "edl-token"},
                "data": {**data, "token": base64.b64encode(token.encode()).decode()},
            },
        )

    def refresh(self) -> None:
        """What the kubelet does with the mounted Secret."""
        for key, value in self._server.objects["secrets"]["edl-token"]["data"].items():
            (self._mount / key).write_bytes(base64.b64decode(value))

    async def master(self, *applied: str) -> Tokens:
        """A master that starts with what is mounted, sees these applied, and is gone."""
        self.refresh()
        tokens = Tokens("", self._mount / "token")
        keeping = asyncio.create_task(keep_tokens(self._api, PLACE, tokens))
        await self._kept(tokens)
        for token in applied:
            self.apply(token)
            self.refresh()
            await self._kept(tokens)
        keeping.cancel()
        with suppress(asyncio.CancelledError):
            await keeping
        return tokens

    async def _kept(self, tokens: Tokens) -> None:
        async with asyncio.timeout(30):
            while self._stored() != tokens.known()[-MAX_KEPT:]:
                await asyncio.sleep(0.01)

    def _stored(self) -> list[str]:
        data = self._server.objects["secrets"]["edl-token"]["data"]
        return base64.b64decode(data.get("token-kept", "")).decode().split("\n")


@pytest.fixture
async def release(
    server: KubernetesApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Release]:
    monkeypatch.setenv(FILE, str(tmp_path / "token"))
    monkeypatch.setenv(kept_tokens.SECRET, "edl-token")
    monkeypatch.setattr(kept_tokens, "SECONDS", 0.01)
    config = KubeConfig.from_one(cluster=Cluster(server=server.url), user=User(), namespace=NAMESPACE)
    api = Api(Timing(), config)
    yield Release(server, tmp_path, api)
    await api.close()


async def test_the_token_of_running_workers_outlives_their_master(release: Release) -> None:
    release.apply("first")
    await release.master()
    release.apply("second")  # with a changed Deployment: the old master never sees it
    assert (await release.master()).accept("Bearer first")
    release.apply("third")
    last = await release.master("fourth", "fifth")
    assert [
        t for t in ("first", "second", "third", "fourth", "fifth", "sixth") if last.accept(f"Bearer {t}")
    ] == [
        "first",
        "second",
        "third",
        "fourth",
        "fifth",
    ]


async def test_only_the_newest_tokens_are_kept(release: Release) -> None:
    release.apply("t0")
    await release.master(*(f"t{n}" for n in range(1, 12)))
    anew = await release.master()
    assert anew.known() == [f"t{n}" for n in range(12 - MAX_KEPT, 12)]
