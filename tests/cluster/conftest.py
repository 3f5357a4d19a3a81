# SPDX-License-Identifier: Apache-2.0
"""A real Kubernetes cluster for the tests: started once for all tests, with a namespace for each.

It is the cluster of `scripts/cluster`, or with `--kubeconfig FILE` an existing cluster.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.cluster.cluster import (
    IMAGES,
    SCRIPT,
    Cluster,
    Images,
    Lacking,
    Namespace,
    Nodes,
    given,
    images_tag,
    new_namespace,
    push_images,
    running,
    script,
)
from tests.cluster.proved import Proved, cache
from tests.cluster.release import SESSION_WORKER, Release, idling


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kubeconfig", help="a kubeconfig: use this cluster and start none")
    parser.addoption(
        "--busybox", default="busybox:1.36", help="an image of busybox that this cluster can pull"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Proved(cache(), config.args))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # These run last, because the images pulled by the nodes are lost with their cluster.
    items.sort(key=lambda item: item.path.name == "test_script.py")
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent) and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(300))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build before the first test, outside of all tests' time limits, with visible progress."""
    config = session.config
    needed = any("cluster" in getattr(item, "fixturenames", ()) for item in session.items)
    if needed and not config.option.collectonly and not config.getoption("--kubeconfig"):
        with config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            print(flush=True)
            subprocess.run([SCRIPT, "build"], check=False)  # the fixture reports missing requirements
            if any("images" in getattr(item, "fixturenames", ()) for item in session.items):
                subprocess.run([IMAGES, "build", "--tag", images_tag()], check=False)


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    kubeconfig = request.config.getoption("--kubeconfig")
    with ExitStack() as until_the_end:
        try:
            if kubeconfig:
                found = given(kubeconfig, request.config.getoption("--busybox"))
            else:
                found = until_the_end.enter_context(running())
        except Lacking as reason:
            lacking(str(reason))
        yield found


def lacking(reason: str) -> NoReturn:
    """Skip with a reason; but fail where tests decide about a change (EDL_REQUIRE_CLUSTER, CI)."""
    if os.environ.get("EDL_REQUIRE_CLUSTER") or os.environ.get("CI"):
        pytest.fail(f"a cluster is required here: {reason}")
    pytest.skip(reason)


@pytest.fixture
def namespace(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Namespace]:
    """A namespace of the test, deleted with its contents afterwards."""
    test = re.sub("[^a-z0-9]+", "-", request.node.name.removeprefix("test_").lower()).strip("-")
    with new_namespace(cluster, test) as mine:
        yield mine


@pytest.fixture(scope="session")
def images(cluster: Cluster) -> Images:
    try:
        return push_images(cluster)
    except Lacking as reason:
        lacking(str(reason))


@pytest.fixture
def nodes(cluster: Cluster, namespace: Namespace) -> Iterator[Nodes]:
    """The nodes; they are repaired before the test's namespace is deleted, because they must clear it."""
    if not cluster.own:
        pytest.skip("the nodes of a given cluster are not ours to break")
    found = Nodes()
    yield found
    found.mend(cluster)


@pytest.fixture
def priority_classes(cluster: Cluster) -> Iterator[Callable[..., None]]:
    """Returns a function that creates priority classes; they have no namespace."""
    made: list[str] = []

    def make(**values: int) -> None:
        for name, value in values.items():
            made.append(name.replace("_", "-"))
            cluster.apply(
                {
                    "apiVersion": "scheduling.k8s.io/v1",
                    "kind": "PriorityClass",
                    "metadata": {"name": made[-1]},
                    "value": value,
                    "globalDefault": False,
                }
            )

    yield make
    cluster.kubectl("delete", "priorityclass", *made)


@pytest.fixture
def fake_nodes(cluster: Cluster) -> Iterator[Callable[[int], str]]:
    """Returns a function that creates a number of kwok nodes.

    Name this fixture before `namespace`, because the nodes must clear its pods.
    """
    if not cluster.own:
        pytest.skip("fake nodes are for our own cluster only")
    yield lambda number: script("kwok", str(number))
    cluster.kubectl("delete", "nodes", "-l", "type=kwok")


