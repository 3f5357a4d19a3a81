# SPDX-License-Identifier: Apache-2.0
"""The job's object at the small API server: what the chart and people write there while the job runs."""

from __future__ import annotations

import re
from collections import Counter
from datetime import date

import pytest
import yaml

from edl.kubernetes import overrides
from edl.master.core import events as ev
from tests.support.fakes.kubernetes_api import KubernetesApi
from tests.support.kubernetes.small_server import POD, a_status, driving, install

pytestmark = pytest.mark.waits

# --- what the chart writes


async def test_new_values_and_a_new_template_are_taken(server: KubernetesApi) -> None:
    async with driving(server) as job:
        changed = {**POD, "metadata": {"labels": {"team": "theirs"}}}
        install(server, "workers=5", **{"worker.yaml": yaml.safe_dump(changed)})
        await job.until(lambda: job.taken)
        assert job.taken[0]["workers"] == 5
        await job.running(0)
        assert server.pod("edl-worker-0")["metadata"]["labels"]["team"] == "theirs"
        install(server, **{"values.json": "["})
        (refused,) = await job.until(lambda: job.of(ev.Refused))
        assert "values.json is not valid JSON" in refused.why


async def test_a_refused_change_does_not_reach_the_pods(server: KubernetesApi) -> None:
    other = yaml.safe_dump({**POD, "metadata": {"labels": {"team": "theirs"}}})
    async with driving(server) as job:
        install(server, "workers=5", "data.existingClaim=other", **{"worker.yaml": other})
        await job.until(lambda: job.of(ev.Refused))
        await job.running(0)
        assert server.pod("edl-worker-0")["metadata"]["labels"]["team"] == "ours"
        assert job.taken[-1]["workers"] == 5
        install(server, "workers=5", **{"worker.yaml": other})
        await job.until(lambda: len(job.taken) == 2)
        await job.running(1)
        assert server.pod("edl-worker-1")["metadata"]["labels"]["team"] == "theirs"


async def test_a_pod_that_waits_is_replaced_when_the_release_makes_other_ones(server: KubernetesApi) -> None:
    server.autorun = False
    async with driving(server) as job:
        job.create(0, 1)
        await job.until(lambda: len(server.objects["pods"]) == 2)
        server.run_pod("edl-worker-0")
        server.hold_pod("edl-worker-1", "ImagePullBackOff", "Back-off pulling image edl-worker")
        await job.until(lambda: job.delays(1))
        install(server, "workers=4")
        await job.until(lambda: job.taken)
        install(
            server, **{"worker.yaml": yaml.safe_dump({**POD, "metadata": {"labels": {"team": "theirs"}}})}
        )
        gone = await job.gone(1)
        assert (gone.free, gone.why) == (True, "it was pending, and its pod was outdated")
        assert set(server.objects["pods"]) == {"edl-worker-0"}, "a running worker has what it needs"
        assert server.count()["delete", "pods"] == 1


async def test_a_share_of_the_workers_has_the_higher_priority(server: KubernetesApi) -> None:
    high = {**POD, "spec": {**POD["spec"], "priorityClassName": "high"}}  # type: ignore[dict-item]
    install(server, "workers=4", "onDemandWorkers=50%", **{"worker-high.yaml": yaml.safe_dump(high)})
    async with driving(server) as job:
        await job.running(0, 1, 2, 3)

        def classes() -> Counter[str]:
            return Counter(p["spec"].get("priorityClassName", "") for p in server.objects["pods"].values())

        assert classes() == {"high": 2, "": 2}
        server.drop("pods", "edl-worker-0")
        await job.gone(0)
        await job.running(4)
        assert classes() == {"high": 2, "": 2}


@pytest.mark.parametrize(
    ("containers", "said"),
    [
        ("[{name: wrong}]", "worker.yaml: the pod has no container named worker"),
        ("{name: worker}", r"worker.yaml: spec.containers: .*is not a list of maps"),
    ],
    ids=["no worker", "a wrong shape"],
)
async def test_a_template_that_makes_no_pod_is_named_until_it_is_mended(
    server: KubernetesApi, containers: str, said: str
) -> None:
    install(server, **{"worker.yaml": f"kind: Pod\nspec: {{containers: {containers}}}"})
    async with driving(server) as job:
        job.create(0)
        await job.until(lambda: job.delays(0))
        assert re.search(said, job.delays(0)[0])
        install(server)
        await job.until(lambda: job.seen == [0])


