# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of `edl plan`: from measurements of a short run to values, each with its reason."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from edl.contract.exports import VERIFIER_BYTES, VERIFIER_COPIES
from edl.formatting import how_many

MIN_GAIN = 0.5  # of the speed of a single worker; a further worker that adds less does not pay
FARTHEST = 8  # times the largest measured ring: an extrapolation beyond says nothing
MIN_INTERVAL = 10.0  # seconds between checkpoints: the chart's default, at which they cost no step
MARGIN = (
    1.2  # of the memory limit, for what the short run has not seen: other records, callbacks, evaluations
)
MEBIBYTES_STEP = 64  # memory is rounded up to a multiple of it
BUSY = 0.5  # of the cores: the load above which other programs slow a run down
COLUMNS = 100


@dataclass(frozen=True)
class Speed:
    """The measured speed of a ring.

    Args:
        workers: its size.
        steps_per_second: of the whole ring, without evaluations.
    """

    workers: int
    steps_per_second: float


@dataclass(frozen=True)
class StepTime:
    """The seconds of a step by the size of the ring: `fixed + divided / workers` (Amdahl's law).

    Args:
        fixed: seconds that do not shrink with more workers, such as the all-reduce.
        divided: seconds that the workers divide among them.
    """

    fixed: float
    divided: float

    def speed(self, workers: int) -> float:
        """Return the steps per second of a ring of this size; 0 for no workers."""
        return workers / (self.fixed * workers + self.divided) if workers else 0.0

    def most_workers(self) -> float:
        """Return the largest ring in which a further worker still adds `MIN_GAIN` of a single one's speed.

        The speed is s(n) = n / (fixed n + divided), so its slope divided / (fixed n + divided)^2 is compared
        with MIN_GAIN s(1). Infinite if nothing is fixed.
        """
        a, b = self.fixed, self.divided
        return (math.sqrt(b * (a + b) / MIN_GAIN) - b) / a if a > 0 else math.inf


@dataclass(frozen=True)
class Preemption:
    """The measured cost of one killed worker.

    Args:
        workers: the size of its ring.
        stall_seconds: pauses of training, when it left the ring and when its replacement joined.
        recovered_seconds: from the kill until the ring had its size again and had made a step.
        redone_records: records that were trained again.
    """

    workers: int
    stall_seconds: float
    recovered_seconds: float
    redone_records: int

    def lost_seconds(self, share: float, replacement: float | None) -> float:
        """Return the seconds of training that the preemption costs.

        The ring pauses, and until the replacement has joined, it is slower.

        Args:
            share: the speed of the ring without the worker, as a share of its whole speed.
            replacement: seconds until a replacement is in the ring; None: as measured.
        """
        recovered = self.recovered_seconds if replacement is None else replacement
        return self.stall_seconds + max(recovered - self.stall_seconds, 0.0) * (1.0 - min(share, 1.0))


@dataclass(frozen=True)
class Checkpoint:
    """The measured cost of checkpoints.

    Args:
        count: the number that was written.
        nbytes: bytes of one.
        write_seconds: mean time from the request of one until it was complete.
        cost_seconds: mean time by which one delays training; 0 if that cannot be told from noise.
    """

    count: int
    nbytes: int
    write_seconds: float
    cost_seconds: float


@dataclass(frozen=True)
class Assumed:
    """What a short run cannot measure.

    Args:
        preemptions_per_hour: of all workers together, one worker at a time.
        mtbf: mean seconds between losses of all workers at once.
        replacement: seconds until a replacement is in the ring; None: as measured.
    """

    preemptions_per_hour: float
    mtbf: float
    replacement: float | None = None


