# SPDX-License-Identifier: Apache-2.0
"""`edl plan`: values for a job, from a short run of it on this machine."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from edl.cli.jobs.target import seconds
from edl.cli.local.job import Local
from edl.cli.local.job_values import Given, ModelArgument, check_addresses, complete, takes_values
from edl.cli.shared import display, models, output, storm
from edl.cli.shared.jobs import Phase
from edl.cli.shared.storm import Fault, Kind
from edl.cli.start.local_job import new_output, running
from edl.cli.tools import sizing
from edl.config import Config, values
from edl.contract import artifacts
from edl.contract.gpus import too_few_gpus
from edl.errors import ConfigError, EdlError
from edl.formatting import how_many

MAX_WORKERS = 8  # default limit on machines with many cores
WITHIN_SECONDS = 300.0  # for the start of workers, a checkpoint, a recovery
WARM_UP_SECONDS = 1.0
MIN_STEPS = 5  # of a measurement
LOOK_SECONDS = 1.0  # between two looks at the memory of workers
EPOCHS = 10**6  # more than are trained
NEVER = 10**6  # seconds between checkpoints that are not asked for


@takes_values
def plan(
    given: Given,
    model: ModelArgument = "",
    most: Annotated[
        int | None,
        typer.Option(
            "--max-workers",
            min=1,
            help=f"The largest ring to measure; default: the cores of this machine, at most {MAX_WORKERS}.",
        ),
    ] = None,
    lasts: Annotated[
        float,
        typer.Option(
            "--seconds",
            parser=seconds,
            metavar="DURATION",
            help="Training time of each measurement.",
        ),
    ] = "10s",  # type: ignore[assignment]  # parsed
    preemptions: Annotated[
        float,
        typer.Option("--preemptions-per-hour", min=0, help="Expected preemptions, all workers together."),
    ] = 1.0,
    mtbf: Annotated[
        float,
        typer.Option(
            "--mtbf",
            parser=seconds,
            metavar="DURATION",
            help="Mean time between losses of all workers at once. Only these need a checkpoint.",
        ),
    ] = "24h",  # type: ignore[assignment]  # parsed
    replacement: Annotated[
        float | None,
        typer.Option(
            "--replacement",
            parser=seconds,
            metavar="DURATION",
            help="Time in which your cluster replaces a preempted worker; default: as measured here.",
        ),
    ] = None,
    directory: Annotated[
        Path | None,
        typer.Option("--output", help="The output directory of the run; default: a new one in runs/."),
    ] = None,
    form: output.FormOption = output.Form.table,
) -> None:
    """Measure a job in a short run, and print values with reasons.

    Trains on this machine with 1, 2, 4, ... workers, writes checkpoints, kills a worker. The values are the
    number of workers, the time between checkpoints and the memory of a worker, as a file for `edl run -f`
    and `helm install -f`. The model's callbacks are called; nothing is evaluated, and no model is saved.

    For example: `edl plan my_model.py > plan.yaml`, `edl plan my_model.py -f values.yaml --mtbf 12h
    --preemptions-per-hour 4 --replacement 3m`, `edl plan digits --max-workers 4 --seconds 30s -o json`.
    """
    if mtbf <= 0:
        raise ConfigError("--mtbf: expected more than 0 s")
    cores = len(os.sched_getaffinity(0))
    chosen = given.load()
    typed = _checked(chosen, model)
    sizes = _sizes(min(most or max(min(cores, MAX_WORKERS), 2), typed.training.batch_size))
    if why := too_few_gpus(typed.local.gpus_per_worker, sizes[-1], os.environ):
        raise ConfigError(f"--max-workers: {why}")
    where = directory or new_output(f"plan-{Path(typed.model.name).stem.rsplit('.', 1)[-1]}")
    merged, _ = complete(values.merge(chosen, _short(where, sizes[-1])), model)
    load = os.getloadavg()[0]
    _say(f"a short run in {where}; `edl rm {where}` removes it")
    with running(where, merged, "edl plan"):
        run = _Run(where, lasts)
        speeds = run.speeds(sizes)
        checkpoint = run.checkpoints(speeds[-1])
        generation, recovered = run.kill()
    preemption = _preemption(where, sizes[-1], generation, recovered)
    batch, verifies = typed.training.batch_size, typed.export.verify
    measured = sizing.Measured(speeds, preemption, checkpoint, run.worker_bytes, batch, verifies)
    told = sizing.plan(measured, sizing.Assumed(preemptions, mtbf, replacement))
    told = {"model": typed.model.name, "run": str(where), "cores": cores, "load": load, **told}
    if form.is_document:
        output.write("Plan", told, form)
    else:
        display.line(sizing.values_file(told))


def _checked(given: dict[str, Any], model: str) -> Config:
    """The values of the job to plan.

    Raises:
        ConfigError: a value is invalid, or the job does not train in a ring.
        ModelError: the model's file has a mistake.
    """
    _, typed = complete(given, model)
    if typed.model.script or typed.mode in ("horovod", "ps", "evaluate", "predict"):
        what = "model.script" if typed.model.script else f"mode={typed.mode}"
        raise ConfigError(f"{what}: cannot be planned; expected a model that is trained by a ring")
    if not typed.model.source:
        models.check(typed.model.module, not typed.data.addresses, typed.model.functions)
    check_addresses(typed)
    return typed


def _sizes(most: int) -> list[int]:
    """The sizes of the measured rings: powers of two, and the largest one."""
    sizes = [1]
    while 2 * sizes[-1] < most:
        sizes.append(2 * sizes[-1])
    return sizes if most == 1 else [*sizes, most]


def _short(where: Path, most: int) -> dict[str, Any]:
    """Values with which a job trains until it is stopped, without evaluations, and saves only on request."""
    place = str((where / artifacts.CHECKPOINTS).resolve())
    return {
        "workers": 1,
        "minWorkers": 1,
        "maxWorkers": most,
        "suspend": False,
        "activeDeadlineSeconds": 0,
        "training": {"epochs": EPOCHS},
        "evaluation": {"epochs": 0, "steps": 0},
        "checkpoint": {"dir": place, "seconds": NEVER, "steps": 0, "keep": 1, "best": "", "resume": False},
        # A forked worker shares memory with the process that it is forked from, which a pod has, too.
        "local": {"startMethod": "spawn"},
    }


class _Run:
    """Measures a running job.

    Args:
        lasts: seconds of each measurement.
    """

    def __init__(self, where: Path, lasts: float):
        self._where, self._lasts = where, lasts
        self._job, self._status = Local(where), dict[str, Any]()
        self.worker_bytes, self._looks_at = 0, 0.0

    def speeds(self, sizes: Sequence[int]) -> list[sizing.Speed]:
        """Measure rings of these sizes, one after the other."""
        found = []
        for size in sizes:
            self._job.scale(size, None)
            self._until(_has_workers(size), f"ring of {how_many(size, 'worker')}")
            began, first = self._next_step(time.monotonic() + WARM_UP_SECONDS)
            ended, last = self._next_step(began + self._lasts, first + MIN_STEPS)
            found.append(sizing.Speed(size, (last - first) / (ended - began)))
            _say(f"{how_many(size, 'worker')}: {found[-1].steps_per_second:,.4g} steps/s")
        return found

    def checkpoints(self, speed: sizing.Speed) -> sizing.Checkpoint:
        """Write one checkpoint after the other.

        Args:
            speed: of the ring without checkpoints.
        """
        began, first = self._next_step()
        writing, count = 0.0, 0
        while not count or time.monotonic() < began + self._lasts:
            asked = time.monotonic()
            self._job.checkpoint()
            self._until(_has_checkpoint_after(self._status["checkpoint"]["step"]), "checkpoint")
            writing, count = writing + time.monotonic() - asked, count + 1
        ended, last = self._next_step()
        cost = sizing.delay(ended - began, last - first, count, speed.steps_per_second)
        nbytes = int(self._status["checkpoint"]["bytes"])
        _say(f"{how_many(count, 'checkpoint')}, each written in {writing / count:.2f} s")
        return sizing.Checkpoint(count, nbytes, writing / count, cost)

    def kill(self) -> tuple[int, float]:
        """Kill a worker. Return the generation of its ring, and the seconds until the recovery."""
        self._next_step()
        before, fault = self._status, Fault(Kind.kill, 0.0, 0.0, 0.0)
        victim = fault.choose(storm.members(before))
        killed = time.monotonic()
        self._job.faults().inflict(fault, victim)
        self._until(storm.Recovery(before, Kind.kill, victim), "replacement of the killed worker")
        _say(f"killed worker {victim['id']}, recovered after {time.monotonic() - killed:.1f} s")
        return int(before["generation"]), time.monotonic() - killed

    def _next_step(self, after: float = 0.0, least: int = 0) -> tuple[float, int]:
        """Wait until the status shows a new step. Return the time of the status, and the step.

        Args:
            after: the earliest time to return.
            least: the smallest step to return.
        """
        step: int | None = None

        def reached(status: dict[str, Any]) -> bool:
            nonlocal step
            before, step = step, int(status["step"])
            return before is not None and step > before and step >= least and time.monotonic() >= after

        self._until(reached, "step")
        return time.monotonic(), int(self._status["step"])

    def _until(self, reached: Callable[[dict[str, Any]], bool], what: str) -> None:
        """Wait for a status.

        Raises:
            EdlError: the job has ended, or it takes too long.
        """

        def met(status: dict[str, Any]) -> bool:
            self._status = status
            if time.monotonic() >= self._looks_at:  # to look for readers takes all processes of the machine
                self._looks_at = time.monotonic() + LOOK_SECONDS
                memory = [_memory(int(worker["handle"] or 0)) for worker in status["workers"]]
                self.worker_bytes = max(self.worker_bytes, *memory, 0)
            return storm.is_over(status) or reached(status)

        if self._job.until(met, WITHIN_SECONDS + self._lasts) and not storm.is_over(self._status):
            return
        if not artifacts.has_ended(self._where) and not storm.is_over(self._status):
            raise EdlError(f"{self._where}: no {what} within {WITHIN_SECONDS:.0f} s")
        phase, reason = self._job.wait(Phase.Failed, WITHIN_SECONDS)
        raise EdlError(f"the run has ended before all was measured: {phase}: {reason} (logs: {self._where})")


def _memory(pid: int) -> int:
    """Return the largest resident memory of a worker so far, with what its readers hold alone, in bytes."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
        own = next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM:"))
        readers = psutil.Process(pid).children(recursive=True)
        return own + sum(int(reader.memory_full_info().uss) for reader in readers)
    except (OSError, StopIteration, psutil.Error):  # it has no process yet, or has ended
        return 0


def _has_workers(size: int) -> Callable[[dict[str, Any]], bool]:
    return lambda status: len(storm.members(status)) == size


def _has_checkpoint_after(step: int) -> Callable[[dict[str, Any]], bool]:
    return lambda status: int(status["checkpoint"]["step"]) > step


def _preemption(where: Path, workers: int, generation: int, recovered: float) -> sizing.Preemption:
    """Read the cost of the kill from the journal.

    Args:
        generation: of the ring before the kill.
        recovered: seconds until all workers were back.
    """
    from edl.report import reading  # imported late: with NumPy

    changes = [change for change in reading.read(where).changes if change.generation > generation]
    stall, redone = sum(change.stall for change in changes), sum(change.redone for change in changes)
    return sizing.Preemption(workers, stall, recovered, redone)


def _say(text: str) -> None:
    """Print progress where it does not mix with the plan."""
    print(f"edl: {text}", file=sys.stderr, flush=True)