async def test_a_template_that_json_cannot_hold_is_named(server: KubernetesApi) -> None:
    dated = {**POD, "metadata": {"annotations": {"since": date(2026, 1, 1)}}}
    install(server, **{"worker.yaml": yaml.safe_dump(dated)})
    async with driving(server) as job:
        job.create(0)
        await job.until(lambda: job.delays(0))
        assert "worker.yaml is not valid" in job.delays(0)[0]


# --- what is asked by hand


def ask(server: KubernetesApi, **keys: str) -> None:
    """As `edl scale` and `edl stop` do: beside what the chart has rendered."""
    job = server.objects["configmaps"]["edl-job"]
    server.put("configmaps", {**job, "data": {**job["data"], **keys}})


async def test_a_number_by_hand_holds_until_the_chart_says_another(server: KubernetesApi) -> None:
    ask(server, **{overrides.SCALE: overrides.Scale(7, 3, "first").text()})
    async with driving(server) as job:
        assert job.wanted.values["workers"] == 7
        job.told = a_status()
        install(
            server, "workers=3", "suspend=true", **{overrides.SCALE: overrides.Scale(7, 3, "first").text()}
        )
        await job.until(lambda: job.taken and job.taken[-1]["suspend"])
        assert job.taken[-1]["workers"] == 7, "an upgrade that says nothing of workers leaves them alone"
        install(server, "workers=5", **{overrides.SCALE: overrides.Scale(7, 3, "first").text()})
        await job.until(lambda: job.taken[-1]["workers"] == 5)
        events = server.objects["events"]
        await job.until(lambda: any(e["reason"] == "ScaleSuperseded" for e in events.values()))
    install(server, "workers=3", **{overrides.SCALE: overrides.Scale(7, 3, "first").text()})
    async with driving(server) as job:
        assert job.wanted.values["workers"] == 3, "what is over does not come back, whichever master is there"
        ask(server, **{overrides.SCALE: overrides.Scale(8, 3, "second").text()})
        await job.until(lambda: job.taken and job.taken[-1]["workers"] == 8)
        install(
            server, "workers=3", "maxWorkers=6", **{overrides.SCALE: overrides.Scale(8, 3, "second").text()}
        )
        await job.until(lambda: job.taken[-1]["workers"] == 3)
        told = "`edl scale 8` is superseded: workers is 8 and maxWorkers is 6"
        await job.until(lambda: any(e["message"].startswith(told) for e in server.objects["events"].values()))


async def test_a_run_is_stopped_once_whichever_master_reads_of_it(server: KubernetesApi) -> None:
    async with driving(server) as job:
        job.told = a_status()
        ask(server, **{overrides.STOP: "run-0"})
        install(server, "workers=3", "suspend=true", **{overrides.STOP: "run-1"})
        await job.until(lambda: job.of(ev.StopAsked))
        install(server, "workers=3", **{overrides.STOP: "run-1"})
        await job.until(lambda: len(job.taken) > 1 and not job.taken[-1]["suspend"])
        assert job.of(ev.StopAsked) == [ev.StopAsked("stopped by edl stop")]
    async with driving(server) as next_master:
        assert next_master.of(ev.StopAsked) == [ev.StopAsked("stopped by edl stop")]
    async with driving(server, "run-2") as another:
        assert another.of(ev.StopAsked) == []


async def test_a_checkpoint_and_an_end_with_one_are_asked_of_one_run_and_once(server: KubernetesApi) -> None:
    asked = {
        overrides.CHECKPOINT: overrides.Asked("run-1", "a").text(),
        overrides.FAREWELL: overrides.Asked("run-1", "b", force=True).text(),
    }
    stop = ev.StopAsked("stopped by edl stop", True, True, "b")
    async with driving(server) as job:
        job.told = a_status()
        ask(server, **{key: text.replace("run-1", "run-0") for key, text in asked.items()})
        install(server, "workers=3", "suspend=true", **asked)
        await job.until(lambda: job.of(ev.StopAsked))
        asked[overrides.CHECKPOINT] = overrides.Asked("run-1", "c").text()
        install(server, "workers=3", **asked)
        await job.until(lambda: len(job.of(ev.CheckpointAsked)) == 2)
        assert job.of(ev.StopAsked) == [stop]
    async with driving(server) as next_master:
        assert next_master.of(ev.StopAsked) == [stop], "it was not done yet"
