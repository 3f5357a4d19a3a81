# SPDX-License-Identifier: Apache-2.0
"""Which cluster the commands call, and as which user: kubeconfigs as people have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import yaml

from edl.errors import ConfigError
from edl.kubernetes import kubeconfig, overrides


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setattr(kubeconfig, "SERVICE_ACCOUNT", str(tmp_path / "account"))
    return tmp_path


def write(path: Path, *names: str, current: str = "", user: dict[str, Any] | None = None) -> Path:
    """A kubeconfig with clusters, users and contexts of these names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        yaml.safe_dump(
            {
                "clusters": [{"name": n, "cluster": {"server": f"https://{path.name}-{n}"}} for n in names],
                "users": [{"name": n, "user": user or {"token": f"{path.name}-{n}"}} for n in names],
                "contexts": [{"name": n, "context": {"cluster": n, "user": n}} for n in names],
                **({"current-context": current} if current else {}),
            }
        )
    )
    return path


def server(found: Any) -> str:
    return str(found[0].get().cluster.server)


def test_what_is_said_comes_before_the_environment_and_that_before_the_home(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(home / ".kube" / "config", "a", current="a")
    assert server(kubeconfig.load()) == "https://config-a"
    monkeypatch.setenv("KUBECONFIG", str(write(home / "environment", "a", "b", current="b")))
    assert server(kubeconfig.load()) == "https://environment-b"
    assert server(kubeconfig.load(context="a")) == "https://environment-a"
    assert server(kubeconfig.load(write(home / "said", "a", current="a"))) == "https://said-a"


def test_of_several_files_the_first_that_says_a_thing_decides(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = write(home / "first", "a"), write(home / "second", "a", "b", current="b")
    monkeypatch.setenv("KUBECONFIG", f"{first}:{home / 'missing'}:{second}")
    assert server(kubeconfig.load()) == "https://second-b"
    assert server(kubeconfig.load(context="a")) == "https://first-a"


def test_files_are_meant_beside_the_kubeconfig(home: Path) -> None:
    path = write(home / "there" / "config", "a", current="a", user={"client-certificate": "me.crt"})
    found = kubeconfig.load(path)[0].get()
    assert found is not None and found.user is not None
    assert found.user.client_cert == str(home / "there" / "me.crt")


def plugin(folder: Path, answer: str, **more: Any) -> dict[str, Any]:
    """The `exec` of a user: it records its input, and prints the answer."""
    path = folder / "plugin"
    path.write_text(
        f"#!/bin/sh\nprintf '%s %s\\n' \"$A\" \"$KUBERNETES_EXEC_INFO\" >>{folder}/told\necho '{answer}'\n"
    )
    path.chmod(0o755)
    version = "client.authentication.k8s.io/v1"
    return {
        "exec": {"apiVersion": version, "command": "./plugin", "env": [{"name": "A", "value": "b"}], **more}
    }


CREDENTIAL = '{"kind": "ExecCredential", "status": {"token": "from the plugin"}}'


async def answered(access: kubeconfig.Access, *statuses: int) -> list[str]:
    """Return the headers of the requests that a server with these answers received."""
    seen: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers["Authorization"])
        return httpx.Response(statuses[len(seen) - 1])

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer), auth=access.plugin) as client:
        while len(seen) < len(statuses):
            await client.get("http://server")
    return seen


async def test_a_plugin_beside_the_kubeconfig_is_run_once_and_told_of_the_cluster(home: Path) -> None:
    user = plugin(home, CREDENTIAL, provideClusterInfo=True)
    _, access = kubeconfig.load(write(home / "config", "a", current="a", user=user))
    assert await answered(access, 200, 200) == ["Bearer from the plugin"] * 2
    (told,) = (home / "told").read_text().splitlines()
    assert told.startswith("b ")
    info = json.loads(told[2:])
    assert info["apiVersion"] == "client.authentication.k8s.io/v1"
    assert info["spec"] == {"interactive": False, "cluster": {"server": "https://config-a"}}