@dataclass(frozen=True)
class Measured:
    """All measurements of a short run.

    Args:
        speeds: by increasing size of the ring, from 1.
        worker_bytes: largest resident memory of a worker that was started anew, with its reader processes.
        batch: records of a step.
        verifies: whether the saved model is loaded again in a process beside the worker (export.verify).
    """

    speeds: Sequence[Speed]
    preemption: Preemption
    checkpoint: Checkpoint
    worker_bytes: int
    batch: int
    verifies: bool = True

    @property
    def verifier_bytes(self) -> int:
        """Memory that the process takes which loads the saved model; a file is as large as a checkpoint."""
        return VERIFIER_BYTES + VERIFIER_COPIES * self.checkpoint.nbytes if self.verifies else 0

    def pod_bytes(self, margin: float = 1.0) -> float:
        """Memory of a worker's pod at the end of its job, when the model is verified."""
        return margin * self.worker_bytes + self.verifier_bytes


def delay(seconds: float, steps: int, count: int, steps_per_second: float) -> float:
    """Return the seconds by which each of `count` checkpoints has delayed training; at least 0.

    Args:
        seconds, steps: a time in which they were written, and the steps in it.
        steps_per_second: the speed without checkpoints.
    """
    return max(seconds - steps / steps_per_second, 0.0) / count


def young_interval(cost: float, mtbf: float) -> float:
    """Return the seconds between two checkpoints that lose the least time: sqrt(2 cost mtbf).

    This is the first-order optimum of J. W. Young, "A first order approximation to the optimum checkpoint
    interval", Communications of the ACM 17 (1974), which J. T. Daly, "A higher order estimate of the optimum
    checkpoint interval for restart dumps", Future Generation Computer Systems 22 (2006), confirms where a
    checkpoint costs much less than the time between failures.

    Args:
        cost: seconds by which a checkpoint delays training.
        mtbf: mean seconds between failures after which training continues from a checkpoint.
    """
    return math.sqrt(2.0 * cost * mtbf)


def step_time(speeds: Sequence[Speed]) -> StepTime | None:
    """Fit Amdahl's law to the measured speeds by least squares; None if only one size was measured."""
    if len(speeds) < 2:
        return None
    x = [1.0 / speed.workers for speed in speeds]
    y = [1.0 / speed.steps_per_second for speed in speeds]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    divided = sum((p - mean_x) * (q - mean_y) for p, q in zip(x, y, strict=True)) / sum(
        (p - mean_x) ** 2 for p in x
    )
    return StepTime(mean_y - divided * mean_x, divided)


def paying(speeds: Sequence[Speed]) -> int:
    """Return the largest measured ring up to which each further worker pays, as `MIN_GAIN` defines it."""
    best, one = speeds[0], speeds[0].steps_per_second / speeds[0].workers
    for speed in speeds[1:]:
        gain = (speed.steps_per_second - best.steps_per_second) / (speed.workers - best.workers)
        if gain < MIN_GAIN * one:
            break
        best = speed
    return best.workers


def most_workers(measured: Measured) -> int | None:
    """Return the extrapolated number of workers that pay; None if the measurements do not tell.

    It is at most the batch size and `FARTHEST` times the largest measured ring.
    """
    fitted, largest = step_time(measured.speeds), measured.speeds[-1].workers
    if fitted is None or fitted.divided <= 0:
        return None
    far = min(fitted.most_workers(), FARTHEST * largest, measured.batch)
    return max(int(far), paying(measured.speeds))


def mebibytes(size: float) -> int:
    """Round bytes up to mebibytes in steps of `MEBIBYTES_STEP`."""
    return math.ceil(size / (MEBIBYTES_STEP << 20)) * MEBIBYTES_STEP


