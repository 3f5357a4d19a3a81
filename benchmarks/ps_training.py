# SPDX-License-Identifier: Apache-2.0
"""Training with rows on servers: DeepFM on a synthetic click log, samples a second, and the AUC it has.

    fit       1 worker and 1 server, against keras.fit in one process with ordinary variables
    redis     the same against rows in Redis, with the optimizer in the worker (benchmarks/redis_rows.py)
    ring      hybrid against the same model in the ring, with 1, 2 and 4 workers
    servers   2 servers against 1, with 2 workers
    quality   AUC with workers that come and go, against fixed ones: 3 seeds each

A round measures both sides one after the other, on the same machine, with the same records in memory. All
take whatever cores there are: on few of them, more workers are no faster. These are rows of
`scripts/bench ps`; `python -m benchmarks.ps_training` measures nothing else.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from benchmarks import report
from benchmarks.report import Row, say
from edl.config import values
from edl.contract import artifacts
from edl.errors import EdlError
from edl.net.master_client import Client

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("fit", "redis", "ring", "servers", "quality")
BATCH = 1024
WARM_STEPS, SECONDS = 30, 8.0  # before a measurement, and of one
WORKERS = (1, 2, 4)
SEEDS = (1, 2, 3)
LIMIT_SECONDS = 300.0
SIZES = {"EDL_CLICKS_RECORDS": "200000", "EDL_CLICKS_IDS": "200000", "EDL_CLICKS_BUCKETS": str(1 << 18)}
# Of the quality: long enough that a worker comes, and one goes, while there is something to train.
QUALITY = {"EDL_CLICKS_RECORDS": "150000", "EDL_CLICKS_IDS": "20000", "EDL_CLICKS_BUCKETS": "0"}
QUALITY_BATCH = 128


class Training:
    """A job under measurement, ended when the `with` is left."""

    def __init__(self, directory: Path, module: str, sizes: dict[str, str], *sets: str):
        self.output = directory / f"job-{time.monotonic_ns()}"
        self.stamps = self.output / "stamps"
        self.stamps.mkdir(parents=True)
        merged = values.load(
            [],
            [
                f"model.module={module}",
                "elastic.maxFailures=1000",
                "export.verify=false",
                "evaluation.epochs=0",
                *sets,
            ],
        )
        (self.output / "values.json").write_text(json.dumps(merged))
        environment = {
            **os.environ,
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "EDL_BENCH_STAMPS": str(self.stamps),
            **sizes,
        }
        self._log = open(self.output / "master.log", "wb")
        self.master = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "edl.master",
                "--values",
                str(self.output / "values.json"),
                "--output",
                str(self.output),
            ],
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            cwd=ROOT,
            start_new_session=True,
        )
        assert self.master.stdout is not None
        self.master.stdout.readline()
        self.client = Client(artifacts.read_contact(self.output))

    def until_step(self, step: int, workers: int = 0) -> dict[str, Any]:
        """The status as soon as the ring is at that step, and has so many workers.

        Raises:
            EdlError: the job has ended, or it takes too long.
        """
        deadline = time.monotonic() + LIMIT_SECONDS
        while time.monotonic() < deadline:
            if self.master.poll() is not None:
                break
            status = self.client.status()
            if (status["step"] or 0) >= step and len(in_ring(status)) >= workers:
                return status
            time.sleep(0.1)
        raise EdlError(f"the job is not at step {step} with {workers} workers; see {self.output}")

    def samples_a_second(self, workers: int) -> float:
        self.until_step(WARM_STEPS, workers)
        began = time.monotonic()
        time.sleep(SECONDS)
        ended = time.monotonic()
        lines = [
            line.split()
            for file in self.stamps.iterdir()
            for line in file.read_text().splitlines(True)
            if line.endswith("\n")
        ]
        return sum(int(n) for at, n in lines if began <= float(at) < ended) / (ended - began)

    def summary(self) -> dict[str, Any]:
        """When it has ended by itself.

        Raises:
            EdlError: it did not succeed.
        """
        self.master.wait(LIMIT_SECONDS)
        found: dict[str, Any] = json.loads((self.output / artifacts.SUMMARY).read_text())
        if found["phase"] != "Succeeded":
            raise EdlError(f"{found['phase']}: {found['reason']} {found['traceback']}; see {self.output}")
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.master.terminate()
        try:
            self.master.wait(30)
        except subprocess.TimeoutExpired:
            self.master.kill()
            self.master.wait()
        self._log.close()


def in_ring(status: dict[str, Any]) -> list[dict[str, Any]]:
    return [worker for worker in status["workers"] if worker["rank"] is not None]


def hybrid(servers: int, mode: str = "hybrid") -> tuple[str, ...]:
    return f"mode={mode}", f"ps.servers={servers}"


def rate(directory: Path, workers: int, *sets: str) -> float:
    """Samples a second of a ring of so many workers."""
    module = str(ROOT / "benchmarks/timed_deepfm.py")
    with Training(
        directory,
        module,
        SIZES,
        f"workers={workers}",
        f"training.batchSize={BATCH}",
        "training.epochs=100000",
        *(sets or ("mode=train",)),
    ) as job:
        found = job.samples_a_second(workers)
    say(f"{workers} workers, {' '.join(sets) or 'ring'}: {found:,.0f} samples/s")
    return found


def fit_rate() -> float:
    """Samples a second of keras.fit, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.ps_training", "keras-fit"],
        stdout=subprocess.PIPE,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **SIZES},
        cwd=ROOT,
        text=True,
        check=True,
    )
    found = float(done.stdout.split()[-1])
    say(f"keras.fit: {found:,.0f} samples/s")
    return found