@pytest.mark.parametrize("answers", [(401, 200), (200, 200)], ids=["refused", "expired"])
async def test_a_token_that_is_refused_or_has_expired_is_asked_for_again(
    home: Path, answers: tuple[int, ...]
) -> None:
    expired = '{"status": {"token": "x", "expirationTimestamp": "2020-01-01T00:00:00Z"}}'
    user = plugin(home, CREDENTIAL if 401 in answers else expired)
    _, access = kubeconfig.load(write(home / "config", "a", current="a", user=user))
    await answered(access, *answers)
    assert len((home / "told").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("answer", "more", "words"),
    [
        (
            "",
            {"command": "nowhere-to-be-found", "installHint": "install it"},
            "cannot run the exec plugin: No such file",
        ),
        ("", {"command": "false"}, "the exec plugin failed with exit code 1"),
        ("hello", {}, "printed no ExecCredential"),
        (
            '{"status": {"clientCertificateData": "x"}}',
            {},
            "printed no token (client certificates are not supported)",
        ),
        (CREDENTIAL, {"interactiveMode": "Always"}, "needs a terminal"),
    ],
)
async def test_a_plugin_that_gives_no_token_is_named(
    home: Path, answer: str, more: dict[str, Any], words: str
) -> None:
    _, access = kubeconfig.load(write(home / "config", "a", current="a", user=plugin(home, answer, **more)))
    with pytest.raises(ConfigError) as refused:
        await answered(access, 200)
    assert words in str(refused.value)


def test_whom_the_user_acts_as_is_said_with_every_request(home: Path) -> None:
    user = {
        "token": "x",
        "as": "jane",
        "as-uid": "7",
        "as-groups": ["a", "b"],
        "as-user-extra": {"Reason": ["test"]},
    }
    _, access = kubeconfig.load(write(home / "config", "a", current="a", user=user))
    assert access.headers == (
        ("impersonate-user", "jane"),
        ("impersonate-uid", "7"),
        ("impersonate-group", "a"),
        ("impersonate-group", "b"),
        ("impersonate-extra-reason", "test"),
    )


@pytest.mark.parametrize(
    ("user", "cluster", "words"),
    [
        ({"auth-provider": {"name": "gcp"}}, {}, "auth-provider is not supported"),
        ({}, {"proxy-url": "socks5://proxy"}, "proxy-url socks5://proxy is not supported (expected http"),
    ],
)
def test_what_is_not_supported_is_refused(
    home: Path, user: dict[str, Any], cluster: dict[str, Any], words: str
) -> None:
    path = write(home / "config", "a", current="a", user={"token": "x", **user})
    whole = yaml.safe_load(path.read_text())
    whole["clusters"][0]["cluster"] |= cluster
    path.write_text(yaml.safe_dump(whole))
    with pytest.raises(ConfigError) as refused:
        kubeconfig.load(path)
    assert words in str(refused.value)


def test_in_a_pod_its_own_account_serves(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"kubeconfig not found: ~/\.kube/config"):
        kubeconfig.load()
    (home / "account").mkdir()
    (home / "account" / "token").write_text("secret")
    (home / "account" / "namespace").write_text("team")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    found = kubeconfig.load()[0].get()
    assert found is not None
    assert (found.cluster.server, found.namespace) == ("https://10.0.0.1:443", "team")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1, 2]", "not a kubeconfig"),
        ("a: [", "not a kubeconfig"),
        ("clusters: [{name: a}]", "not a kubeconfig"),
        ("{}", "no current context; choose one with --context (it has no contexts)"),
    ],
)
def test_what_is_no_kubeconfig_is_named(home: Path, text: str, words: str) -> None:
    (home / "config").write_text(text)
    with pytest.raises(ConfigError) as refused:
        kubeconfig.load(home / "config")
    assert str(home / "config") in str(refused.value)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "null", '{"workers": "many", "instead": 4, "id": "x"}', '{"workers": 8}']
)
def test_what_nobody_can_have_asked_for_is_not_there(text: str) -> None:
    assert overrides.Scale.read({overrides.SCALE: text}) is None


def test_a_number_by_hand_reads_as_it_was_written() -> None:
    scale = overrides.Scale(8, 4, "x")
    assert overrides.Scale.read({overrides.SCALE: scale.text()}) == scale
    assert scale.over({"workers": 4.0, "minWorkers": 1, "maxWorkers": 8}) == "", (
        "Helm makes floats of numbers"
    )
    assert scale.over({"workers": 5}) == "the chart says 5 workers now"