@pytest.fixture
def release(namespace: Namespace, images: Images, tmp_path: Path) -> Callable[..., Release]:
    """Returns a function from values (and a name, by default edl) to a release that is not installed yet."""
    return lambda name="edl", **values: new_release(namespace, images, tmp_path, name, **values)


def new_release(namespace: Namespace, images: Images, output: Path, name: str, **values: str) -> Release:
    """A release with its output in a folder of the nodes that workers can write and this test can read."""
    if not namespace.cluster.own:
        pytest.skip("the nodes of a given cluster have no folder that this test can read")
    folder = output / name
    folder.mkdir()
    folder.chmod(0o777)
    shutil.copy(SESSION_WORKER, folder)  # used only by jobs with the values `talking`
    # A volume of the master would tie it to a node, and tests take nodes away (test_storage.py has one).
    given = {**images.values, "output.hostPath": str(folder), "storage.size": ""}
    return Release(namespace, {**given, **values}, name)


def _volume(namespace: Namespace, name: str, path: Path, access: str) -> None:
    """Create a volume and a claim for a folder that all nodes see."""
    unique = f"{namespace.name}-{name}"
    spec = {"accessModes": [access], "storageClassName": ""}
    size = {"storage": "1Gi"}
    of = {"claimRef": {"namespace": namespace.name, "name": name}, "hostPath": {"path": str(path)}}
    made = {"persistentVolumeReclaimPolicy": "Delete", "capacity": size, **spec, **of}
    claim = {**spec, "volumeName": unique, "resources": {"requests": size}}
    namespace.cluster.apply(
        {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": unique}, "spec": made}
    )
    namespace.apply(
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": claim}
    )


@pytest.fixture
def claim(namespace: Namespace) -> Any:
    """Returns a function that creates a claim for a folder of this machine.

    Its volume has no namespace, so it is deleted after the test.
    """
    if not namespace.cluster.own:
        pytest.skip("a given cluster's nodes do not see the folders of this machine")
    made: list[str] = []

    def make(name: str, path: Path, access: str = "ReadOnlyMany") -> None:
        made.append(f"{namespace.name}-{name}")
        _volume(namespace, name, path, access)

    yield make
    namespace.kubectl("delete", "pods", "--all", "--now")
    for name in made:
        namespace.cluster.kubectl("delete", "persistentvolume", name, "--wait=false")


@pytest.fixture(scope="module")
def shared_job(
    cluster: Cluster, images: Images, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Release]:
    """A job of four workers that the tests of a module disturb in turn.

    It idles meanwhile. At the end it trains the remaining records, and its weights must be exact.
    """
    name = request.path.stem.removeprefix("test_")
    with new_namespace(cluster, name) as namespace:
        output = tmp_path_factory.mktemp("output")
        prepare = getattr(request.module, "prepare", None)  # creates the objects that its values need
        more = prepare(namespace, output) if prepare else {}
        job = new_release(namespace, images, output, "edl", **idling(records=40_000, **more))
        job.install()
        failed = request.session.testsfailed
        yield job
        if request.session.testsfailed > failed:
            return  # the failure is reported already, and the job may be in any state
        summary = job.is_exact()
        assert summary["failures"] == []
        assert summary["state_losses"] == 0
        assert summary["stale_messages"] == 0


@pytest.fixture
def job(shared_job: Release) -> Release:
    """The module's job, with a complete ring."""
    shared_job.ring_of(4)
    return shared_job


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report = yield
    mine = getattr(item, "funcargs", {}).get("namespace")
    if job := getattr(item, "funcargs", {}).get("job"):
        mine = job.namespace
    if report.when == "call" and report.failed and isinstance(mine, Namespace):
        report.sections.append((f"namespace {mine.name}", mine.story()))
    return report
