# SPDX-License-Identifier: Apache-2.0
"""The examples: each trains as its README says, although a worker is killed, and learns what it should."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from edl.contract import artifacts
from edl.journal import audit
from tests.support.jobs.by_commit import of_this_commit

A_Job = Callable[..., Any]
EXAMPLES = Path(__file__).parents[3] / "examples"


@dataclass(frozen=True)
class Learned:
    """A metric on the records held out, and the worst value that its README allows.

    Examples without one train for two epochs only.
    """

    metric: str = ""
    bound: float = 0.0

    def by(self, metrics: dict[str, float]) -> bool:
        falls = self.metric == "mae"
        return not self.metric or (metrics[self.metric] <= self.bound) == falls


GALLERY = {
    "contrastive": Learned(),
    "dcgan": Learned(),
    "deepfm": Learned("auc", 0.7),
    "distillation": Learned(),
    "fine_tuning": Learned("accuracy", 0.75),
    "forecast": Learned("mae", 0.13),
    "image_folder": Learned("accuracy", 0.9),
    "masked_sequence": Learned("accuracy", 0.98),
    "sample_weights": Learned("recall", 0.6),
    "segmentation": Learned(),
    "several_inputs": Learned("priority_accuracy", 0.9),
    "tabular_csv": Learned("mae", 55.0),
    "transformer": Learned(),
    "vae": Learned(),
}
MAX_BYTES = 50_000  # of a picture
MADE_BEFORE = {"fine_tuning": ("pretrain.py", "BACKBONE"), "image_folder": ("write_images.py", "IMAGES")}


def told(name: str) -> dict[str, Any]:
    """The options of the command `edl run` in an example's README: workers, epochs and batch size."""
    text = (EXAMPLES / name / "README.md").read_text()
    file = EXAMPLES / name / "values.yaml"
    if file.exists():
        assert f"-f examples/{name}/values.yaml" in text
        given = yaml.safe_load(file.read_text())
        size, epochs = given["training"]["batchSize"], given["training"]["epochs"]
        more = [f"mode={given['mode']}", f"ps.servers={given['ps']['servers']}"]
        return {"model": name, "workers": given["workers"], "epochs": epochs, "size": size, "more": more}
    command = re.search(
        rf"^\$ edl run (examples/{name}/\w+\.py) --workers (\d) --epochs (\d+) --batch-size (\d+)$",
        text,
        re.M,
    )
    assert command, f"README of {name}"
    path, workers, epochs, size = command.groups()
    model = str(EXAMPLES.parent / path)
    return {"model": model, "workers": int(workers), "epochs": int(epochs), "size": size, "more": []}


def test_each_example_is_here_and_in_the_list() -> None:
    folders = {path.parent.name for path in EXAMPLES.glob("*/README.md")}
    assert folders == GALLERY.keys() | {"own_loops"}  # whose test is test_own_loops.py
    assert set(re.findall(r"\((\w+)/README\.md\)", (EXAMPLES / "README.md").read_text())) == folders


@pytest.mark.parametrize("name", GALLERY)
def test_each_example_shows_its_picture(name: str) -> None:
    shown = re.findall(r"^!\[[^]]+\]\(([^)]+)\)$", (EXAMPLES / name / "README.md").read_text(), re.M)
    pictures = [path.name for path in (EXAMPLES / name).glob("*.svg")]
    assert len(pictures) == 1
    assert shown == pictures
    assert (EXAMPLES / name / pictures[0]).stat().st_size < MAX_BYTES


@pytest.mark.parametrize("name", of_this_commit([*GALLERY], 3))
async def test_an_example_trains_as_it_is_although_a_worker_is_killed(
    name: str, a_job: A_Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = told(name)
    if name in MADE_BEFORE:
        script, variable = MADE_BEFORE[name]
        made = str(tmp_path / "made") + (".keras" if variable == "BACKBONE" else "")
        subprocess.run([sys.executable, EXAMPLES / name / script, made], check=True, timeout=100)
        monkeypatch.setenv(variable, made)
    workers = said["workers"]
    epochs = said["epochs"] if GALLERY[name].metric else 2
    # Without minWorkers, the first worker could be done before the second is ready.
    sets = [f"minWorkers={workers}", f"training.batchSize={said['size']}", *said["more"]]
    async with a_job(*sets, workers=workers, epochs=epochs, model=said["model"]) as job:
        members = await job.ring_of(workers)
        if GALLERY[name].metric:  # the others may be done before a heartbeat tells of a step
            await job.stepping()
        job.kill(members[-1])
        summary = await job.end()
    learned = GALLERY[name]
    assert summary["phase"] == "Succeeded", summary
    assert summary["model"] == artifacts.MODEL
    assert (job.output / summary["model"]).exists()
    assert any(len(g["members"]) == workers for g in summary["generations"])
    assert "exactly once" in audit.audit(job.output)
    assert learned.by(summary["metrics"]), summary["metrics"]
