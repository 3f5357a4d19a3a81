"""`scripts/cluster` itself: what it starts it also ends, whatever state it was left in.

Looked at from outside, with nothing of the script's own: a bug in how it finds its things would
be blind in both places.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "cluster"
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
    return subprocess.run([SCRIPT, *words], capture_output=True, text=True, timeout=120)


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


@pytest.fixture
def restart(cluster) -> Iterator[Callable[[], None]]:
    """The right to end the cluster: it is up again after the test."""
    if not cluster.started:
        pytest.skip("the cluster was up before the tests: somebody uses it")
    yield
    again = script("up", f"--owner={os.getpid()}")
    assert again.returncode == 0, again.stderr


def killed_when_it_says(text: str) -> None:
    """`scripts/cluster up`, killed without warning as soon as it says this."""
    with subprocess.Popen([SCRIPT, "up"], stderr=subprocess.PIPE, text=True) as starting:
        assert starting.stderr is not None
        for line in starting.stderr:
            if text in line:
                break
        starting.send_signal(signal.SIGKILL)


def test_nothing_is_left_of_a_cluster_with_running_pods(cluster, restart):
    sysctl = Path("/proc/sys/kernel/panic_on_oops")
    cluster.kubectl("run", "left", "--image", cluster.busybox, "--", "sleep", "3600")
    cluster.wait("pod/left", "condition=Ready")
    assert len(traces()) > 20
    down = script("down")
    assert (down.returncode, traces()) == (0, [])
    assert script("status").returncode == 1
    assert script("down").returncode == 0, "nothing to do is no error"
    assert script("env").returncode == 1
    assert sysctl.exists()


@pytest.mark.parametrize("moment", ["starting the control plane", "starting DNS"])
def test_nothing_is_left_of_a_cluster_whose_start_was_killed(cluster, restart, moment):
    script("down")
    killed_when_it_says(moment)
    assert traces() != []
    down = script("down")
    assert (down.returncode, traces()) == (0, []), down.stderr


def test_a_cluster_that_lost_a_part_is_replaced(cluster, restart):
    was = cluster.get("namespace/default")["metadata"]["uid"]
    [etcd] = [trace for trace in traces() if trace.startswith("process") and "/etcd " in trace]
    os.kill(int(etcd.split()[1].rstrip(":")), signal.SIGKILL)
    assert script("status").returncode == 1
    up = script("up", f"--owner={os.getpid()}")
    assert up.returncode == 0, up.stderr
    assert cluster.get("namespace/default")["metadata"]["uid"] != was


def test_two_at_once_take_turns(cluster, restart):
    both = [subprocess.Popen([SCRIPT, "down"], stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=60)[1] for process in both]
    assert ([process.returncode for process in both], traces()) == ([0, 0], []), said


def test_a_node_that_is_not_there_is_named():
    said = script("node", "off", "n9")
    assert said.returncode == 1
    assert "'n9'" in said.stderr and "n1, n2" in said.stderr
