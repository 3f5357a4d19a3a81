# SPDX-License-Identifier: Apache-2.0
"""The examples, which follow keras.io: `edl run` trains each, and Keras agrees where nothing is drawn."""

from __future__ import annotations

import json
import subprocess
import sys
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
STEPS = "training.epochs=2,training.batchSize=16"
SECONDS = 170
AT_ONCE = 2  # jobs: starting up is most of their time, and does not use two cores

Told = subprocess.CompletedProcess[str]


def run(example: Path, directory: Path) -> Told:
    command = [EDL, "run", str(example), "--set", SETS, "--set", STEPS, "--output", str(directory)]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Path, Future[Told]]]]:
    """All of them, at work."""
    root = tmp_path_factory.mktemp("published")
    with ThreadPoolExecutor(AT_ONCE) as threads:
        yield {e.stem: (root / e.stem, threads.submit(run, e, root / e.stem)) for e in EXAMPLES}


@pytest.mark.parametrize("name", [example.stem for example in EXAMPLES])
def test_a_published_example_trains_by_the_command_as_it_is(
    name: str, jobs: dict[str, tuple[Path, Future[Told]]]
) -> None:
    output, job = jobs[name]
    ended = job.result(SECONDS)
    summary = json.loads((output / artifacts.SUMMARY).read_text())
    assert summary["records"]["applied"] == 96, ended.stdout + ended.stderr
    assert summary["failures"] == []
    # Keras cannot save a model that is made of models, as long as its class has no get_config().
    whole = name not in ("dcgan", "distillation", "vae")
    assert ended.returncode == (0 if whole else 1)
    assert (output / summary["model"]).exists()
    assert (summary["model"] == artifacts.MODEL) == whole
    mixes = "mixes the records of a batch" in ended.stdout + ended.stderr
    assert mixes == (name == "contrastive")


def test_statistics_of_the_whole_ring_in_steps_that_run_eagerly(tmp_path: Path) -> None:
    """Ranks that are threads cannot have this: a waiting thread holds Keras' patches."""
    ended = run(Path(__file__).with_name("eager_statistics.py"), tmp_path / "job")
    assert ended.returncode == 0, ended.stdout + ended.stderr
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
