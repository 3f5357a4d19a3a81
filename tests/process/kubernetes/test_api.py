# SPDX-License-Identifier: Apache-2.0
"""The Kubernetes backend against a server that speaks the real protocol and misbehaves on demand."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from lightkube.config.kubeconfig import KubeConfig
from lightkube.config.models import Cluster, User

from edl.contract.ids import WorkerId
from edl.contract.reasons import Reason
from edl.errors import ConfigError
from edl.kubernetes.client import Api, ApiError
from edl.kubernetes.timing import Timing
from edl.master.backends.kubernetes import Place
from edl.master.core import effects as ef
from edl.master.core import events as ev
from tests.support.fakes.kubernetes_api import KubernetesApi, serving
from tests.support.fakes.kubernetes_cluster import NAMESPACE
from tests.support.kubernetes.driver import Driven
from tests.support.kubernetes.small_server import SECOND, a_status, driving, install

pytestmark = pytest.mark.waits

# --- faults of the API


async def test_an_answer_that_was_lost_makes_no_second_worker(server: KubernetesApi) -> None:
    server.swallowed = 2
    async with driving(server) as job:
        await job.running(0, 1, 2)
        await asyncio.sleep(5 * SECOND)
        assert sorted(server.names) == ["edl-worker-0", "edl-worker-1", "edl-worker-2"]
        assert job.seen == [0, 1, 2]
        assert job.of(ev.Gone) == []


async def test_a_foreign_pod_of_that_name_is_left_alone_and_the_worker_given_up(
    server: KubernetesApi,
) -> None:
    async with driving(server) as job:
        server.put("pods", {"metadata": {"name": "edl-worker-0"}, "status": {"phase": "Running"}})
        job.create(0)
        gone = await job.gone(0)
        assert gone.free
        assert gone.why == "there is a pod edl-worker-0 already, and this master did not make it"
        await job.running(1)
        assert "edl-worker-0" in server.objects["pods"]


@pytest.mark.parametrize("in_stream", [False, True])
async def test_a_deletion_missed_while_the_watch_was_away_is_noticed(
    server: KubernetesApi, in_stream: bool
) -> None:
    server.expires_in_stream = in_stream
    async with driving(server) as job:
        await job.running(0, 1)
        server.half_open = True
        server.cut()
        server.drop("pods", "edl-worker-0")
        server.compact()
        server.half_open = False
        assert (await job.gone(0)).free
        assert job.of(ev.Gone, 1) == []


async def test_the_same_name_with_another_uid_is_another_pod(server: KubernetesApi) -> None:
    async with driving(server) as job:
        await job.running(0)
        pod = json.loads(json.dumps(server.pod("edl-worker-0")))
        server.cut()
        server.drop("pods", "edl-worker-0")
        del pod["metadata"]["uid"]
        server.put("pods", pod)
        server.compact()
        assert (await job.gone(0)).free
        await job.until(lambda: not server.objects["pods"])
        assert len(job.of(ev.Seen)) == 1


async def test_a_watch_that_says_nothing_is_given_up(server: KubernetesApi) -> None:
    async with driving(server) as job:
        server.half_open = True
        server.cut()
        await asyncio.sleep(2 * SECOND)
        job.create(0)
        await asyncio.sleep(2 * SECOND)
        assert job.seen == [], "it cannot be known yet"
        server.half_open = False
        await job.until(lambda: job.seen == [0], 300 * SECOND)
        assert server.count()["watch", "pods"] <= 5


async def test_chunks_cut_anywhere_and_news_that_comes_twice(server: KubernetesApi) -> None:
    server.chopped = server.twice = True
    server.autorun = False
    async with driving(server) as job:
        job.create(0, 1, 2)
        await job.until(lambda: len(server.objects["pods"]) == 3)
        # U+0085 and U+2028 end a line for Python's splitlines, not for JSON.
        server.hold_pod("edl-worker-0", "ErrImagePull", "nö\u0085 such\u2028image 🙂")
        server.run_pod("edl-worker-1")
        server.end_pod("edl-worker-2", 3)
        assert await job.gone(2) == ev.Gone(WorkerId(2), code=3)
        await job.until(lambda: job.delays(0))
        assert job.delays(0) == ["ErrImagePull: nö such image 🙂"]
        await asyncio.sleep(5 * SECOND)
        assert [type(e) for e in job.emitted].count(ev.Seen) == 1
        assert len(job.of(ev.Gone)) == 1


@pytest.mark.parametrize("fault", [410, 500, 429, 403])
async def test_no_refusal_of_list_or_watch_makes_a_hot_loop(server: KubernetesApi, fault: int) -> None:
    async with driving(server) as job:
        await job.running(0)
        server.refuse("watch", "*", fault, times=10**6)
        server.refuse("list", "*", fault, times=10**6)
        server.cut()
        await asyncio.sleep(2 * SECOND)
        before = len(server.requests)
        await asyncio.sleep(60 * SECOND)
        assert 2 <= len(server.requests) - before <= 60
        server.refusals.clear()
        server.drop("pods", "edl-worker-0")
        assert (await job.gone(0)).free


async def test_a_watch_that_breaks_after_each_word_makes_no_hot_loop(server: KubernetesApi) -> None:
    async with driving(server) as job:
        server.broken_after = 1
        server.cut()
        job.create(0, 1, 2)
        await job.until(lambda: job.seen == [0, 1, 2])
        assert server.count()["watch", "pods"] < 20


async def test_retry_after_is_obeyed_by_everybody(server: KubernetesApi) -> None:
    async with driving(server) as job:
        server.refuse("create", "pods", 429, "TooManyRequests", "slow down", retry_after=1)  # a real second
        began = time.monotonic()
        job.create(0, 1, 2)
        await job.until(lambda: job.seen == [0, 1, 2])
        at = [r.at - began for r in server.requests if (r.verb, r.resource) == ("create", "pods")]
        assert sum(t < 0.9 for t in at) <= 3, "those that were on their way"
        assert any("slow down" in why for why in job.delays(0) + job.delays(1) + job.delays(2))


@pytest.mark.parametrize("how", ["refuses connections", "never answers"])
async def test_five_minutes_without_an_api(server: KubernetesApi, how: str) -> None:
    async with driving(server) as job:
        job.told = a_status()
        await job.running(*range(6))
        await asyncio.sleep(5 * SECOND)
        before = len(server.requests)
        if how == "refuses connections":
            await server.down()
        else:
            server.deaf = True
            server.cut()
        server.drop("pods", "edl-worker-0")
        server.end_pod("edl-worker-1", 1)
        job.create(6, 7)
        job.delete(2)
        job.backend.perform(ef.Notice(Reason.RingReshaped, "ring 3 -> 2 in 0.21 s"))
        await asyncio.sleep(300 * SECOND)
        asked = server.requests[before:]
        assert len(asked) <= 300
        later = [r.at for r in asked if r.at - asked[0].at > 2 * SECOND]  # those before were on their way
        for first, tenth in zip(later, later[10:], strict=False):
            assert tenth - first > 0.8 * 10 * SECOND, "one request a second, all together"
        server.compact()
        if how == "refuses connections":
            await server.up()
        server.deaf = False
        await job.until(lambda: {6, 7} <= set(job.seen))
        assert (await job.gone(0)).free
        assert await job.gone(1) == ev.Gone(WorkerId(1), code=1)
        await job.gone(2)
        assert job.seen == list(range(8))
        await job.until(lambda: any("0.21" in e["message"] for e in server.objects["events"].values()))


# --- the account


async def test_a_token_that_was_rotated_is_read_again(server: KubernetesApi, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("old")
    known = ["old"]
    answer = server._answer

    def checked(verb: str, resource: str, name: str, http: Any, body: bytes) -> Any:
        if http.headers.get("Authorization") != f"Bearer {known[0]}":
            from aiohttp import web

            return web.json_response({"message": "Unauthorized", "code": 401}, status=401)
        return answer(verb, resource, name, http, body)

    server._answer = checked  # type: ignore[method-assign]
    user = User(token="old", token_file=str(token))
    api = Api(Timing().times(SECOND), KubeConfig.from_one(cluster=Cluster(server=server.url), user=user))
    path = f"/api/v1/namespaces/{NAMESPACE}/pods"
    assert (await api.get(path))["kind"] == "PodList"
    known[0] = "new"
    with pytest.raises(ApiError, match="Unauthorized"):
        await api.get(path)
    token.write_text("new")
    assert (await api.get(path))["kind"] == "PodList"
    await api.close()


def test_without_a_cluster_it_is_said_where_one_was_looked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"no Kubernetes configuration: .*none"):
        Api(Timing())
    monkeypatch.delenv("EDL_NAMESPACE", raising=False)
    with pytest.raises(ConfigError, match="EDL_NAMESPACE"):
        Place.from_environment()


async def test_a_pod_that_has_ended_before_its_create_is_answered_is_judged_by_its_end(
    server: KubernetesApi,
) -> None:
    async with driving(server) as job:
        server.half_open = True
        server.cut()  # the watch does not tell of it
        server.swallowed = 1
        job.create(0)
        await job.until(lambda: server.unanswered)
        refusal = server.refuse("create", "pods", 503, times=1_000_000)
        await job.until(lambda: server.pod("edl-worker-0")["status"]["phase"] == "Running")
        server.end_pod("edl-worker-0", 9)
        refusal.times = 0
        gone = await job.gone(0)
        assert (gone.code, gone.free) == (9, False)
        server.half_open = False
        server.cut()
        job.create(1)
        await job.until(lambda: 1 in job.seen)  # and so the watch has told of the other one, too
        assert job.of(ev.Gone) == [gone]
        assert server.names == ["edl-worker-0", "edl-worker-1"]


# --- storms


@pytest.mark.parametrize("number", range(2))
async def test_whatever_comes_together_what_was_told_is_the_truth(number: int) -> None:
    seed = random.SystemRandom().randrange(1 << 32) if number else 1
    seed = int(os.environ.get("EDL_STORM_SEED", seed))
    print(f"EDL_STORM_SEED={seed}")
    chance = random.Random(seed)
    async with serving(SECOND, seed) as server:
        install(server, "workers=8")
        async with driving(server) as job:
            born, living = 0, set[int]()
            causes: dict[int, str] = {}  # what was done to a worker; to none is it done twice

            def wanted() -> None:
                nonlocal born
                living.difference_update(e.worker for e in job.of(ev.Gone))
                while len(living) < 8:
                    job.create(born)
                    living.add(born)
                    born += 1

            for _ in range(60):
                wanted()
                strike(server, job, chance, causes)
                await asyncio.sleep(SECOND * chance.uniform(0.0, 3.0))
            if server._runner is None:
                await server.up()
            server.deaf = server.half_open = server.twice = server.chopped = False
            server.refusals, server.broken_after, server.swallowed, server.quota = [], 0, 0, None

            def settled() -> bool:
                wanted()
                pods = server.objects["pods"].values()
                running = {
                    p["metadata"]["name"]
                    for p in pods
                    if p["status"]["phase"] == "Running" and not p["metadata"].get("deletionTimestamp")
                }
                return running == {f"edl-worker-{w}" for w in living} and living <= set(job.seen)

            try:
                await job.until(settled, 30)
            except TimeoutError:
                pods = {n: p["status"]["phase"] for n, p in server.objects["pods"].items()}
                unseen = living - set(job.seen)
                raise AssertionError(f"living {living}, not seen {unseen}, pods {pods}") from None
            told = Counter(e.worker for e in job.of(ev.Gone))
            assert set(told) == set(range(born)) - living
            assert set(told.values()) <= {1}
            assert set(Counter(e.worker for e in job.of(ev.Seen)).values()) == {1}
            # A pod that came and went unnoticed is created again.
            twice = {name for name, n in Counter(server.names).items() if n > 1}
            assert twice <= server.unanswered, "a name was used twice"
            for worker, cause in causes.items():
                if cause == "ours" or f"edl-worker-{worker}" in twice:
                    continue  # it may still be to be deleted; or the first one was struck, and another lives
                (gone,) = job.of(ev.Gone, worker)
                if cause == "crash":
                    assert (gone.code, gone.signal, gone.free) in ((9, "", False), (None, "", True)), gone
                else:
                    assert gone.free, (cause, gone)


def strike(server: KubernetesApi, job: Driven, chance: random.Random, causes: dict[int, str]) -> None:
    """Something bad, to the API or to a worker."""
    running = [
        worker
        for p in server.objects["pods"].values()
        if p["status"]["phase"] == "Running" and not p["metadata"].get("deletionTimestamp")
        if (worker := int(p["metadata"]["labels"]["edl.dev/worker-id"])) not in causes
    ]
    match chance.randrange(14):
        case 0:
            server.cut()
        case 1:
            server.cut()
            server.compact()
        case 2:
            server.expires_in_stream = not server.expires_in_stream
        case 3:
            server.twice, server.chopped = chance.random() < 0.5, chance.random() < 0.5
        case 4:
            verb = chance.choice(["create", "list", "watch", "*"])
            server.refuse(verb, "*", chance.choice([410, 429, 500, 503]), times=chance.randint(1, 5))
        case 5:
            server.swallowed = chance.randint(1, 2)
        case 6:
            server.broken_after = chance.choice([0, 0, 1, 3])
        case 7:
            server.half_open = chance.random() < 0.3
        case 8:
            server.quota = chance.choice([None, 4, 8])
        case _ if not running:
            pass
        case 9:
            causes[worker := chance.choice(running)] = "crash"
            server.end_pod(f"edl-worker-{worker}", 9)
        case 10:
            causes[worker := chance.choice(running)] = "preempted"
            server.preempt(f"edl-worker-{worker}")
        case 11:
            causes[worker := chance.choice(running)] = "deleted"
            server.delete_pod(f"edl-worker-{worker}")
        case 12:
            causes[worker := chance.choice(running)] = "vanished"
            server.drop("pods", f"edl-worker-{worker}")
        case 13:
            worker = chance.choice(running)
            if worker in job.seen:
                causes[worker] = "ours"
                job.delete(worker)
