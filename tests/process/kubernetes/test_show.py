# SPDX-License-Identifier: Apache-2.0
"""What people see with kubectl, at the small API server: the status, labels and Events."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from structlog.testing import capture_logs

import edl
from edl.contract.reasons import Reason
from edl.master.backends.kubernetes import EndedRun
from edl.master.core import effects as ef
from edl.master.core import events as ev
from tests.support.fakes.kubernetes_api import KubernetesApi
from tests.support.kubernetes.driver import job_values
from tests.support.kubernetes.small_server import PACE, SECOND, a_status, driving, install, opened

pytestmark = pytest.mark.waits


def reasons(server: KubernetesApi) -> list[str]:
    return [event["reason"] for event in server.objects["events"].values()]


async def test_the_status_is_written_when_it_changes_and_not_more_often_than_once_a_second(
    server: KubernetesApi,
) -> None:
    async with driving(server) as job:

        def data() -> dict[str, str]:
            return dict(server.objects["configmaps"]["edl-status"].get("data") or {})

        def patches() -> int:
            return server.count()["patch", "configmaps"]

        job.told = a_status()
        job.backend.observe(0.0, ev.Tick(), [])
        await job.until(data)
        in_full = json.loads(data()["status.json"])
        assert in_full["records"]["applied"] == 130
        assert "goodput" not in in_full, "it changes all the time"
        state = json.loads(data()["state"])
        assert abs(state.pop("startedAt") - time.time()) < 60
        assert state == {"runId": "run-1", "nextId": 0, "version": edl.__version__}
        left_out = ("updated", "values", "state", "past", "status.json")
        assert {k: v for k, v in data().items() if k not in left_out} == {
            "phase": "Training",
            "reason": "2 workers (generation 1)",
            "progress": "31%",
            "etaSeconds": "1200",
            "ringSize": "2",
            "workers": "2",
            "goodput": "90%",
            "epoch": "2/4",
            "loss": "0.1235",
            "valuesApplied": "True",
        }
        before = patches()
        for _ in range(50):
            job.backend.observe(0.0, ev.Tick(), [])
            await asyncio.sleep(0.1 * SECOND)
        assert patches() == before, "nothing has changed"
        loop = asyncio.get_running_loop()
        began = loop.time()
        for loss in range(100):  # ten seconds of mere progress, or more on a busy machine
            job.told = a_status(loss=float(loss))
            job.backend.observe(0.0, ev.Tick(), [])
            await asyncio.sleep(0.1 * SECOND)
        assert 1 <= patches() - before <= (loop.time() - began) / SECOND / 5 + 2
        began, before = loop.time(), patches()
        for target in range(100):
            job.told = a_status(target=target)
            job.backend.observe(0.0, ev.Tick(), [])
            await asyncio.sleep(0.1 * SECOND)
        assert 3 <= patches() - before <= (loop.time() - began) / SECOND + 2
        two = [{"id": n, "rank": None, "state": "pending", "delay": "no room"} for n in (3, 4)]
        job.told = a_status(workers=two)
        job.backend.observe(0.0, ev.Tick(), [])
        await job.until(lambda: data().get("waiting") == "workers 3 and 4: no room")
        job.told = a_status(phase="Succeeded")
        job.backend.status.end({"phase": "Succeeded", "step": 7})
    assert data()["phase"] == "Succeeded", "the last word is written when the master goes"
    assert json.loads(data()["summary.json"])["step"] == 7
    assert "status.json" not in data()


async def test_a_status_that_the_api_refuses_is_told_once_and_written_when_it_no_longer_does(
    server: KubernetesApi,
) -> None:
    with capture_logs() as logs:
        async with driving(server) as job:
            server.refuse("patch", "configmaps", 403, "Forbidden", "cannot patch configmaps", times=10**6)
            before = len(server.requests)
            job.told = a_status()
            job.backend.observe(0.0, ev.Tick(), [])
            await job.until(lambda: server.count(before)["patch", "configmaps"] >= 3)
            (degraded,) = job.of(ev.Degraded)
            trouble = degraded.why
            assert degraded.part == "status" and trouble.startswith(
                "configmap edl-status cannot be written: patch configmaps: 403 "
            )
            assert "rbac.create=true" in trouble
            assert [e["log_level"] for e in logs if e["event"] == trouble] == ["warning"], "once"
            server.refusals = []
            await job.until(lambda: server.objects["configmaps"]["edl-status"].get("data"))
            await job.until(lambda: job.of(ev.Degraded)[-1] == ev.Degraded("status", ""))


@pytest.mark.parametrize("how", ["deleted", "emptied"])
async def test_a_status_that_was_lost_is_written_whole(server: KubernetesApi, how: str) -> None:
    with capture_logs() as logs:
        async with driving(server) as job:

            def data() -> dict[str, str]:
                return dict(server.objects["configmaps"].get("edl-status", {}).get("data") or {})

            def lose() -> None:
                status = server.objects["configmaps"]["edl-status"]
                if how == "deleted":
                    server.drop("configmaps", "edl-status")
                else:
                    server.put("configmaps", {**status, "data": None})

            job.told = a_status()
            job.backend.observe(0.0, ev.Tick(), [])
            await job.until(data)
            whole = data()
            lose()
            job.told = a_status(target=3)  # one key is another
            job.backend.observe(0.0, ev.Tick(), [])
            await job.until(lambda: data().keys() == whole.keys())
            assert data()["workers"] == "3"
            lose()  # and now nothing happens that would be written
            await job.until(lambda: data().keys() == whole.keys())
            (owner,) = server.objects["configmaps"]["edl-status"]["metadata"].get("ownerReferences", [{}])
            job_uid = server.objects["configmaps"]["edl-job"]["metadata"]["uid"]
            assert owner.get("uid") == (job_uid if how == "deleted" else None)
            server.drop("configmaps", "edl-job")
            await job.until(lambda: any("was uninstalled" in e["event"] for e in logs))
            server.drop("configmaps", "edl-status")
    assert not data(), "what was uninstalled stays away"
    assert not job.of(ev.Degraded)


@pytest.mark.parametrize("how", ["deleted", "emptied"])
async def test_the_status_of_a_run_that_has_ended_is_kept(server: KubernetesApi, how: str) -> None:
    async with driving(server) as job:
        job.told = a_status(phase="Succeeded")
        job.backend.status.end({"phase": "Succeeded"})
    status = server.objects["configmaps"]["edl-status"]
    async with opened(server) as installed:
        ended = EndedRun(installed)
        await ended.start()
        try:
            if how == "deleted":
                server.drop("configmaps", "edl-status")
            else:
                server.put("configmaps", {**status, "data": None})
            async with asyncio.timeout(20):
                while server.objects["configmaps"].get("edl-status", {}).get("data") != status["data"]:
                    await asyncio.sleep(SECOND)
        finally:
            await ended.close()
    async with opened(server) as installed:
        assert installed.found.ended == "Succeeded", "and the next master does not begin it anew"


async def test_when_a_run_has_ended_its_servers_are_freed_and_that_is_told(server: KubernetesApi) -> None:
    async with driving(server) as job:
        job.told = a_status(phase="Succeeded")
        job.backend.status.end({"phase": "Succeeded"})
    freed = asyncio.Event()

    async def end_servers() -> None:
        freed.set()

    def told() -> str | None:
        return server.objects["configmaps"]["edl-status"]["data"].get("servers")

    assert told() is None
    async with opened(server) as installed:
        ended = EndedRun(installed, (2, end_servers))
        await ended.start()
        try:
            async with asyncio.timeout(20):
                await freed.wait()
                while told() != "the rows of 2 parameter servers are freed":
                    await asyncio.sleep(SECOND)
        finally:
            await ended.close()


async def test_the_text_of_the_model_is_written_once_and_not_with_the_status(server: KubernetesApi) -> None:
    text = "def model(): return 1\ndef data(split): return 2\n# " + "\u00e9" * 100_000
    values = job_values()
    values["model"]["source"] = text
    install(server, **{"values.json": json.dumps(values)})
    async with driving(server) as job:
        job.told = a_status(reason="\u00e9" * 100_000)
        for target in range(3):
            job.told = {**job.told, "target": target}
            job.backend.observe(0.0, ev.Tick(), [])
            await job.until(
                lambda n=target: (
                    (server.objects["configmaps"]["edl-status"].get("data") or {}).get("workers") == str(n)
                )
            )
        status = server.objects["configmaps"]["edl-status"]["data"]
        assert sum(len(value.encode()) for value in status.values()) < 130_000
        assert server.objects["configmaps"]["edl-source"]["data"]["model.py"] == text
        written = [r for r in server.requests if r.name == "edl-source" or r.verb == "create"]
        assert [(r.verb, r.status) for r in written] == [("patch", 404), ("create", 201)]
    values["model"]["source"] = "nonsense ("
    install(server, **{"values.json": json.dumps(values)})
    async with driving(server) as job:  # the next master, which finds another text, and one that is refused
        assert job.found.earlier is not None
        assert job.found.earlier.config.model.source == text
    server.drop("configmaps", "edl-source")
    with capture_logs() as logs:
        async with opened(server) as installed:
            assert installed.found.earlier is None
    assert any("model.source" in e["event"] and "not kept anywhere" in e["event"] for e in logs)


async def test_an_event_that_the_api_refuses_is_dropped_with_a_warning_and_holds_up_no_other(
    server: KubernetesApi,
) -> None:
    with capture_logs() as logs:
        async with driving(server) as job:
            server.refuse("create", "events", 403, "Forbidden", "cannot create events", times=2)
            before = len(server.requests)
            for n in range(3):
                job.backend.perform(ef.Notice(Reason.Scaled, f"workers {n} -> {n + 1}"))
            await job.until(lambda: server.objects["events"])
            assert [e["message"] for e in server.objects["events"].values()] == ["workers 2 -> 3"]
            assert server.count(before)["create", "events"] == 3
    warnings = [e["event"] for e in logs if "an Event was refused" in e["event"]]
    assert len(warnings) == 1
    assert "the verbs create and patch for events" in warnings[0]


async def test_a_change_of_phase_is_written_at_once(server: KubernetesApi) -> None:
    async with driving(server, pace=replace(PACE, status=60.0, drift=60.0)) as job:

        def data() -> dict[str, str]:
            return dict(server.objects["configmaps"]["edl-status"].get("data") or {})

        job.told = a_status()
        job.backend.observe(0.0, ev.Tick(), [])
        await job.until(data)
        job.told = a_status(phase="Waiting", eta_seconds=None)
        job.backend.observe(0.0, ev.Tick(), [])
        await job.until(lambda: data()["phase"] == "Waiting")
        assert "etaSeconds" not in data()


async def test_rank_and_state_are_labels(server: KubernetesApi) -> None:
    async with driving(server) as job:
        await job.running(0, 1, 2)
        job.told = a_status()
        job.backend.observe(0.0, ev.Tick(), [])

        def labels(worker: int) -> tuple[str | None, str]:
            found = server.pod(f"edl-worker-{worker}")["metadata"]["labels"]
            return found.get("edl.dev/rank"), found["edl.dev/state"]

        await job.until(lambda: labels(1) == ("1", "member"))
        assert labels(2) == (None, "starting")
        assert server.count()["patch", "pods"] == 2
        job.told = a_status(workers=[{"id": 1, "rank": None, "state": "draining"}])
        job.backend.observe(0.0, ev.Tick(), [])
        await job.until(lambda: labels(1) == (None, "draining"))
        server.end_pod("edl-worker-0", 0)
        await job.until(lambda: labels(0) == (None, "gone"))


async def test_labels_do_not_pile_up_however_fast_the_ring_changes(server: KubernetesApi) -> None:
    async with driving(server) as job:
        workers = range(20)
        await job.running(*workers)
        before = len(server.requests)

        def turn(by: int) -> None:
            ring = [{"id": w, "rank": w + by, "state": "member"} for w in workers]
            job.told = a_status(workers=ring)
            job.backend.observe(0.0, ev.Tick(), [])

        for by in range(100):  # twenty seconds in which each rank changes a hundred times
            turn(by)
            await asyncio.sleep(0.2 * SECOND)
        assert ("patch", "pods") not in server.count(), "labels that cannot be read are not written"
        for worker in range(10):
            server.drop("pods", f"edl-worker-{worker}")
        await job.until(lambda: len(job.of(ev.Gone)) == 10)
        dropped = len(server.requests)
        await job.running(20)
        first = next(r for r in server.requests[dropped:] if (r.verb, r.resource) == ("create", "pods"))
        urgent = server.requests[dropped:].index(first)
        assert urgent <= 3, "a pod that is to be made does not wait for labels"

        def ranks() -> dict[int, str | None]:
            found = {w: server.pod(f"edl-worker-{w}")["metadata"]["labels"] for w in range(10, 20)}
            return {w: labels.get("edl.dev/rank") for w, labels in found.items()}

        await job.until(lambda: ranks() == {w: str(w + 99) for w in range(10, 20)})
        patches = [r for r in server.requests[before:] if (r.verb, r.resource) == ("patch", "pods")]
        seconds = (patches[-1].at - patches[0].at) / SECOND
        assert len(patches) <= 10 + 5 * seconds + 1, "what the budget has left"
        labelled = {r.name for r in server.requests[dropped + 1 :] if r.verb == "patch"}
        assert not labelled & {f"edl-worker-{w}" for w in range(10)}, "pods that are gone are not labelled"


async def test_events_tell_what_happened_and_alike_ones_count_up(server: KubernetesApi) -> None:
    async with driving(server) as job:
        for _ in range(3):
            job.backend.perform(ef.Notice(Reason.Scaled, "workers 4 -> 2"))
            await asyncio.sleep(3 * SECOND)
        job.backend.perform(
            ef.Notice(Reason.RingReshaped, "ring 3 -> 2 in 0.21 s, 0 records redone (worker 1 is lost)")
        )
        job.backend.perform(ef.Notice(Reason.SpecRefused, "a running job keeps its training.seed"))
        job.backend.perform(ef.Notice(Reason.Succeeded, "the job succeeded"))

        def told() -> dict[str, Any]:
            return {e["reason"]: e for e in server.objects["events"].values()}

        await job.until(lambda: "Succeeded" in told())
        assert told()["Scaled"]["count"] == 3
        assert told()["Scaled"]["involvedObject"]["uid"]
        assert told()["RingReshaped"]["message"].startswith("ring 3 -> 2 in 0.21 s")
        assert told()["SpecRefused"]["type"] == "Warning"
        for n in range(400):
            job.backend.perform(ef.Notice(Reason.WorkerReady, f"worker {n} is ready after 3.1 s"))
        job.backend.perform(ef.Notice(Reason.RingReshaped, "ring 2 -> 400 in 2.0 s"))
        await job.until(lambda: any("400 in 2.0" in e["message"] for e in server.objects["events"].values()))
        assert len(server.objects["events"]) <= 32


async def test_an_event_tells_when_it_happened_however_late_it_is_taken(server: KubernetesApi) -> None:
    async with driving(server, pace=replace(PACE, first_pause=2.2, most_pause=2.2)) as job:
        server.refuse("create", "events", 500)
        happened = datetime.now(UTC)
        job.backend.perform(
            ef.Notice(Reason.RingReshaped, "ring 3 -> 2 in 0.21 s, 0 records redone (worker 1 is lost)")
        )
        await job.until(lambda: server.objects["events"])
        (event,) = server.objects["events"].values()
        assert datetime.fromisoformat(event["firstTimestamp"]) <= happened
        assert event["firstTimestamp"] < event["metadata"]["creationTimestamp"]


async def test_many_small_events_keep_none_that_matters_waiting(server: KubernetesApi) -> None:
    async with driving(server, pace=replace(PACE, events=1000)) as job:
        for n in range(100):
            job.backend.perform(ef.Notice(Reason.EpochApplied, f"epoch {n} of 100 is applied"))
        await job.until(lambda: server.count()["create", "events"] == 15)  # and no more for long
        job.backend.perform(
            ef.Notice(Reason.RingReshaped, "ring 3 -> 2 in 0.21 s, 0 records redone (worker 1 is lost)")
        )
        await job.until(lambda: Reason.RingReshaped in reasons(server))
        assert server.count()["create", "events"] == 16


async def test_the_last_status_is_written_however_many_events_wait(server: KubernetesApi) -> None:
    async with driving(server) as job:
        job.told = a_status()
        for n in range(100):
            job.backend.perform(ef.Notice(Reason.WorkerFailed, f"worker {n} crashed"))
        job.backend.status.end({"phase": "Succeeded"})
    assert server.objects["configmaps"]["edl-status"]["data"]["summary.json"] == '{"phase": "Succeeded"}'


async def test_an_event_that_is_being_sent_when_the_master_goes_is_not_lost(server: KubernetesApi) -> None:
    async with driving(server) as job:
        server.deaf = True  # the API server is slow
        before = len(server.requests)
        job.backend.perform(ef.Notice(Reason.Succeeded, "the job succeeded"))
        await job.until(lambda: server.count(before)["create", "events"])
        server.deaf = False
    assert reasons(server) == [Reason.Succeeded]
