# SPDX-License-Identifier: Apache-2.0
"""`edl chaos`: a storm of faults on a running job, and a report of how the job has taken them."""

from __future__ import annotations

import itertools
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from edl.cli.jobs.target import changes_a_named_job, seconds
from edl.cli.shared import display, output, storm
from edl.cli.shared.jobs import ENDED, Faults, JobHandle, Phase
from edl.cli.shared.storm import Fault, Hit, Kind
from edl.contract import artifacts
from edl.errors import ConfigError, EdlError
from edl.formatting import how_many, plain

RECOVERY_SECONDS = 300.0  # for the start of new workers; pods may wait longer for a node
FAULTS = 10
INTERRUPTED = 130  # exit code, as of a shell


@changes_a_named_job
def chaos(
    job: JobHandle,
    seed: Annotated[int | None, typer.Option("--seed", help="Repeat the faults of this seed.")] = None,
    faults: Annotated[
        int | None,
        typer.Option(
            "--faults", min=1, help=f"Their number; default: {FAULTS}, or no limit with --duration."
        ),
    ] = None,
    every: Annotated[
        float,
        typer.Option(
            "--every",
            parser=seconds,
            metavar="DURATION",
            help="Mean time from a recovery to the next fault.",
        ),
    ] = "5s",  # type: ignore[assignment]  # parsed
    duration: Annotated[
        float | None,
        typer.Option("--duration", parser=seconds, metavar="DURATION", help="End the storm after this time."),
    ] = None,
    only: Annotated[
        str,
        typer.Option("--only", metavar="KINDS", help="Only these kinds, such as kill,term or server."),
    ] = "",
    compare: Annotated[
        Path | None,
        typer.Option(
            "--compare",
            metavar="DIR",
            help="Wait for the job's end, and print its final metrics beside those of this undisturbed job.",
        ),
    ] = None,
    form: output.FormOption = output.Form.table,
) -> None:
    """Inject faults into a running job of yours, and report the cost.

    The kinds are kill (kill -9 of a worker), stop (SIGSTOP of a worker for 1 to 20 s), term (SIGTERM to a
    worker) and server (kill -9 of a parameter server). With --release, kill and server delete a pod without a
    grace period, term evicts it, and there is no stop. Each fault waits until the job has recovered from the
    one before. The job goes on after the storm.

    Exit code: 1 if the job has failed, or if a record did not count once; 130 after Ctrl-C.

    For example: `edl chaos DIR --faults 20 --only kill,term`, `edl chaos DIR --duration 30m --every 1m`,
    `edl chaos --release edl -n team --seed 7 -o json`.
    """
    undisturbed = artifacts.read_summary(compare) if compare is not None else None
    job.announce()
    possible = job.faults()
    kinds = storm.kinds_of(only, possible.kinds)
    seed = random.SystemRandom().randrange(10**6) if seed is None else seed
    most = faults if faults is not None or duration is not None else FAULTS
    blown = _Storm(job, possible, most, every, math.inf if duration is None else duration)
    first, kinds = blown.begin(kinds, bool(only))
    _say(f"seed {seed}: {how_many(most, 'fault') if most else 'faults'} ({', '.join(kinds)})")
    interrupted = False
    try:
        blown.run(storm.plan(seed, kinds))
    except KeyboardInterrupt:
        interrupted = True
        _say("interrupted")
    told = {"seed": seed, **_report(job, blown.hits, first, compare is not None and not interrupted)}
    if undisturbed is not None:
        told["undisturbed"] = storm.final_metrics(undisturbed)
    if form.is_document:
        output.write("ChaosReport", told, form)
    else:
        for line in storm.lines(told):
            display.line(line)
    failed = told["phase"] == Phase.Failed or not told["exact"]
    raise typer.Exit(1 if failed else INTERRUPTED if interrupted else 0)