def redis_rate(directory: Path) -> float:
    """Samples a second of one process with its rows in Redis."""
    path = directory / "redis"
    with started_redis(path):
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.redis_rows", str(path)],
            stdout=subprocess.PIPE,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **SIZES},
            cwd=ROOT,
            text=True,
            check=True,
        )
    found = float(done.stdout.split()[-1])
    say(f"rows in Redis: {found:,.0f} samples/s")
    return found


@contextlib.contextmanager
def started_redis(path: Path) -> Iterator[int]:
    """A redis-server without any persistence that listens on this socket; its process."""
    program = (
        os.environ.get("REDIS_SERVER")
        or subprocess.run(
            [ROOT / "scripts/dev/bench-redis"], check=True, stdout=subprocess.PIPE, text=True
        ).stdout.strip()
    )
    server = subprocess.Popen(
        [program, "--port", "0", "--unixsocket", path, "--save", "", "--appendonly", "no"],
        stdout=subprocess.DEVNULL,
    )
    try:
        until = time.monotonic() + LIMIT_SECONDS
        while not path.exists():
            if server.poll() is not None or time.monotonic() > until:
                raise EdlError(f"{program} does not listen on {path}")
            time.sleep(0.01)
        yield server.pid
    finally:
        server.kill()
        server.wait()
        path.unlink(missing_ok=True)


def keras_fit() -> None:
    """Train until it has been measured, and print samples a second."""
    import keras

    from benchmarks import timed_deepfm

    class Clock(keras.callbacks.Callback):
        steps, began = 0, 0.0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.steps += 1
            if self.steps == WARM_STEPS:
                self.began = time.monotonic()
            elif self.steps > WARM_STEPS and time.monotonic() - self.began > SECONDS:
                seconds = time.monotonic() - self.began
                print((self.steps - WARM_STEPS) * BATCH / seconds, flush=True)
                self.model.stop_training = True

    numbers, ids, clicked = timed_deepfm.drawn("train")
    whole = len(ids) // BATCH * BATCH
    model = timed_deepfm.model()
    model.fit(
        {"numbers": numbers[:whole], "ids": ids[:whole]},
        clicked[:whole],
        batch_size=BATCH,
        epochs=100_000,
        verbose=0,
        callbacks=[Clock()],
    )


