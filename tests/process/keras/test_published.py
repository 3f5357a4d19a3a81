# SPDX-License-Identifier: Apache-2.0
"""The examples, which follow keras.io: each survives a kill, and Keras agrees where nothing is drawn."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import keras
import pytest

from edl.contract import artifacts
from examples.distillation import distillation
from examples.transformer import transformer
from tests.process.keras.rings import Case, assert_same

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*/*.py"))
EDL = str(Path(sys.executable).with_name("edl"))
SETS = "workers=2,minWorkers=2,local.threads=1"
EPOCHS = 40  # of 3 steps, so that a worker can be killed between the first and the last
SECONDS = 170
AT_ONCE = 2  # jobs: starting up is most of their time, and does not use two cores

Told = subprocess.CompletedProcess[str]


def run(example: Path, directory: Path, epochs: int = EPOCHS, kill: bool = True) -> Told:
    """Train an example, and kill worker 1 as soon as it is in the ring."""
    steps = f"training.epochs={epochs},training.batchSize=16"
    command = [EDL, "run", str(example), "--set", SETS, "--set", steps, "--output", str(directory)]
    lines: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        limit = threading.Timer(SECONDS, process.kill)
        limit.start()
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if kill and "-> 2" in line:
                kill = False
                os.kill(worker(1, directory), signal.SIGKILL)
        limit.cancel()
    return Told(command, process.returncode, "".join(lines))


def worker(number: int, directory: Path) -> int:
    """The process id of a worker, from the journal."""
    with open(directory / artifacts.JOURNAL) as journal:
        events = [json.loads(line)["event"] for line in journal if '"Seen"' in line]
    return next(int(event["handle"]) for event in events if event["worker"] == number)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Path, Future[Told]]]]:
    """All of them, at work."""
    root = tmp_path_factory.mktemp("published")
    with ThreadPoolExecutor(AT_ONCE) as threads:
        yield {e.stem: (root / e.stem, threads.submit(run, e, root / e.stem)) for e in EXAMPLES}


@pytest.mark.parametrize("name", [example.stem for example in EXAMPLES])
def test_a_published_example_trains_though_a_worker_is_killed(
    name: str, jobs: dict[str, tuple[Path, Future[Told]]]
) -> None:
    output, job = jobs[name]
    ended = job.result(SECONDS)
    summary = json.loads((output / artifacts.SUMMARY).read_text())
    assert summary["records"]["applied"] == 48 * EPOCHS, ended.stdout
    assert summary["failures"] == []
    first, *_, last = ({*generation["members"]} for generation in summary["generations"])
    assert (first, last) == ({0, 1}, {0, 2}), "worker 2 took the place of the killed worker 1"
    # Keras cannot save a model that is made of models, as long as its class has no get_config().
    whole = name not in ("dcgan", "distillation", "vae")
    assert ended.returncode == (0 if whole else 1)
    assert (output / summary["model"]).exists()
    assert (summary["model"] == artifacts.MODEL) == whole
    mixes = "mixes the records of a batch" in ended.stdout
    assert mixes == (name == "contrastive")


def test_statistics_of_the_whole_ring_in_steps_that_run_eagerly(tmp_path: Path) -> None:
    """Ranks that are threads cannot have this: a waiting thread holds Keras' patches."""
    ended = run(Path(__file__).with_name("eager_statistics.py"), tmp_path / "job", epochs=2, kill=False)
    assert ended.returncode == 0, ended.stdout
    summary = json.loads((tmp_path / "job" / artifacts.SUMMARY).read_text())
    assert summary["records"]["applied"] == 96
    assert any(len(g["members"]) == 2 for g in summary["generations"])
    assert len(set(summary["digests"].values())) == 1


def seeded(build: Callable[..., keras.Model], **options: Any) -> Callable[[], keras.Model]:
    def made() -> keras.Model:
        keras.utils.set_random_seed(3)
        return build(**options)

    return made


def first(arrays: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: (*(a[:30] for a in arrays()), None)


CASES = {
    "distillation": Case(seeded(distillation.model), first(distillation.arrays)),
    "text classification by a transformer": Case(
        seeded(transformer.model, rate=0.0), first(transformer.arrays)
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_draws_nothing_has_the_weights_of_keras(name: str) -> None:
    assert_same(CASES[name])
