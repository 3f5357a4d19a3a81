# SPDX-License-Identifier: Apache-2.0
"""Run experiments on the GPU machine and print a table of them.

    experiments.py NAME[+NAME...][:SECONDS]...

Experiments joined by `+` run at the same time, each with that time limit (default 60 s): device time is
scarce, and most of them only ask whether something works. A name that ends in _old uses Horovod without patch
14, to compare. The exit status is 1 if an experiment of a different name failed.

With KIT_REHEARSE=1 they run without a GPU: over Gloo, with small models and few faults. What only a GPU can
show is then not checked, and no speed is required.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import jobs
from jobs import HERE, JOBS, OUT, TREE, Job, log

REHEARSAL = bool(os.environ.get("KIT_REHEARSE"))
ELEMENTS = "200000" if REHEARSAL else "25000000"
SLEEP = "0.15" if REHEARSAL else "0"  # seconds of a step
BUILD = "gloo" if REHEARSAL else "nccl14"  # of Horovod, with patch 14
BUILD_OLD = "nccl"  # without patch 14
if REHEARSAL:
    os.environ["MLP_WIDTH"] = "256"
ON_GPU = {"CUDA_VISIBLE_DEVICES": "0"} if REHEARSAL else {}  # a GPU to edl, though not to TensorFlow
TABLE: list[str] = []
failed: list[str] = []

# An action disturbs a job. It returns whether a ring was formed again, and a text for the table.
Action = Callable[[Job], tuple[bool, str]]


def report(name: str, build: str, passed: bool, *cells: object) -> None:
    """Add a row to the table. The old build is there to compare with, so it cannot fail."""
    verdict = "-" if build == BUILD_OLD else "ok" if passed else "FAILED"
    if verdict == "FAILED":
        failed.append(name)
    TABLE.append(" | ".join(map(str, (name, build, verdict, *cells))))
    with open(OUT / "table.txt", "a", encoding="utf-8") as file:  # is complete also when the call is cut off
        file.write(TABLE[-1] + "\n")


def send_signal(job: Job, number: signal.Signals, worker: tuple[int, int], why: str) -> float:
    """Send a signal to a worker, given as (id, pid), and return the time of it."""
    try:
        os.kill(worker[1], number)
        gone = ""
    except ProcessLookupError:
        gone = ", which has ended"
    log(f"   {job.name}: {number.name} to worker {worker[0]}, pid {worker[1]}{gone}: {why}")
    return time.time()


# --- a ring that sums 25 million elements, in a model that counts its records


def counting_job(
    name: str, limit: float, build: str, action: Action, epochs: int = 4, records: int = 4000, **more: str
) -> Job:
    """Disturb a job of three workers, and check its weights when it has ended.

    Args:
        more: further environment variables.
    """
    began, workers = time.time(), 3
    values = {
        "training.epochs": epochs,
        "training.batchSize": 100,
        "export.verify": "false",
        "workers": workers,
        "minWorkers": 2,
        "elastic.heartbeatTimeoutSeconds": 3,
        "elastic.maxFailures": 100,
    }
    variables = {
        "EDL_COUNTING_RECORDS": str(records),
        "EDL_COUNTING_LARGE": ELEMENTS,
        "EDL_COUNTING_SLEEP": SLEEP,
    }
    job = Job(name, "counting_large", values, build, **(variables | more))
    done, text = False, f"never {workers} workers"
    if job.wait_for(rf"ring \d+ -> {workers}", limit * 0.5) is None:
        log(f"   {name}: {text}", job.text()[-500:])
        job.save_stacks("start")
    else:
        time.sleep(3 + random.random())
        try:
            done, text = action(job)
        except Exception as error:  # go on to end the job: its processes would outlive this one
            text = f"failed: {error!r}"[:200]
    code = job.end(max(1.0, limit - (time.time() - began)), lines=5)
    jobs.grep_logs(job.directory, r"NCCL WARN|terminate|what\(\)|still inside|Aborted|InternalError|rror:", 6)
    weights = jobs.weights_error(job.directory / "model.keras", records, epochs)
    ends = jobs.exits(job.directory)
    passed = done and code == 0 and weights == "exact" and not jobs.crashed(ends)
    report(name, build, passed, text, f"exit {code}", weights, f"ends {ends}", f"rings {job.ring_changes()}")
    return job


def disturb(number: signal.Signals, then: float) -> Action:
    """An action that signals rank 1, then waits for the ring of the others and for a new third member.

    Args:
        then: the most seconds that the second wait may take.
    """

    def act(job: Job) -> tuple[bool, str]:
        worker = job.worker_of_rank(1)
        at = send_signal(job, number, worker, "rank 1")
        formed = job.wait_for(r"ring 3 -> [12] in", 20)
        if formed is None:
            job.save_stacks(number.name)
        job.wait_for(r"(?s)ring 3 -> 2.*ring 2 -> 3 in", then)
        if number == signal.SIGSTOP:
            send_signal(job, signal.SIGKILL, worker, "it is stopped")
        if formed is None:
            return False, f"{number.name}: no ring within 20 s"
        return True, f"{number.name}: a ring again after {formed - at:.2f} s"

    return act


def kill_after_order(*delays: float) -> Action:
    """An action that kills a rank `delay` seconds after the order to form a ring of three, for each delay."""

    def act(job: Job) -> tuple[bool, str]:
        done: list[float] = []
        for delay in delays:
            before = job.orders_to_form(3)
            send_signal(job, signal.SIGKILL, job.worker_of_rank(2), "so that a ring is formed again")
            if not job.until_ordered(3, before, 20):
                break
            time.sleep(delay)
            send_signal(job, signal.SIGKILL, job.worker_of_rank(1), f"{delay} s after the order")
            done.append(delay)
            if not job.until_ordered(3, before + 1, 20):
                break
            time.sleep(2)
        return bool(done), f"killed so many s after the order of a ring: {done}"

    return act


def count(path: Path, word: str) -> int:
    return path.read_text(encoding="utf-8", errors="replace").count(word)


def signal_in_init(job: Job) -> tuple[bool, str]:
    """Signal a rank as soon as NCCL's log says that it has begun to make its communicator."""
    done: list[tuple[str, int, float | None]] = []
    for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL, signal.SIGSTOP):
        before = job.orders_to_form(3)
        victim, other = job.worker_of_rank(1), job.worker_of_rank(2)
        path = next(job.directory.rglob(f"worker-{victim[0]}.log"))
        begun = count(path, "Init START")
        send_signal(job, signal.SIGKILL, other, "so that a ring is formed again")
        if not job.until(lambda path=path, n=begun: count(path, "Init START") > n, 10, 0.002):
            break
        at = send_signal(job, number, victim, "it has begun to make its communicator")
        incomplete = count(path, "Init START") - count(path, "Init COMPLETE")
        again = job.wait_for(rf"(?s)worker {victim[0]} is lost.*?ring \d+ -> \d+ in", 15)
        done.append((number.name, incomplete, round(again - at, 2) if again else None))
        if number == signal.SIGSTOP and again:
            send_signal(job, signal.SIGKILL, victim, "it is stopped")
        if not job.until_ordered(3, before, 30):
            break
        time.sleep(2)
    all_again = bool(done) and all(seconds is not None for _, _, seconds in done)
    return all_again, f"(signal, communicators incomplete, seconds to the next ring): {done}"


