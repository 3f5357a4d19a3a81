# SPDX-License-Identifier: Apache-2.0
"""Run experiments on the GPU machine and print a table of them.

    experiments.py NAME[+NAME...][:SECONDS]...

Experiments joined by `+` run at the same time, each with that time limit (default 60 s): device time is
scarce, and most of them only ask whether something works. A name that ends in _old uses Horovod without patch
14, to compare. The exit status is 1 if an experiment of another name failed.
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
from pathlib import Path

import jobs
from jobs import HERE, JOBS, OUT, TREE, Job, log

ELEMENTS = os.environ.get("EDL_COUNTING_LARGE", "25000000")
BUILD, BUILD_OLD = "nccl14", "nccl"  # of Horovod, with and without patch 14
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
        "EDL_COUNTING_SLEEP": os.environ.get("EDL_COUNTING_SLEEP", "0"),
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


# --- several workers on one GPU, the zoo, speed


def train(
    name: str, limit: float, model: str, values: dict[str, object], pattern: str = "rror", **more: str
) -> Job:
    """Run a job of two workers to its end, and show the lines of its logs that match."""
    job = Job(name, model, {"workers": 2} | values, BUILD, **more)
    code = job.end(limit)
    jobs.grep_logs(job.directory, pattern)
    took = re.search(r"Succeeded after [\d.]+ s", job.text())
    memory = f"MiB by pid {job.memory}"
    report(
        name, BUILD, code == 0, f"exit {code}", took and took[0], memory, f"ends {jobs.exits(job.directory)}"
    )
    return job


MLP = {"training.epochs": 2, "training.batchSize": 256, "export.verify": "false"}


def two_on_one_gpu(limit: float) -> None:
    """Start two workers on one GPU with default settings."""
    train("grow", limit, "mlp", MLP, r"OUT_OF_MEMORY|out of memory|Created device|rror")


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


def measure(name: str, limit: float, build: str, script: str, *arguments: str, **more: str) -> None:
    """Run a script of this folder and report its last lines; it prints nothing if it fails."""
    command = [sys.executable, str(HERE / script), *arguments]
    variables = {
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "KERAS_BACKEND": "tensorflow",
    }
    environment = jobs.environment(build, **(variables | more))
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired as error:
        report(name, build, False, "no end", (error.stdout or b"")[-400:])
        return
    lines = done.stdout.splitlines()
    for line in [*lines, *done.stderr[-500:].splitlines()]:
        log("  ", line[:400])
    report(name, build, done.returncode == 0, *(line[:200] for line in lines[-3:]))


def steps(name: str, limit: float, precision: str) -> None:
    """Measure a step of an MLP of 24 million parameters, in turns with `keras.fit`."""
    measure(name, limit, BUILD, "steps.py", precision, "6", "30")


def sums(name: str, limit: float, build: str) -> None:
    """Measure sums of two ranks by themselves, with communicators that do not block and with ones that do."""
    for blocking in ("0", "1"):
        label = f"{name}, NCCL_COMM_BLOCKING={blocking}"
        measure(label, limit / 2, build, "sums.py", "2", NCCL_COMM_BLOCKING=blocking)


EXPERIMENTS: dict[str, Callable[[float], object]] = {
    "kill_14": lambda limit: counting_job("kill_14", limit, BUILD, KILL),
    "kill_old": lambda limit: counting_job("kill_old", limit, BUILD_OLD, KILL),
    "kill_gloo": lambda limit: counting_job("kill_gloo", limit, "gloo", KILL),
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
    "storm_gloo": lambda limit: storm("storm_gloo", limit, "gloo", 3, 3, seed=1, epochs=2),
    "grow": two_on_one_gpu,
    "digits": digits,
    "half": half_precision,
    "duplicate": duplicate,
    "steps_float32": lambda limit: steps("steps_float32", limit, "float32"),
    "steps_half": lambda limit: steps("steps_half", limit, "mixed_float16"),
    "sums": lambda limit: sums("sums", limit, BUILD),
    "sums_old": lambda limit: sums("sums_old", limit, BUILD_OLD),
    "sums_gloo": lambda limit: sums("sums_gloo", limit, "gloo"),
}


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