class _Storm:
    """Inflicts faults on a job, each once the job has recovered from the one before.

    Args:
        most: the greatest number of faults; None: no limit.
        every: mean seconds from a recovery to the next fault.
        lasts: seconds after which no further fault is inflicted.
    """

    def __init__(self, job: JobHandle, faults: Faults, most: int | None, every: float, lasts: float):
        self._job, self._faults = job, faults
        self._most, self._every, self._lasts = most, every, lasts
        self._status: dict[str, Any] = {}
        self.hits: list[Hit] = []

    def begin(self, kinds: list[Kind], chosen: bool) -> tuple[int, list[Kind]]:
        """Wait until the job trains. Return the generation of its ring, and the kinds that can hit it.

        Args:
            chosen: the user has chosen the kinds.

        Raises:
            EdlError: the job does not begin to train.
            ConfigError: the job must not, or cannot be hit.
        """
        if not self._until(lambda status: bool(storm.members(status)), RECOVERY_SECONDS):
            raise EdlError("no fault inflicted: the job has no worker in a ring")
        status = self._status
        if (kind := status["task"]["kind"]) in ("evaluate", "predict"):
            raise ConfigError(f"the job has the task {kind}; expected one that trains")
        if status["target"] < 2 and status.get("checkpoint") is None:
            raise ConfigError(
                "the job has one worker and writes no checkpoints, so a fault would lose its training; "
                "expected two workers, or a checkpoint.dir"
            )
        if not status.get("servers") and Kind.server in kinds:
            kinds = [kind for kind in kinds if kind is not Kind.server]
            if chosen:
                raise ConfigError("--only server: the job has no parameter servers")
        return int(status["generation"]), kinds

    def run(self, plan: Iterator[Fault]) -> None:
        """Inflict the planned faults until the job ends, the time is up, or their number is reached."""
        ends = time.monotonic() + self._lasts
        for fault in itertools.islice(plan, self._most):
            left = ends - time.monotonic()
            self._until(lambda _: False, min(fault.delay * self._every, left))
            if storm.is_over(self._status) or time.monotonic() >= ends or not self._strike(fault):
                return

    def _strike(self, fault: Fault) -> bool:
        """Inflict one fault, and wait for the recovery. False: no victim is left, as at the end of a job."""
        gone: list[Mapping[str, Any]] = []
        while self._until(lambda status: bool(self._victims(status, fault, gone)), RECOVERY_SECONDS):
            before = self._status
            victim = fault.choose(self._victims(before, fault, gone))
            name = _name(fault, victim)
            at = time.monotonic()
            _say(f"{len(self.hits) + 1}: {Kind.kill if fault.kind is Kind.server else fault.kind} {name}")
            # Unless the recovery is seen, because it takes too long, or the job ends or Ctrl-C comes before.
            self.hits.append(Hit(fault, name, None))
            if self._faults.inflict(fault, victim):
                break
            self.hits.pop()
            gone.append(victim)
        else:
            _say("the job is over" if storm.is_over(self._status) else "no worker or server is left to hit")
            return False
        if self._until(storm.Recovery(before, fault.kind, victim), RECOVERY_SECONDS):
            took = time.monotonic() - at
            stayed = (
                fault.kind is Kind.stop
                and before["task"]["mode"] != "ps"
                and self._status["generation"] == before["generation"]
            )
            self.hits[-1] = Hit(fault, name, took, stayed)
            _say(f"   recovered after {took:.1f} s")
        return True

    def _victims(
        self, status: Mapping[str, Any], fault: Fault, gone: list[Mapping[str, Any]]
    ) -> list[Mapping[str, Any]]:
        """The possible victims, without those that were not found."""
        known = [_name(fault, each) for each in gone]
        return [each for each in storm.candidates(status, fault.kind) if _name(fault, each) not in known]

    def _until(self, reached: Callable[[dict[str, Any]], bool], within: float) -> bool:
        """Wait for a status. False: the time is up, or the job has ended or is ending."""

        def met(status: dict[str, Any]) -> bool:
            self._status = status
            return storm.is_over(status) or reached(status)

        return self._job.until(met, within) and not storm.is_over(self._status)


def _name(fault: Fault, victim: Mapping[str, Any]) -> str:
    kind, number = ("server", "index") if fault.kind is Kind.server else ("worker", "id")
    handle = victim.get("handle")
    return f"{kind} {victim[number]}" + (f" ({plain(str(handle))})" if handle else "")


def _report(job: JobHandle, hits: list[Hit], first: int, to_its_end: bool) -> dict[str, Any]:
    """Read what the storm has done to the job.

    Args:
        first: generation of the ring before the storm.
        to_its_end: wait for the end of the job.
    """
    from edl.cli.shared.proof import prove  # imported late: with NumPy
    from edl.report import reading

    phase = job.snapshot().data["phase"]
    if to_its_end and phase not in ENDED:
        _say("waiting for the end of the job")
    if to_its_end or storm.is_over({"phase": phase}):
        job.until(lambda _: False, None)  # the summary is written last
    with job.journal() as found:
        changes = [change for change in reading.read(found.directory).changes if change.generation > first]
        try:
            audit, exact = prove(found.directory, found.elsewhere), True
        except EdlError as error:
            audit, exact = str(error), False
        return storm.report(hits, changes, found.told, audit, exact)


def _say(text: str) -> None:
    """Print progress where it does not mix with the report."""
    print(f"edl: {text}", file=sys.stderr, flush=True)
