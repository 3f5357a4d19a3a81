# SPDX-License-Identifier: Apache-2.0
"""`scripts/bench loop_memory`: the memory and the start of an own loop's worker, beside the script alone.

The same file runs three times by itself, without edl, and in jobs of three workers. RSS counts pages that
processes share in each of them; PSS divides them among the processes that map them. `whole` is the PSS of all
workers and of their fork server, by the number of workers: what a worker takes of the machine.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.environments import folders
from benchmarks.jobs import OurJob
from benchmarks.recorder import Recorder

WORKERS, STEPS = 3, 50
LIBRARIES = {
    "numpy": """
w = np.zeros(64, np.float32)
state = [w]
def gradients(x, y):
    return [x.T @ (x @ w - y) / len(x)]
def apply(mean):
    w[...] -= 0.01 * mean[0]
""",
    "torch": """
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
adam = torch.optim.Adam(model.parameters())
state = [model, adam]
def gradients(x, y):
    adam.zero_grad()
    torch.nn.functional.mse_loss(model(torch.as_tensor(x))[:, 0], torch.as_tensor(y)).backward()
    return model
def apply(mean):
    adam.step()
""",
    "jax": """
w = jax.numpy.zeros([64])
held = types.SimpleNamespace(w=w) if ALONE else edl.State(w=w)
state = [held]
@jax.jit
def of(w, x, y, real):
    return jax.grad(lambda w: ((x @ w - y) ** 2 * real).sum() / real.sum())(w)
def gradients(x, y):
    return [of(held.w, np.resize(x, [192, 64]), np.resize(y, [192]), np.arange(192) < len(x))]
def apply(mean):
    held.w = held.w - 0.01 * mean[0]
""",
}
SCRIPT = """
import numpy as np
import {library}
import os, sys, time, types
print("imported", time.monotonic(), flush=True)
ALONE = "BENCH_ALONE" in os.environ
if not ALONE:
    import edl
x = np.random.default_rng(0).normal(size=(19200, 64)).astype("float32")
y = x.sum(1)
{model}
for i in range({steps} * ALONE):
    apply(gradients(x[i * 64 : (i + 1) * 64], y[i * 64 : (i + 1) * 64]))
    if i == 3:
        print("trained", time.monotonic(), flush=True)
if ALONE:
    print("ready", 0, flush=True)
    sys.exit(bool(sys.stdin.readline()))
for step in edl.join(data=(x, y), state=state).steps():
    time.sleep(0.01)
    if (mean := step.mean(gradients(*step.records))) is not None:
        apply(mean)
"""


def main() -> int:
    """Measure and print each library, alone and in a job; returns the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/bench loop_memory", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=LIBRARIES, default=[*LIBRARIES], metavar="LIBRARY")
    parser.add_argument("--record", default="", metavar="NAME", help="write the values to records/DATE-NAME")
    given = parser.parse_args()
    recorder, rows = Recorder(given.record), []
    os.environ["PYTHONPATH"] = os.pathsep.join([*folders("frameworks"), os.environ.get("PYTHONPATH", "")])
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    for name in given.only:
        with tempfile.TemporaryDirectory() as directory:
            script = Path(directory) / "train.py"
            script.write_text(SCRIPT.format(library=name, model=LIBRARIES[name], steps=STEPS))
            base = alone(script)
            for how in ("alone", "fork", "spawn"):
                row = base if how == "alone" else job(script, how)
                rows.append({"library": name, "start": how, **row})
                ratios = (f"{key} {value:.2f} ({value / base[key]:.2f})" for key, value in row.items())
                print(f"{name} {how}: {', '.join(ratios)}", flush=True)
    recorder.write({"rows": rows})
    return 0


def alone(script: Path) -> dict[str, float]:
    """The script without edl: its start by itself, and the memory of three processes."""
    began, process = time.monotonic(), started(script)
    starts = {"import": said(process, "imported") - began, "start": said(process, "trained") - began}
    process.communicate()
    processes = [started(script) for _ in range(WORKERS)]
    for process in processes:
        said(process, "ready")
    found = [memory(process.pid) for process in processes]
    for process in processes:
        process.communicate()
    return means(found, found) | starts


def started(script: Path) -> subprocess.Popen[str]:
    """Start the script without edl."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, script], env={**os.environ, "BENCH_ALONE": "1"}, **pipes)


def said(process: subprocess.Popen[str], word: str) -> float:
    """The number after the word that the script prints."""
    assert process.stdout is not None
    return next(float(line.split()[1]) for line in process.stdout if line.startswith(word))


def job(script: Path, method: str) -> dict[str, float]:
    """A job of the script: its memory, and the start of three replacements until they are ready."""
    sets = (f"model.script={script}", "training.batchSize=192", "minWorkers=1")
    with OurJob(script.parent, WORKERS, *sets, start=method) as running:
        journal, ring = running.journal, running.journal.ring(WORKERS, seconds=120)
        goal = running.client.status()["step"] + STEPS
        next(status for status in running.client.follow(60) if status["step"] >= goal)
        found = [memory(running.pid(worker)) for worker in ring.members]
        children = psutil.Process(running.master.pid).children()
        servers = [memory(p.pid) for p in children if "edl.trainer.forkserver" in p.cmdline()]
        imports, starts = [], []
        for _ in range(3):
            os.kill(running.pid(ring.members[-1]), signal.SIGKILL)
            ring = journal.ring(WORKERS, after=ring.generation)
            seen, new = journal.first("Seen", max(ring.members)), max(ring.members)
            log = (running.output / "logs" / f"worker-{new}.log").read_text()
            imports.append(float(log.partition("imported ")[2].split()[0]) - seen)
            starts.append(journal.first("Ready", new) - seen)
    medians = {"import": statistics.median(imports), "start": statistics.median(starts)}
    return means(found, [*found, *servers]) | medians


def memory(pid: int) -> dict[str, float]:
    """Resident and proportional memory of a process in MiB."""
    lines = (line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    found = {name: int(kib) / 1024 for name, kib, _ in lines}
    return {"rss": found["Rss:"], "pss": found["Pss:"]}


def means(workers: list[dict[str, float]], processes: list[dict[str, float]]) -> dict[str, float]:
    """The mean memory of the workers, and that of all processes by the number of workers."""
    of_each = {key: statistics.mean(worker[key] for worker in workers) for key in workers[0]}
    return of_each | {"whole": sum(process["pss"] for process in processes) / WORKERS}


if __name__ == "__main__":
    sys.exit(main())
