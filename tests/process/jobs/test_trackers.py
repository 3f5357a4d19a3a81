# SPDX-License-Identifier: Apache-2.0
"""The Keras callbacks of W&B and MLflow, offline, in a real job, as docs/callbacks.md shows them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edl.contract import artifacts
from tests.support.jobs.commands import ROOT, edl

pytestmark = pytest.mark.process
EPOCHS = 4
JOB = '''
import os, signal, threading, time
from pathlib import Path
import numpy as np
import edl

class Dies(keras.callbacks.Callback):
    """Kills two workers that call callbacks: after one has logged an epoch, and in the middle of one."""

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 0 and self.is_first("logged"):
            os.kill(os.getpid(), signal.SIGKILL)

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2 and self.is_first("training"):
            threading.Thread(target=self.die, args=[self.steps() + 2], daemon=True).start()

    def is_first(self, name):
        first = not Path(f"killed.{name}").exists()
        Path(f"killed.{name}").touch()
        return first

    def steps(self):
        return int(self.model.optimizer.iterations.numpy())

    def die(self, step):
        while self.steps() < step:  # until then, the other worker may not have applied the update
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)

def callbacks():
    return [Mlflow(), WeightsAndBiases(), Dies()]

def data(split):
    x = np.random.default_rng(len(split)).random((2048, 4), np.float32)
    return edl.arrays(x, x.sum(1))

def model():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    return model
'''
READ = '''
import json, struct, sys
from pathlib import Path
import mlflow
from wandb.proto.wandb_internal_pb2 import Record

def rows(log):
    """The rows of an offline run: a log of LevelDB, in blocks of 32 KiB, with a header of 7 bytes."""
    at, record = 7, b""
    while at + 7 <= len(log):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        size, kind = struct.unpack_from("<HB", log, at + 4)
        record += log[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or its last fragment
            items = Record.FromString(record).history.item
            if items:
                yield {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
            record = b""

newest = max(Path("wandb").glob("offline-run-*"), key=lambda run: run.stat().st_mtime)
client, run = mlflow.MlflowClient(), sys.argv[1]
names = ["loss", "mae", "val_loss", "val_mae"]
print(json.dumps({
    "mlflow": {name: [[p.step, p.value] for p in client.get_metric_history(run, name)] for name in names},
    "status": client.get_run(run).info.status,
    "wandb": list(rows(next(newest.glob("*.wandb")).read_bytes())),
    "wandb_run": newest.name.rpartition("-")[2],
}))
'''


def program(*arguments: str) -> Any:
    """Run Python, and parse the JSON that it prints."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_each_epoch_is_logged_once_though_workers_that_log_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = (ROOT / "docs/callbacks.md").read_text().partition("## Experiment trackers")[2]
    shown = re.findall(r"```python\n(.*?)```", section.partition("\n## ")[0], re.DOTALL)
    (tmp_path / "tracked.py").write_text("\n".join(shown) + JOB)
    monkeypatch.chdir(tmp_path)
    environment = {
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "MLFLOW_TRACKING_URI": (tmp_path / "mlruns").as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",  # the newer kind of store needs the whole package
        "WANDB_MODE": "offline",
        "WANDB_RUN_ID": "tracked",
        "WANDB_RESUME": "allow",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    run = program("-m", "mlflow", "runs", "create", "--experiment-id", "0")["run_id"]
    monkeypatch.setenv("MLFLOW_RUN_ID", run)
    values = f"workers=3,training.epochs={EPOCHS},export.verify=false"
    done = edl("run", "tracked.py", "--set", values, "--output", "job", env=dict(os.environ))
    assert done.returncode == 0, done.stdout + done.stderr
    assert len([*tmp_path.glob("killed.*")]) == 2 and "SIGKILL" in done.stdout
    history = json.loads((tmp_path / "job" / artifacts.HISTORY).read_text())
    (tmp_path / "read.py").write_text(READ)
    found = program("read.py", run)
    for name, points in found["mlflow"].items():
        assert points == [[epoch, value] for epoch, value in enumerate(history[name])], name
    assert (found["status"], found["wandb_run"]) == ("FINISHED", "tracked")
    assert [row["epoch/epoch"] for row in found["wandb"]] == list(range(EPOCHS))
    for name, values_of_epochs in history.items():
        assert [row[f"epoch/{name}"] for row in found["wandb"]] == values_of_epochs, name
    assert "epoch/learning_rate" in found["wandb"][-1]