def plan(measured: Measured, assumed: Assumed) -> dict[str, Any]:
    """Return the plan, as docs/output.md describes it."""
    workers, most = paying(measured.speeds), most_workers(measured)
    fitted = step_time(measured.speeds)
    checkpoint, preemption = measured.checkpoint, measured.preemption
    shortest = max(MIN_INTERVAL, checkpoint.write_seconds)
    interval = max(math.ceil(young_interval(checkpoint.cost_seconds, assumed.mtbf)), math.ceil(shortest))
    lost = preemption.lost_seconds(_share(measured.speeds, fitted, preemption.workers), assumed.replacement)
    request, limit = (mebibytes(measured.pod_bytes(margin)) for margin in (1.0, MARGIN))
    told: dict[str, Any] = {
        "assumed": {
            "preemptions_per_hour": assumed.preemptions_per_hour,
            "mtbf_seconds": assumed.mtbf,
            "replacement_seconds": assumed.replacement,
        },
        "speeds": [
            {
                **asdict(speed),
                "records_per_second": speed.steps_per_second * measured.batch,
                "efficiency": _efficiency(speed, measured.speeds[0]),
            }
            for speed in measured.speeds
        ],
        "step": {"fixed_seconds": fitted.fixed, "divided_seconds": fitted.divided} if fitted else None,
        "preemption": {**asdict(preemption), "lost_seconds": lost},
        "checkpoint": {
            "count": checkpoint.count,
            "bytes": checkpoint.nbytes,
            "write_seconds": checkpoint.write_seconds,
            "cost_seconds": checkpoint.cost_seconds,
        },
        "worker_bytes": measured.worker_bytes,
        "verifier_bytes": measured.verifier_bytes,
        "lost_shares": {
            "preemptions": assumed.preemptions_per_hour * lost / 3600,
            "checkpoints": checkpoint.cost_seconds / interval,
            "losses_of_all_workers": interval / 2 / assumed.mtbf,
        },
        "values": {
            "workers": workers,
            **({} if most is None else {"maxWorkers": most}),
            "checkpoint": {"seconds": interval},
            "worker": {
                "resources": {"requests": {"memory": f"{request}Mi"}, "limits": {"memory": f"{limit}Mi"}}
            },
        },
    }
    told["reasons"] = _reasons(told, measured)
    return told


def _share(speeds: Sequence[Speed], fitted: StepTime | None, workers: int) -> float:
    """The speed of a ring without one of its workers, as a share of its whole speed."""
    known = {speed.workers: speed.steps_per_second for speed in speeds}
    if workers - 1 in known and workers in known:
        return known[workers - 1] / known[workers]
    return fitted.speed(workers - 1) / fitted.speed(workers) if fitted is not None else 0.0


def _efficiency(speed: Speed, one: Speed) -> float:
    """The speed as a share of what as many single workers would have together."""
    return speed.steps_per_second / one.steps_per_second / speed.workers


def _reasons(told: Mapping[str, Any], measured: Measured) -> dict[str, str]:
    """The reason of each value, by its dotted key."""
    values, checkpoint, assumed = told["values"], told["checkpoint"], told["assumed"]
    largest, workers = measured.speeds[-1].workers, values["workers"]
    rule = f"adds at least {MIN_GAIN:.0%} of the speed of a single worker"
    reasons = {
        "workers": f"up to it, each further worker {rule}; a larger ring of {largest} was measured"
        if workers < largest
        else f"the largest ring that was measured; each further worker {rule}",
        "checkpoint.seconds": _interval_reason(checkpoint, assumed["mtbf_seconds"]),
        "worker.resources.requests.memory": f"the {_size(told['worker_bytes'])} that the largest worker held"
        + (f", {_size(told['verifier_bytes'])} to load the saved model again" if measured.verifies else ""),
        "worker.resources.limits.memory": f"likewise, with {MARGIN} times the memory of the worker: other "
        "records, callbacks and evaluations are not measured",
    }
    if most := values.get("maxWorkers"):
        step = told["step"]
        fixed = max(step["fixed_seconds"], 0.0)
        why = f"beyond it, a further worker would not have {rule.replace('adds', 'added')}"
        if most == min(measured.batch, FARTHEST * largest):
            why = (
                "the batch has no more records"
                if most == measured.batch
                else f"{FARTHEST} times what was measured"
            )
        reasons["maxWorkers"] = (
            f"extrapolated: {1000 * fixed:.3g} ms of a step do not shrink with more workers, and "
            f"{1000 * step['divided_seconds']:.3g} ms are divided among them; {why}"
        )
    return reasons


