# SPDX-License-Identifier: Apache-2.0
"""The examples that follow keras.io, against Keras. tests/process/jobs/test_gallery.py trains them all."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from edl.contract import artifacts
from examples.distillation import distillation
from examples.transformer import transformer
from tests.process.keras.rings import Case, assert_same

EDL = str(Path(sys.executable).with_name("edl"))
SETS = "workers=2,minWorkers=2,local.threads=1"
STEPS = "training.epochs=2,training.batchSize=16"
SECONDS = 170


def test_statistics_of_the_whole_ring_in_steps_that_run_eagerly(tmp_path: Path) -> None:
    """Ranks that are threads cannot have this: a waiting thread holds Keras' patches."""
    script, directory = Path(__file__).with_name("eager_statistics.py"), tmp_path / "job"
    command = [EDL, "run", str(script), "--set", SETS, "--set", STEPS, "--output", str(directory)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    summary = json.loads((directory / artifacts.SUMMARY).read_text())
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


def test_no_example_is_evaluated_on_the_records_that_it_trains_on() -> None:
    def features(records: Any) -> set[bytes]:
        found = records.read(0, len(records)) if hasattr(records, "read") else records
        columns = [np.ascontiguousarray(column) for column in keras.tree.flatten(found[0])]
        return {b"".join(column[n].tobytes() for column in columns) for n in range(len(columns[0]))}

    examples = Path(__file__).parents[3] / "examples"
    names = {path.stem for path in examples.glob("*/*.py") if path.stem == path.parent.name}
    shared = {}
    for name in sorted(names - {"image_folder"}):  # which needs a folder, and uses edl.split
        module = importlib.import_module(f"examples.{name}.{name}")
        if (held_out := module.data("validation")) is not None:
            evaluated = features(held_out)
            shared[name] = len(evaluated & features(module.data("train"))) / len(evaluated)
    assert len(shared) >= 6
    assert {name: share for name, share in shared.items() if share > 0.05} == {}
