# SPDX-License-Identifier: Apache-2.0
"""`scripts/cluster` itself: what it starts it also ends, from every state.

Looked at from outside, with nothing of the script's own: a bug in how it finds its things would
be blind in both places.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "cluster"
STATE = Path("/var/lib/edl-cluster")
PROGRAMS = (
    "etcd",
    "kube-apiserver",
    "kube-scheduler",
    "kubelet",
    "kube-proxy",
    "containerd-shim",
    "registry",
)


def script(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([SCRIPT, *words], capture_output=True, text=True, timeout=240)


def traces() -> list[str]:
    """All that is on this machine because of a cluster."""
    found = [str(STATE)] if STATE.exists() else []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
        if str(STATE) in words or "/edl/cluster/" in words:
            found.append(f"process {process.name}: {words}")
    found += [line for line in Path("/proc/self/mounts").read_text().splitlines() if str(STATE) in line]
    found += [str(link) for link in Path("/sys/class/net").glob("edl*")]
    found += [str(name) for name in Path("/run/netns").glob("edl-*")]
    found += [str(group) for depth in ("", "*/") for group in Path("/sys/fs/cgroup").glob(f"{depth}edl-*")]
    found += [str(result) for result in Path("/var/lib/cni/results").glob("edl-*")]
    routes = subprocess.run(["ip", "-4", "route"], capture_output=True, text=True, check=True).stdout
    found += [route for route in routes.splitlines() if "edl" in route]
    return found


@pytest.fixture(scope="module")
def ours(cluster: Cluster) -> Iterator[None]:
    """The right to end the cluster: it is up again after these tests."""
    if not cluster.started:
        pytest.skip("the cluster was up before the tests: it is in use")
    yield
    up()


def up() -> None:
    said = script("up", f"--owner={os.getpid()}")
    assert said.returncode == 0, said.stderr


def down() -> None:
    said = script("down")
    assert (said.returncode, traces()) == (0, []), said.stderr


def killed_when_it_says(text: str) -> None:
    """`scripts/cluster up`, killed without warning as soon as it says this."""
    with subprocess.Popen([SCRIPT, "up"], stderr=subprocess.PIPE, text=True) as starting:
        assert starting.stderr is not None
        for line in starting.stderr:
            if text in line:
                break
        starting.send_signal(signal.SIGKILL)


def test_nothing_is_left_of_a_cluster_with_running_pods(cluster: Cluster, ours: None) -> None:
    up()
    cluster.kubectl("run", "left", "--image", cluster.busybox, "--", "sleep", "3600")
    cluster.wait("pod/left", "condition=Ready")
    assert len(traces()) > 20
    down()
    assert script("status").returncode == 1
    assert script("down").returncode == 0, "nothing to do is no error"
    assert script("env").returncode == 1


@pytest.mark.parametrize("moment", ["starting the control plane", "starting DNS"])
def test_nothing_is_left_of_a_cluster_whose_start_was_killed(ours: None, moment: str) -> None:
    down()
    killed_when_it_says(moment)
    assert traces() != []
    down()


def test_a_cluster_that_lost_a_part_is_replaced(cluster: Cluster, ours: None) -> None:
    up()
    was = cluster.get("namespace/default")["metadata"]["uid"]
    [etcd] = [trace for trace in traces() if trace.startswith("process") and "/etcd " in trace]
    os.kill(int(etcd.split()[1].rstrip(":")), signal.SIGKILL)
    assert script("status").returncode == 1
    up()
    assert cluster.get("namespace/default")["metadata"]["uid"] != was


def test_nodes_that_are_off_or_cut_off_are_brought_back_by_up(cluster: Cluster, ours: None) -> None:
    up()
    was = cluster.get("namespace/default")["metadata"]["uid"]
    assert script("node", "off", "n1").returncode == script("node", "cut", "n2").returncode == 0
    assert re.findall(r"node n\d +([a-z ]+),", script("status").stdout) == ["off", "cut off"]
    up()
    assert re.findall(r"node n\d +([a-z ]+),", script("status").stdout) == ["on", "on"]
    assert cluster.get("namespace/default")["metadata"]["uid"] == was


def test_the_machine_gets_its_settings_back(cluster: Cluster, ours: None) -> None:
    setting = Path("/proc/sys/kernel/panic")
    down()
    was = setting.read_text()
    try:
        setting.write_text("17")
        up()
        assert setting.read_text() == "10\n", "the kubelet has its own will"
        down()
        assert setting.read_text() == "17\n"
    finally:
        setting.write_text(was)


def test_without_root_it_says_so_in_a_code_of_its_own() -> None:
    as_a_user = ["setpriv", "--reuid=65534", "--clear-groups"]
    with tempfile.TemporaryDirectory() as place:  # that user may not read a tree of root's
        Path(place).chmod(0o755)
        for folder in ("scripts", "tools/test_cluster"):
            shutil.copytree(ROOT / folder, Path(place, folder))
        said = subprocess.run([*as_a_user, f"{place}/scripts/cluster", "up"], capture_output=True, text=True)
    assert (said.returncode, said.stderr[:23]) == (77, "cluster: root is needed")


@pytest.mark.parametrize(
    ("demanded", "outcome"),
    [({}, "1 skipped"), ({"EDL_REQUIRE_CLUSTER": "1"}, "1 error")],
)
def test_tests_that_lack_a_tool_are_skipped_with_the_reason_but_fail_where_they_decide(
    tmp_path: Path, demanded: dict[str, str], outcome: str
) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for folder in ("/usr/bin", "/usr/sbin"):
        for file in Path(folder).iterdir():
            if file.name != "go" and not (tools / file.name).exists():
                (tools / file.name).symlink_to(file)
    kept = {name: value for name, value in os.environ.items() if name not in ("CI", "EDL_REQUIRE_CLUSTER")}
    env = {**kept, **demanded, "PATH": str(tools), "EDL_CACHE": str(tmp_path / "cache")}
    test = "tests/cluster/test_cluster.py::test_four_half_cpus_fill_a_node"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", test]
    said = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT).stdout
    assert outcome in said.splitlines()[-1]
    assert re.search("(SKIPPED|a cluster is required here).*go is missing", said)


def test_two_at_once_take_turns(cluster: Cluster, ours: None) -> None:
    both = [subprocess.Popen([SCRIPT, "down"], stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=240)[1] for process in both]
    assert ([process.returncode for process in both], traces()) == ([0, 0], []), said


def test_a_node_that_is_not_there_is_named() -> None:
    said = script("node", "off", "n9")
    assert said.returncode == 1
    assert "'n9'" in said.stderr and "n1, n2" in said.stderr
