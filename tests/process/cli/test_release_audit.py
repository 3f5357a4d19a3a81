# SPDX-License-Identifier: Apache-2.0
"""`edl audit --release` against a server of release_commands.py: the same verdict as here."""

from __future__ import annotations

import asyncio
import hashlib
import json
import subprocess
import urllib.request
from pathlib import Path

import pytest
import yaml

from edl.contract import artifacts
from edl.master.core import events as ev
from tests.support.jobs.journals import keep
from tests.support.jobs.stories import Story
from tests.support.kubernetes.release_commands import EDL, SECONDS, Cluster, says

pytestmark = pytest.mark.waits

MODEL = b"weights" * 1000
AUDIT = ("audit", "--release", "edl")


def a_job(output: Path) -> None:
    """The output directory of a job that has exported its model, with a journal of several segments."""
    story = Story(workers=2, joinDelaySeconds=0.5).running()
    generation, members = story.job.ring.generation, story.job.ring.members
    for n in range(400):
        story.tell(ev.Progress(generation, 2 + n // 50), after=0)
    story.out(*members, step=10, digest="same")
    (first, *_) = members
    story.tell(ev.Finished(first, {}, artifacts.MODEL, exports={"keras": artifacts.MODEL}))
    story.tell(*(ev.Gone(w.id, code=0) for w in list(story.job.pool)))
    keep(story, output, full_at=2048)
    files = {artifacts.MODEL: {"bytes": len(MODEL), "sha256": hashlib.sha256(MODEL).hexdigest()}}
    listed = {"exports": [{"format": "keras", "path": artifacts.MODEL, "verified": True, "files": files}]}
    (output / artifacts.EXPORTS).write_text(json.dumps(listed))
    (output / artifacts.MODEL).write_bytes(MODEL)
    assert len(artifacts.journals(output)) > 2


def upload(server: Cluster, output: Path) -> None:
    """Put the files into the pods: the journal into the master's, the model onto the claim."""
    pod = {
        "spec": {
            "containers": [{"name": "worker", "image": "edl-worker"}],
            "volumes": [{"name": "output", "persistentVolumeClaim": {"claimName": "models"}}],
        }
    }
    job = server.objects["configmaps"]["edl-job"]
    server.put("configmaps", {**job, "data": {**job["data"], "worker.yaml": yaml.safe_dump(pod)}})
    for file in output.iterdir():
        server.files[f"/var/lib/edl/{file.name}"] = file.read_bytes()


async def test_the_verdict_on_a_release_is_the_one_on_its_files(cluster: Cluster, tmp_path: Path) -> None:
    refused = await cluster.edl(*AUDIT)
    assert (refused.code, "the job has not ended" in refused.err) == (1, True)
    output = tmp_path / "job"
    output.mkdir()
    a_job(output)
    upload(cluster, output)
    so_far = await cluster.edl(
        "report", "--release", "edl", "--svg", "ring", "--output", f"{tmp_path}/ring.svg"
    )
    assert so_far.code == 0 and "<svg" in (tmp_path / "ring.svg").read_text(), so_far.err
    says(cluster, "Succeeded")
    here = subprocess.run([EDL, "audit", str(output)], capture_output=True, text=True, check=True)
    assert here.stdout.startswith("exactly once: 100 records x 1 epoch in 10 steps")
    assert "1 exported file as written (SHA-256)" in here.stdout
    there = await cluster.edl(*AUDIT)
    assert (there.code, there.out) == (0, here.stdout), there.err
    assert list(cluster.objects["pods"]) == ["edl-master"], "the pod is left"
    drawn = await cluster.edl("report", "--release", "edl", "--output", str(tmp_path / "report.html"))
    assert (drawn.code, drawn.out) == (0, f"{tmp_path}/report.html\n"), drawn.err
    page = (tmp_path / "report.html").read_text()
    assert "(edl): Succeeded</title>" in page and "exactly once: 100 records x 1 epoch in 10 steps" in page

    cluster.files["/var/lib/edl/model.keras"] = MODEL[:-1]
    done = await cluster.edl(*AUDIT)
    place = "release edl, pod edl-master: /var/lib/edl"
    assert (done.code, f"{place}/model.keras: its SHA-256 is not the one in" in done.err) == (1, True), done
    del cluster.files["/var/lib/edl/model.keras"]
    done = await cluster.edl(*AUDIT)
    assert (done.code, "No such file or directory; the job has exported it" in done.err) == (1, True), done

    journal = cluster.files["/var/lib/edl/events.jsonl"]
    head, _, lines = journal.partition(b"\n")
    edited = lines.replace(b'"now":', b'"now": ', 1)
    cluster.files["/var/lib/edl/events.jsonl"] = head + b"\n" + edited
    done = await cluster.edl(*AUDIT)
    assert (done.code, f"{place}/events.jsonl: line 2: the chain is broken" in done.err) == (1, True), done
    cluster.files["/var/lib/edl/events.jsonl"] = journal
    del cluster.files["/var/lib/edl/events.1.jsonl"]
    done = await cluster.edl(*AUDIT)
    assert "the journal in pod edl-master cannot be read: cat: /var/lib/edl/events.1.jsonl" in done.err
    assert "is lost with it" in done.err
    assert list(cluster.objects["pods"]) == ["edl-master"]


async def test_the_live_page_shows_the_status_and_the_journal_of_a_release(
    cluster: Cluster, tmp_path: Path
) -> None:
    output = tmp_path / "job"
    output.mkdir()
    a_job(output)
    upload(cluster, output)
    says(cluster, "Training")
    shown = await cluster.start("ui", "--release", "edl")
    try:
        address = (await shown.line()).strip()
        assert json.loads(await page(address, "now"))["title"].startswith("Training: ")
        says(cluster, "Succeeded")
        while not (now := json.loads(await page(address, "now")))["title"].startswith("Succeeded: "):
            await asyncio.sleep(0.1)
        assert "because" in now["now"]
        while not json.loads(await page(address, "now"))["final"]:  # pictures of before have no ring
            await asyncio.sleep(0.1)
        pictures = await page(address, "pictures")
        assert '<section aria-labelledby="ring-head">' in pictures and "<svg" in pictures
        assert list(cluster.objects["pods"]) == ["edl-master"], "the page starts no pod"
    finally:
        shown.interrupt()
        ended = await shown.end()
    assert (ended.code, ended.out, ended.err) == (0, "", "")


async def page(address: str, path: str) -> str:
    """Fetch a path of the live page."""

    def get() -> str:
        with urllib.request.urlopen(address + path, timeout=SECONDS) as answer:
            return str(answer.read().decode())

    return await asyncio.to_thread(get)
