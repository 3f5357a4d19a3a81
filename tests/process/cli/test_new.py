# SPDX-License-Identifier: Apache-2.0
"""`edl new`: each file that it writes trains as it is, and finds what there is to find."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import keras
import pytest

from edl.cli.tools.new import Starter
from edl.config import model_check

EDL = str(Path(sys.executable).with_name("edl"))
# The metric of each on the held-out records after two epochs, and how good it is at least.
GOOD = {
    Starter.tabular: ("mae", 0.5, "at most"),
    Starter.images: ("accuracy", 0.6, "at least"),
    Starter.text: ("accuracy", 0.95, "at least"),
    Starter.timeseries: ("mae", 0.25, "at most"),
    Starter.recommender: ("auc", 0.75, "at least"),
}


def written(folder: Path, kind: Starter) -> Path:
    done = subprocess.run(
        [EDL, "new", "mine.py", "--from", kind], cwd=folder, capture_output=True, text=True, check=True
    )
    assert "edl run --workers 3" in done.stdout
    return folder / "mine.py"


@pytest.mark.parametrize("kind", GOOD)
def test_a_file_trains_as_it_is(tmp_path: Path, kind: Starter) -> None:
    file = written(tmp_path, kind)
    assert not model_check.check(file.read_text(), "mine.py")
    assert "SPDX" not in file.read_text()
    module = runpy.run_path(str(file))
    keras.utils.set_random_seed(0)
    model = module["model"]()
    model.fit(*module["data"]("train"), epochs=2, batch_size=64, verbose=0)
    found = model.evaluate(*module["data"]("validation"), batch_size=256, return_dict=True, verbose=0)
    metric, bound, side = GOOD[kind]
    assert found[metric] <= bound if side == "at most" else found[metric] >= bound, found


def test_the_loop_trains_as_it_is(tmp_path: Path) -> None:
    file = written(tmp_path, Starter.custom_loop)
    done = subprocess.run([sys.executable, file], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "model.keras").is_file()


def test_a_file_that_exists_stays(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("mine")
    done = subprocess.run([EDL, "new", "mine.py"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "edl: mine.py: already exists; nothing was written\n")
    assert (tmp_path / "mine.py").read_text() == "mine"
    done = subprocess.run([EDL, "new", "mine"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert "such as mine.py" in done.stderr
