"""Which cluster the commands talk to, and as whom: kubeconfigs as people have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
    path.write_text(yaml.safe_dump({
        "clusters": [{"name": n, "cluster": {"server": f"https://{path.name}-{n}"}} for n in names],
        "users": [{"name": n, "user": user or {"token": f"{path.name}-{n}"}} for n in names],
        "contexts": [{"name": n, "context": {"cluster": n, "user": n}} for n in names],
        **({"current-context": current} if current else {}),
    }))  # fmt: skip
    return path


def server(found: Any) -> str:
    return str(found.get().cluster.server)


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
    found = kubeconfig.load(path).get()
    assert found is not None and found.user is not None
    assert found.user.client_cert == str(home / "there" / "me.crt")


def test_a_plugin_of_any_version_is_told_what_is_asked_of_it(home: Path) -> None:
    version = "client.authentication.k8s.io/v1"
    plugin = {"apiVersion": version, "command": "login", "env": [{"name": "A", "value": "b"}]}
    found = kubeconfig.load(write(home / "config", "a", current="a", user={"exec": plugin})).get()
    assert found is not None and found.user is not None and found.user.exec is not None
    assert found.user.exec.apiVersion == kubeconfig.PLUGINS
    told = {e.name: e.value for e in found.user.exec.env or []}
    assert told["A"] == "b"
    assert json.loads(told["KUBERNETES_EXEC_INFO"])["apiVersion"] == version


def test_in_a_pod_its_own_account_serves(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"no kubeconfig: there is no ~/\.kube/config"):
        kubeconfig.load()
    (home / "account").mkdir()
    (home / "account" / "token").write_text("secret")
    (home / "account" / "namespace").write_text("team")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    found = kubeconfig.load().get()
    assert found is not None
    assert (found.cluster.server, found.namespace) == ("https://10.0.0.1:443", "team")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1, 2]", "this is no kubeconfig"),
        ("a: [", "this is no kubeconfig"),
        ("clusters: [{name: a}]", "this is no kubeconfig"),
        ("{}", "no context is chosen; say --context (there are none)"),
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
