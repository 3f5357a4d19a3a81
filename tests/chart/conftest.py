# SPDX-License-Identifier: Apache-2.0
"""The chart, rendered by a real Helm."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "chart"
FILES = sorted(CHART.glob("ci/*-values.yaml"))
Object = dict[str, Any]
POLICY = "ValidatingAdmissionPolicy"
CLASS = "default-edl-worker-" + hashlib.sha256(b"default/edl -10 Never").hexdigest()[:8]


def script(name: str, *words: str) -> str:
    script = ROOT / "scripts" / "dev" / name
    done = subprocess.run([script, *words], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.strip()


class Refused(Exception):
    """Helm says no; the text is what it says."""


class Rendered:
    """The objects of a release, by kind and name."""

    def __init__(self, text: str):
        # Kubernetes reads JSON's kind of YAML; the loader in C, for there are many.
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        self.objects: list[Object] = [o for o in yaml.load_all(text, loader) if o]

    def all(self, kind: str) -> list[Object]:
        return [o for o in self.objects if o["kind"] == kind]

    def one(self, kind: str, name: str = "") -> Object:
        [found] = [o for o in self.all(kind) if name in ("", o["metadata"]["name"])]
        return found

    def names(self) -> list[str]:
        return sorted(f"{o['kind']}/{o['metadata']['name']}" for o in self.objects)

    @property
    def job(self) -> Object:
        """The ConfigMap that the master watches."""
        [found] = [o for o in self.all("ConfigMap") if o["metadata"]["name"].endswith("-job")]
        return found

    @property
    def values(self) -> Object:
        return json.loads(self.job["data"]["values.json"])

    @property
    def worker(self) -> Object:
        return yaml.safe_load(self.job["data"]["worker.yaml"])

    @property
    def master(self) -> Object:
        return self.one("Deployment")

    @property
    def service(self) -> Object:
        """The master's."""
        return self.one("Service", self.master["metadata"]["name"])

    def pods(self) -> Iterator[tuple[str, Object]]:
        """The spec of every pod that comes of the release."""
        yield "master", self.master["spec"]["template"]["spec"]
        for servers in self.all("StatefulSet"):
            yield "ps", servers["spec"]["template"]["spec"]
        for pod in self.all("Pod"):
            yield pod["metadata"]["name"], pod["spec"]
        for name, text in self.job["data"].items():
            if name.startswith("worker"):
                yield name, yaml.safe_load(text)["spec"]


class Helm:
    def __init__(self, path: str):
        self.path = path

    def __call__(self, *words: str) -> str:
        """Raises: Refused."""
        done = subprocess.run([self.path, *words], capture_output=True, text=True)
        if done.returncode:
            raise Refused(done.stderr)
        return done.stdout

    def template(
        self, *sets: str, release: str = "edl", namespace: str = "default", words: tuple[str, ...] = ()
    ) -> Rendered:
        """The objects of a release. Raises: Refused."""
        flags = [word for value in sets for word in ("--set", value)]
        return Rendered(self("template", release, str(CHART), "--namespace", namespace, *flags, *words))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build Helm before the first test, where no test's time limit counts."""
    needed = any("helm" in getattr(item, "fixturenames", ()) for item in session.items)
    if needed and not session.config.option.collectonly:
        subprocess.run([ROOT / "scripts/dev/helm", "--where"], stdout=subprocess.DEVNULL, check=False)


@pytest.fixture(scope="session")
def helm() -> Helm:
    return Helm(script("helm", "--where"))


@pytest.fixture(scope="session")
def rendered(helm: Helm) -> dict[str, Rendered]:
    """The chart with each of its values files, and without any."""
    found = {path.name: helm.template(words=("-f", str(path))) for path in FILES}
    return {"": helm.template(), **found}


def labels(release: str, component: str) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "edl",
        "app.kubernetes.io/instance": release,
        "app.kubernetes.io/component": component,
    }
