# SPDX-License-Identifier: Apache-2.0
"""`edl.fit`: jobs from a notebook or a script."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import edl

PAGE = Path(__file__).parents[3] / "docs" / "coming-from-fit.md"
KERNEL = {
    "TERM": "xterm-color",
    "CLICOLOR": "1",
    "FORCE_COLOR": "1",
    "CLICOLOR_FORCE": "1",
}  # set by ipykernel
LONG = """
import edl

def model():
    import keras
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse")
    return model

def data(split):
    import numpy as np
    return np.zeros((1000, 1), "float32"), np.zeros(1000, "float32")

edl.fit(model, data, workers=1, epochs=100_000, output="job")
"""


def test_the_page_trains_as_it_stands_there(tmp_path: Path) -> None:
    (program,) = re.findall(
        r"```python\n(.*?)```", PAGE.read_text().partition("## Notebooks and scripts")[2], re.DOTALL
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, **KERNEL},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not re.findall(r"\x1b\[[0-9;?]*[A-Za-ln-z]", done.stdout), "a notebook has colours, and no cursor"
    assert len(done.stdout.splitlines()) < 50, "one line for each change"
    history, *predicted, output = done.stdout.splitlines()[-5:]
    assert "Succeeded after" in done.stdout
    errors = json.loads(history)
    assert len(errors) == 5
    assert errors[-1] < errors[0]
    assert len(predicted) == 3
    assert (tmp_path / output / "model.keras").is_file()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_job_ends_with_the_cell_or_the_kernel(tmp_path: Path, number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LONG], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as kernel:
        assert kernel.stdout is not None
        assert kernel.stderr is not None
        for line in kernel.stdout:
            if "] epoch " in line:
                break
        job = psutil.Process(kernel.pid).children(recursive=True)
        kernel.send_signal(number)
        reading = threading.Thread(target=kernel.stdout.read)
        reading.start()
        gone, alive = psutil.wait_procs(job, timeout=60)
        assert not alive, alive
        assert len(gone) >= 3  # edl run, the master, the worker
        reading.join(60)
        told = kernel.stderr.read()
    if number == signal.SIGINT:
        assert told.rstrip().endswith("KeyboardInterrupt")
    summary = json.loads((tmp_path / "job" / "summary.json").read_text())
    assert summary["phase"] == "Stopped"


def test_what_cannot_be_run_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lock = threading.Lock()

    def model() -> Any:
        raise AssertionError

    def locked() -> Any:
        return lock

    class Model:
        def __call__(self) -> None: ...

        def get_config(self) -> None: ...

    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "events.jsonl").touch()
    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: edl.fit(Model(), ()), "model is a Model, and must be a function that returns a compiled"),
        (lambda: edl.fit(model, (), feeds=model), "unknown argument 'feeds'"),
        (lambda: edl.fit(model, locked), "cannot be sent to the workers: cannot pickle"),
        (lambda: edl.fit(model, (), output="taken"), "taken already holds a job"),
        (lambda: edl.fit(model, (), values={"training.epoch": 1}, output="new"), "training.epoch"),
    ]
    for call, words in refused:
        with pytest.raises(edl.EdlError, match=re.escape(words)):
            call()
    assert not [path for path in (tmp_path / "new").iterdir() if path.name == "events.jsonl"]
    assert os.listdir(tmp_path / "taken") == ["events.jsonl"]