LOG_INIT = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT"}
KILL, STOP, LEAVE = disturb(signal.SIGKILL, 20), disturb(signal.SIGSTOP, 15), disturb(signal.SIGTERM, 20)


def kill_after_late_order(limit: float) -> None:
    """Do as init_14 with longer delays, and count the communicators that each worker made."""
    job = counting_job("init_b", limit, BUILD, kill_after_order(0.3, 0.4, 0.5), epochs=11, **LOG_INIT)
    for path in sorted(job.directory.rglob("worker-*.log")):
        counts = [f"{word} {count(path, word)}" for word in ("Init START", "Init COMPLETE", "Abort START")]
        log("  ", path.name, *counts)


# --- storms


def storm(name: str, limit: float, build: str, workers: int, faults: int, seed: int, epochs: int = 6) -> None:
    """Run scripts/storm on the large counting model.

    Ranks on a GPU make their communicators after the ring is formed, so faults at that moment come later.
    """
    if REHEARSAL:
        faults, epochs = 3, 2
    directory, output = JOBS / name, JOBS / f"{name}.out"
    shutil.rmtree(directory, ignore_errors=True)
    JOBS.mkdir(parents=True, exist_ok=True)
    options = {
        "workers": workers,
        "faults": faults,
        "model": "counting_large.py",
        "records": 1500,
        "epochs": epochs,
        "seed": seed,
        "forming-seconds": 0.6,
        "keep": directory,
    }
    command = [str(TREE / ".venv/bin/python"), str(TREE / "scripts/storm")]
    for option, value in options.items():
        command += [f"--{option}", str(value)]
    variables = {"EDL_COUNTING_LARGE": ELEMENTS, "TF_CPP_MIN_LOG_LEVEL": "3", "KIT_JOB": str(directory)}
    process = subprocess.Popen(
        command,
        env=jobs.environment(build, **variables),
        stdout=open(output, "w", encoding="utf-8"),
        stderr=subprocess.STDOUT,
        cwd=TREE,
        start_new_session=True,
    )
    code: int | str
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        code = "no end"
        jobs.kill_processes_of(directory)
    lines = output.read_text(errors="replace").strip().splitlines() or [""]
    for line in lines[-16:]:
        log(f"   {name} >", line[:300])
    ends = jobs.exits(directory)
    jobs.grep_logs(directory, r"terminate|what\(\)|still inside|Aborted|Fatal|Segm", 30)
    rounds = [line.strip() for line in lines if re.match(r" *round \d+: ", line)]
    cells = f"{workers} ranks", f"exit {code}", *rounds[-1:], lines[-1][:200], f"ends {ends}"
    report(name, build, code == 0, *cells)