def auc(directory: Path, seed: int, disturbed: bool, mode: str) -> float:
    """Of the held-out records, after a training."""
    records = int(QUALITY["EDL_CLICKS_RECORDS"])
    steps = records // QUALITY_BATCH
    with Training(
        directory,
        "deepfm",
        QUALITY,
        "workers=2",
        f"training.batchSize={QUALITY_BATCH}",
        "training.epochs=1",
        f"training.seed={seed}",
        *hybrid(2, mode),
    ) as job:
        if disturbed:
            job.until_step(steps // 8, 2)
            job.client.scale(3)
            status = job.until_step(steps // 3)
            os.kill(int(in_ring(status)[0]["handle"]), signal.SIGKILL)
            job.until_step(2 * steps // 3)
            job.client.scale(1)
        summary = job.summary()
    found = float(summary["metrics"]["auc"])
    rings = len(summary["generations"])
    say(
        f"{mode}, seed {seed}, {'coming and going' if disturbed else 'fixed'}: AUC {found:.4f}, {rings} rings"
    )
    return found


def measure(only: list[str], rounds: int) -> Iterator[list[Row]]:
    """Rows of the parts that are asked for, as they are ready. Less is better: they are in seconds."""
    with tempfile.TemporaryDirectory(prefix="edl-bench-ps-") as folder:
        directory = Path(folder)
        pairs: dict[str, tuple[str, list[float], list[float]]] = {}

        def add(name: str, goal: str, ours: float, peer: float) -> None:
            row = pairs.setdefault(name, (goal, [], []))
            row[1].append(100_000 / ours)
            row[2].append(100_000 / peer)

        for number in range(rounds):
            say(f"training, round {number + 1} of {rounds}")
            if "fit" in only:
                add(
                    "DeepFM, 1 worker + 1 server; keras.fit",
                    "at most 1.33 (0.75 of its samples/s)",
                    rate(directory, 1, *hybrid(1)),
                    fit_rate(),
                )
            if "redis" in only:
                add(
                    "DeepFM, 1 worker + 1 server; rows in Redis",
                    "at most 0.33 (3 times its samples/s)",
                    rate(directory, 1, *hybrid(1)),
                    redis_rate(directory),
                )
            if "ring" in only:
                for workers in WORKERS:
                    ours = rate(directory, workers, *hybrid(1))
                    add(
                        f"DeepFM, {workers} workers + 1 server; the dense ring",
                        "",
                        ours,
                        rate(directory, workers),
                    )
                    add(
                        f"DeepFM, mode=ps, {workers} workers + 1 server; hybrid",
                        "",
                        rate(directory, workers, *hybrid(1, "ps")),
                        ours,
                    )
            if "servers" in only:
                add(
                    "DeepFM, 2 workers, 2 servers; 1 server",
                    "",
                    rate(directory, 2, *hybrid(2)),
                    rate(directory, 2, *hybrid(1)),
                )
        rows = []
        for name, (goal, seconds, of_peer) in pairs.items():
            row = Row(name, seconds, of_peer, "s for 100,000 samples", goal)
            if goal and row.ratio is not None:
                row.met = row.ratio <= (1 / 3 if "Redis" in name else 1 / 0.75)
            rows.append(row)
        if rows:
            yield rows
        if "quality" in only:
            for mode in ("hybrid", "ps"):
                found, fixed = (
                    [auc(directory, seed, moved, mode) for seed in SEEDS] for moved in (True, False)
                )
                near = abs(statistics.mean(found) - statistics.mean(fixed)) <= 2 * statistics.stdev(fixed)
                goal = f"within two standard deviations ({2 * statistics.stdev(fixed):.4f})"
                name = f"mode={mode}: AUC, workers come and go; fixed ones"
                yield [Row(name, found, fixed, "", goal, near)]


def main() -> int:
    if sys.argv[1:] == ["keras-fit"]:
        keras_fit()
        return 0
    return report.main("scripts/bench ps", __doc__, PARTS, measure)


if __name__ == "__main__":
    sys.exit(main())