def _interval_reason(checkpoint: Mapping[str, Any], mtbf: float) -> str:
    cost, took = checkpoint["cost_seconds"], checkpoint["write_seconds"]
    best = young_interval(cost, mtbf)
    law = f"sqrt(2 x {cost:.3g} s x {mtbf:,.0f} s) = {best:.3g} s (Young, Daly): "
    law += "the cost of a checkpoint, and the time between losses of all workers"
    if not cost:
        law = "the checkpoints did not measurably delay the training"
    if best < max(MIN_INTERVAL, took):
        least = "the time in which one is written" if took > MIN_INTERVAL else "the chart's default"
        law += f"; not less than {least}"
    return law


def header(told: Mapping[str, Any]) -> list[str]:
    """Describe the measurements for people, in lines."""
    preemption, checkpoint, assumed = told["preemption"], told["checkpoint"], told["assumed"]
    lines = [f"{told['model']}, measured on this machine ({how_many(told['cores'], 'core')})."]
    if told["load"] > BUSY * told["cores"]:
        lines.append(
            f"The machine was busy before the run (load {told['load']:.1f}), so the speeds are those of a "
            "slower one: measure again when it is idle."
        )
    for speed in told["speeds"]:
        lines.append(
            f"{how_many(speed['workers'], 'worker')}: {speed['steps_per_second']:,.4g} steps/s, "
            f"{speed['records_per_second']:,.4g} records/s, efficiency {speed['efficiency']:.2f}"
        )
    lines.append(
        f"a killed worker of {preemption['workers']}: {preemption['stall_seconds']:.2f} s of pauses, a "
        f"replacement in the ring after {preemption['recovered_seconds']:.1f} s, "
        f"{how_many(preemption['redone_records'], 'record')} trained again; costs "
        f"{preemption['lost_seconds']:.2f} s of training"
    )
    lines.append(
        f"a checkpoint of {_size(checkpoint['bytes'])}: written in {checkpoint['write_seconds']:.2f} s, "
        f"delays training by {checkpoint['cost_seconds']:.3f} s (mean of {checkpoint['count']})"
    )
    replaced = assumed["replacement_seconds"]
    lines.append(
        f"assumed: preemptions in an hour {assumed['preemptions_per_hour']:g} (--preemptions-per-hour), all "
        f"workers lost every {assumed['mtbf_seconds'] / 3600:,.3g} h (--mtbf)"
        + ("" if replaced is None else f", a replacement after {replaced:g} s (--replacement)")
    )
    shares = told["lost_shares"]
    lines.append(
        f"expected loss of training time: preemptions {shares['preemptions']:.2%}, checkpoints "
        f"{shares['checkpoints']:.2%}, losses of all workers {shares['losses_of_all_workers']:.2%}"
    )
    lines.append(
        "Not measured: a cluster's network, storage, processors and start of pods (docs/rehearsal.md)."
    )
    return lines


def values_file(told: Mapping[str, Any]) -> str:
    """Format the plan as a values file for -f, with the measurements and the reasons as comments."""
    lines = [f"# {line}" for text in header(told) for line in textwrap.wrap(text, COLUMNS)]
    return "\n".join([*lines, "", *_commented(told["values"], told["reasons"], "", "")])


def _commented(values: Mapping[str, Any], reasons: Mapping[str, str], parent: str, indent: str) -> list[str]:
    lines = []
    for name, value in values.items():
        key = parent + name
        if isinstance(value, Mapping):
            lines += [f"{indent}{name}:", *_commented(value, reasons, f"{key}.", indent + "  ")]
        else:
            lines += [f"{indent}# {line}" for line in textwrap.wrap(reasons[key], COLUMNS - len(indent))]
            lines.append(f"{indent}{name}: {value}")
    return lines


def _size(size: float) -> str:
    return f"{size / 2**20:,.0f} MiB" if size >= 10 << 20 else f"{math.ceil(size / 2**10):,} KiB"