# --- several workers on one GPU, its memory, the zoo

MLP = {"training.epochs": 2, "training.batchSize": 256, "export.verify": "false"}
CARD = (jobs.query_gpu("gpu", "name,memory.total") or [["no GPU", "0"]])[0]  # the first GPU: name, MiB


def shown_gpu(job: Job, workers: int, seconds: float) -> str:
    """Wait until `edl status` shows a GPU for each worker of a ring; return what is wrong, or empty."""
    found: list[dict[str, Any]] = []

    def all_shown() -> bool:
        rows = [row for row in job.status().get("workers", []) if row["rank"] is not None]
        found[:] = [row["gpu"] for row in rows if row["gpu"] or REHEARSAL]
        return len(found) == workers

    if not job.until(all_shown, seconds, 0.5):
        return f"edl status shows no ring of {workers} with a GPU each: {found}"
    log(f"   {job.name}: edl status shows {found}")
    wrong = [g for g in found if g and (g["name"] != CARD[0] or not 0 < g["memory"] <= g["memory_limit"])]
    return f"edl status shows a GPU that is not {CARD}: {wrong}" if wrong else ""


def train(
    name: str, limit: float, model: str, values: dict[str, object], pattern: str = "rror", **more: str
) -> Job:
    """Run a job of two workers to its end, and show the lines of its logs that match."""
    job = Job(name, model, {"workers": 2} | values, BUILD, **more)
    code = job.end(limit)
    jobs.grep_logs(job.directory, pattern)
    took = re.search(r"Succeeded after [\d.]+ s", job.text())
    report(name, BUILD, code == 0, f"exit {code}", took and took[0], f"ends {jobs.exits(job.directory)}")
    return job


