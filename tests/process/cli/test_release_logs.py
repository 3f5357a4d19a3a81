# SPDX-License-Identifier: Apache-2.0
"""`edl logs` of a release, against a server of release_commands.py."""

from __future__ import annotations

import pytest

from tests.support.kubernetes.release_commands import Cluster, pod, says

pytestmark = pytest.mark.waits


async def test_logs_of_master_and_workers_with_their_names(cluster: Cluster) -> None:
    says(cluster, "Training")
    for name in (pod(cluster, "worker", 10), pod(cluster, "worker", 2), "edl-master"):
        for n in range(3):
            cluster.say(name, f"line {n}")
    waiting = pod(cluster, "worker", 11, runs=False)
    cluster.hold_pod(waiting, "Unschedulable", "0/2 nodes are available")
    done = await cluster.edl("logs", "--release", "edl", "--tail", 1)
    assert done.out.splitlines() == ["edl-master: line 2", "edl-worker-2: line 2", "edl-worker-10: line 2"]
    assert "edl-worker-11 has no log yet: no node has room for it" in done.err
    done = await cluster.edl("logs", "worker-2", "--release", "edl")
    assert done.out.splitlines() == [f"edl-worker-2: line {n}" for n in range(3)]
    done = await cluster.edl("logs", "worker-7", "--release", "edl")
    assert (done.code, done.err) == (1, "edl: release edl: no pod of worker-7 found\n")


async def test_followed_logs_survive_pods_that_come_and_go_and_streams_that_break(cluster: Cluster) -> None:
    says(cluster, "Training")
    first = pod(cluster, "worker", 0)
    cluster.say(first, "hello")
    following = await cluster.start("logs", "--follow", "--release", "edl")
    assert await following.line() == "edl-worker-0: hello\n"
    cluster.cut()  # every watch and every log, in the middle of it
    cluster.say(first, "still here")
    assert await following.line() == "edl-worker-0: still here\n"
    cluster.drop("pods", first)
    second = pod(cluster, "worker", 1)
    cluster.say(second, "I am new")
    assert await following.line() == "edl-worker-1: I am new\n"
    cluster.say(second, "good bye")
    # The kubelet does not give the log of a container that ends at this moment.
    cluster.refuse("log", "pods", status=400, reason="BadRequest", times=2)
    says(cluster, "Succeeded")
    done = await following.end()
    assert (done.code, done.out, done.err) == (0, "edl-worker-1: good bye\n", "")


async def test_what_is_missing_at_the_end_of_a_followed_log_is_told(cluster: Cluster) -> None:
    says(cluster, "Training")
    cluster.say(pod(cluster, "worker", 0), "hello")
    following = await cluster.start("logs", "--follow", "--release", "edl")
    assert await following.line() == "edl-worker-0: hello\n"
    cluster.refuse("log", "pods", status=400, reason="BadRequest", times=100)
    says(cluster, "Succeeded")
    done = await following.end()
    assert done.code == 0
    assert "edl: the end of the log of edl-worker-0 cannot be read: " in done.err


async def test_it_ends_when_nobody_reads_any_more(cluster: Cluster) -> None:
    says(cluster, "Training")
    following = await cluster.start("logs", "master", "--follow", "--release", "edl")
    await cluster.asked("log", "pods")
    following.close()
    cluster.say("edl-master", "hello")
    assert (await following.end()).code == 1