def memory(name: str, limit: float, allowed: str, low: float, high: float, workers: int = 2) -> None:
    """Train with a value of `worker.gpuMemory`, and check what `edl status` and the driver show of the GPU.

    Run it by itself: the driver shows the processes of all jobs.

    Args:
        low, high: how many MiB of the GPU the largest process must have.
    """
    values = MLP | {
        "workers": workers,
        "minWorkers": workers,
        "training.epochs": 10000,
        "worker.gpuMemory": allowed,
        "local.gpusPerWorker": 1 / workers,
    }
    job = Job(name, "mlp", values, BUILD, **ON_GPU)
    wrong = shown_gpu(job, workers, limit * 0.8)
    if not wrong:
        job.until(lambda: job.memory or REHEARSAL, 5)
        job.client().stop("its memory is known")
    most = max(map(float, job.memory.values()), default=0.0)
    if not wrong and not REHEARSAL and not low <= most <= high:
        wrong = f"a process had {most:.0f} MiB, expected {low:.0f} to {high:.0f}"
    job.end(max(1.0, limit - (time.time() - job.began)))
    jobs.grep_logs(job.directory, r"OUT_OF_MEMORY|out of memory|Created device|rror")
    charged, ends = job.status().get("failures", "unknown"), jobs.exits(job.directory)
    cells = (
        wrong or "the GPU is in the status",
        f"MiB by pid {job.memory}",
        f"charged: {charged}",
        f"ends {ends}",
    )
    report(name, BUILD, not wrong and charged == [], *cells)


def too_many(limit: float) -> None:
    """Ask for more workers than `local.gpusPerWorker` has places for: `edl run` must refuse the job."""
    values = MLP | {"workers": 3, "local.gpusPerWorker": 0.5}
    job = Job("too_many", "mlp", values, BUILD, CUDA_VISIBLE_DEVICES="0")
    code = job.end(limit)
    refused = "enough for 2 workers, not for workers=3" in job.text()
    report(
        "too_many", BUILD, refused and code not in (0, "no end"), f"exit {code}", job.text()[-200:].strip()
    )


def no_memory(name: str, limit: float, values: dict[str, object], succeeds: bool, **more: str) -> None:
    """Let a worker find too little memory on its GPU: that must be said, and must not be charged.

    Args:
        succeeds: whether the job must end well, with the workers that find memory.
    """
    job = Job(name, "mlp", MLP | values, BUILD, **ON_GPU, **more)
    code = job.end(limit)
    said = re.search(r"the GPU's memory is not enough: [^\n]*", job.text())
    charged, ends = job.status().get("failures", "unknown"), jobs.exits(job.directory)
    passed = charged == [] and code == (0 if succeeds else 1) and not jobs.crashed(ends)
    passed &= said is not None or (REHEARSAL and succeeds)
    report(name, BUILD, passed, f"exit {code}", f"charged: {charged}", said and said[0][:200], f"ends {ends}")


# One worker that may have less than its model needs, and two that each take all that is free.
SMALL_MEMORY = {"workers": 1, "worker.gpuMemory": 200, "elastic.maxFailures": 1}
ALL_MEMORY = {"workers": 2, "minWorkers": 1, "worker.gpuMemory": "all", "elastic.maxFailures": 3}


def digits(limit: float) -> None:
    """Train the zoo's model, which says nothing of XLA, and count the lines of XLA in its logs."""
    job = train("digits", limit, "digits", {"training.epochs": 10}, TF_CPP_MIN_LOG_LEVEL="0")
    found = jobs.grep_logs(job.directory, r"Compiled cluster using XLA|xla_device|ptxas", 3)
    log(f"   digits: {len(found)} lines of XLA")


def half_precision(limit: float) -> None:
    """Train the MLP with mixed_float16."""
    train("half", limit, "mlp", MLP, MLP_PRECISION="mixed_float16")


def duplicate(limit: float) -> None:
    """Let NCCL refuse each ring, since two ranks of one host are on one GPU: the job must fail and say so."""
    values = MLP | {"workers": 2, "minWorkers": 2}
    job = Job("duplicate", "mlp", values, BUILD, NCCL_HOSTID="one-host")
    code = job.end(limit)
    reason = re.search(r"\d+ rings in a row broke before the first step.*", job.text())
    report("duplicate", BUILD, code == 1 and reason is not None, f"exit {code}", reason and reason[0][:300])


# --- speed

# The models of benchmarks/steady.py and their batches, on a GPU and in a rehearsal.
MODELS = {
    "mlp": ("mlp-1m", "64") if REHEARSAL else ("mlp-25m", "1024"),
    "resnet50": ("resnet50", "4") if REHEARSAL else ("resnet50-224", "128"),
    "encoder": ("encoder-1m", "4") if REHEARSAL else ("encoder-87m", "64"),
}
FEW_ROUNDS = ["--rounds", "2"] if REHEARSAL else []
PRECISIONS = {"float32": "float32", "half": "mixed_float16"}


def measure(name: str, limit: float, build: str, *command: str, pattern: str = "", **more: str) -> None:
    """Run a program of Python, and report its last lines, or those that match; it prints none if it fails."""
    variables = {
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "KERAS_BACKEND": "tensorflow",
        "KIT_JOB": str(JOBS / name),
    }
    process = subprocess.Popen(
        [sys.executable, *command],
        env=jobs.environment(build, **(variables | more)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        output, errors = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        jobs.kill_processes_of(JOBS / name)  # also the ranks that it has stopped
        output, errors = process.communicate()
        report(name, build, False, "no end", output[-300:].strip(), errors[-300:].strip())
        return
    lines = output.splitlines()
    for line in [*lines, *errors[-1500:].splitlines()]:
        log("  ", line[:400])
    shown = [line for line in lines if re.match(pattern, line)] if pattern else lines[-3:]
    report(name, build, process.returncode == 0, *(" ".join(line.split())[:200] for line in shown))


def steps(name: str, limit: float, model: str, precision: str, *options: str) -> None:
    """Measure a step of one rank, in turns with `keras.fit`, which must not be faster."""
    size, batch = MODELS[model]
    command = ["-m", "benchmarks.steady_state", size, "fit", "fit-pipeline", "fit-resident", "--batch", batch]
    command += ["--precision", precision, "--goal", "0" if REHEARSAL else "1", *FEW_ROUNDS, *options]
    measure(name, limit, BUILD, *command, pattern="edl|fit|a step|goal")


def ring_steps(limit: float) -> None:
    """Measure a step of two ranks, in turns with plain Horovod, which must not be faster by more than 2 %."""
    size, batch = MODELS["mlp"]
    goal = "0" if REHEARSAL else "0.98"
    command = ["benchmarks.steady_state", size, "plain", "--ranks", "2", "--batch", batch, "--goal", goal]
    measure("ring_steps", limit, BUILD, "-m", *command, *FEW_ROUNDS, pattern="edl|plain|goal")


def profile(name: str, limit: float, model: str) -> None:
    """Trace steps of edl and of `keras.fit`, and report the time of kernels, copies and gaps in one step."""
    size, batch = MODELS[model]
    command = ["-m", "benchmarks.step_profile", size, str(OUT / name), "--batch", batch]
    measure(name, limit, BUILD, *command, pattern="ms a step|kernels|Mem|overlap|gaps")


def sums(name: str, limit: float, build: str) -> None:
    """Measure sums of two ranks by themselves, with communicators that do not block and with ones that do."""
    for blocking in ("0", "1"):
        label = f"{name}, NCCL_COMM_BLOCKING={blocking}"
        measure(label, limit / 2, build, str(HERE / "sums.py"), "2", NCCL_COMM_BLOCKING=blocking)


# --- the longest step while the state is copied

QUIET_SECONDS, SETTLED_STEPS = 5.0, 8


def step_times(marks: Path) -> list[tuple[float, float, int, int]]:
    """Return (end, seconds, generation, ranks in sync) of the steps of a worker of tests/models/large.py."""
    lines = [
        line.split()
        for line in marks.read_text(encoding="utf-8").splitlines(keepends=True)
        if line.endswith("\n")
    ]
    ends = [(float(end), int(generation), int(synced)) for end, generation, synced in lines]
    return [(b[0], b[0] - a[0], b[1], b[2]) for a, b in pairwise(ends)]


def pauses(limit: float) -> None:
    """Compare the longest step while a checkpoint is captured, and while a worker joins, with other steps.

    Both copy the state from the GPU. A join is measured from the first step of the new ring to the eighth
    with the newcomer in sync; before, the newcomer starts on the same GPU, which is shown as `start`.
    """
    marks, kept = JOBS / "pauses-marks", JOBS / "pauses-kept"
    for folder in (marks, kept):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    values = MLP | {
        "workers": 2,
        "maxWorkers": 3,
        "training.epochs": 10000,
        "elastic.heartbeatTimeoutSeconds": 20,
        "checkpoint.dir": kept,
        "checkpoint.seconds": 0,
    }
    variables = {"EDL_BENCH": str(marks), "EDL_LARGE": "1" if REHEARSAL else "25"}
    job = Job("pauses", "large", values, BUILD, **variables)
    windows: dict[str, list[float]] = {}
    wrong = ""
    try:
        wrong = _pauses(job, marks, limit * 0.9, windows)
        job.client().stop("all is measured")
    except Exception as error:  # go on to end the job: its processes would outlive this one
        wrong = f"failed: {error!r}"[:300]
    job.end(max(1.0, limit - (time.time() - job.began)))
    cells = [
        f"{name}: longest step {1e3 * max(found):.1f} ms, median {1e3 * median(found):.1f} ms of {len(found)}"
        for name, found in windows.items()
        if found
    ]
    report("pauses", BUILD, not wrong and len(cells) == 4, wrong, *cells)


def _pauses(job: Job, marks: Path, limit: float, windows: dict[str, list[float]]) -> str:
    """Fill the windows with the seconds of steps; return what is wrong, or empty."""
    if job.wait_for(r"ring \d+ -> 2", limit * 0.5) is None:
        return "never 2 workers"
    path, client = marks / str(job.worker_of_rank(0)[1]), job.client()
    if not job.until(lambda: len(step_times(path)) > SETTLED_STEPS, limit * 0.3):
        return "no steps"
    times = [time.monotonic()]
    time.sleep(QUIET_SECONDS)  # the steps of these seconds are measured
    times.append(time.monotonic())
    before = client.status()["checkpoint"]["step"]
    client.checkpoint()
    if not job.until(lambda: client.status()["checkpoint"]["step"] != before, limit * 0.3, 0.1):
        return "no checkpoint"
    times.append(time.monotonic())
    former = step_times(path)[-1][2]
    client.scale(3)
    if not job.until(lambda: _settled(path, former), limit * 0.4, 0.1):
        return "no third worker in sync"
    found = step_times(path)
    for name, start, stop in zip(("quiet", "checkpoint"), times, times[1:], strict=False):
        windows[name] = [seconds for end, seconds, _, _ in found if start <= end < stop]
    windows["start"] = [s for end, s, generation, _ in found if end >= times[-1] and generation == former]
    windows["join"] = [s for _, s, generation, _ in found if generation > former]
    return ""


def _settled(path: Path, former: int) -> bool:
    """Whether three ranks were in sync for some steps of a ring after that generation."""
    rows = step_times(path)
    return sum(generation > former and synced == 3 for _, _, generation, synced in rows) >= SETTLED_STEPS


EXPERIMENTS: dict[str, Callable[[float], object]] = {
    "kill_14": lambda limit: counting_job("kill_14", limit, BUILD, KILL),
    "kill_old": lambda limit: counting_job("kill_old", limit, BUILD_OLD, KILL),
    "stop_14": lambda limit: counting_job("stop_14", limit, BUILD, STOP),
    "stop_old": lambda limit: counting_job("stop_old", limit, BUILD_OLD, STOP),
    "leave_14": lambda limit: counting_job("leave_14", limit, BUILD, LEAVE),
    "init_14": lambda limit: counting_job("init_14", limit, BUILD, kill_after_order(0.1, 0.2, 0.3), epochs=8),
    "init_b": kill_after_late_order,
    "init_c": lambda limit: counting_job("init_c", limit, BUILD, signal_in_init, epochs=16, **LOG_INIT),
    "storm3": lambda limit: storm("storm3", limit, BUILD, 3, 40, seed=3),
    "storm4": lambda limit: storm("storm4", limit, BUILD, 4, 40, seed=4),
    "storm3b": lambda limit: storm("storm3b", limit, BUILD, 3, 20, seed=31),
    "storm4b": lambda limit: storm("storm4b", limit, BUILD, 4, 20, seed=41),
    "growth": lambda limit: memory("growth", limit, "growth", 300, 0.25 * float(CARD[1])),
    "all": lambda limit: memory("all", limit, "all", 0.6 * float(CARD[1]), float(CARD[1]), workers=1),
    "limit": lambda limit: memory("limit", limit, "4000", 4000, 6000),
    "too_many": too_many,
    "oom": lambda limit: no_memory("oom", limit, SMALL_MEMORY, False, MLP_NO_MEMORY="1" if REHEARSAL else ""),
    "oom_neighbour": lambda limit: no_memory("oom_neighbour", limit, ALL_MEMORY, True),
    "digits": digits,
    "half": half_precision,
    "duplicate": duplicate,
    "ring_steps": ring_steps,
    "pauses": pauses,
    "sums": lambda limit: sums("sums", limit, BUILD),
    "sums_old": lambda limit: sums("sums_old", limit, BUILD_OLD),
}
for model in MODELS:
    EXPERIMENTS[f"profile_{model}"] = lambda limit, m=model: profile(f"profile_{m}", limit, m)
    for short, precision in PRECISIONS.items():
        for suffix, options in {"": (), "_xla": ("--xla",)}.items():
            name = f"steps_{model}_{short}{suffix}"
            EXPERIMENTS[name] = lambda limit, a=(name, model, precision, *options): steps(a[0], limit, *a[1:])


def run(name: str, limit: float) -> None:
    """Run one experiment; an exception in it fails that experiment only."""
    try:
        EXPERIMENTS[name](limit)
    except Exception:
        log(f"   {name}:", traceback.format_exc()[-900:])
        report(name, BUILD, False, "exception, see results.txt")


def main() -> int:
    calls = []
    for word in sys.argv[1:]:
        joined, _, limit = word.partition(":")
        names = joined.split("+")
        if unknown := set(names) - set(EXPERIMENTS):
            sys.exit(f"unknown experiments {sorted(unknown)}, expected some of {sorted(EXPERIMENTS)}")
        calls.append((names, float(limit or 60)))
    OUT.mkdir(exist_ok=True, parents=True)
    JOBS.mkdir(exist_ok=True, parents=True)
    for names, limit in calls:
        log("=====", *names)
        threads = [threading.Thread(target=run, args=(name, limit), daemon=True) for name in names]
        for thread in threads:
            thread.start()
            time.sleep(0.2)
        for thread in threads:
            thread.join(limit + 30)
        for name, thread in zip(names, threads, strict=True):
            if thread.is_alive():
                report(name, BUILD, False, "hangs")
        jobs.save_logs()
    log("===== TABLE")
    for row in TABLE:
        log(row)
    return 1 if failed else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # an experiment that hangs must not hold the call
