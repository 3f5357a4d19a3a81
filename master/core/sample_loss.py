# SPDX-License-Identifier: Apache-2.0
"""Comparison of workers' models by the loss of the first records.

When it becomes ready, each worker reports the loss of the same records with the same fixed weights. Constants
of the model, the versions of its modules and the values of the records change that loss, though the
configuration of its layers does not show them. A worker whose loss differs is refused, because the ring would
apply the gradients of one model to another, or mix the results of two models. A worker that reports no loss
is not compared. In a job that predicts, a norm of the model's outputs takes the place of the loss.
"""

from __future__ import annotations

from edl.contract.ids import WorkerId
from edl.formatting import numbered
from edl.master.core import facts
from edl.master.core.state import State
from edl.master.core.workers import WorkerRecord

MAX_NAMED = 8  # workers in a sentence


def why_refused(job: State, w: WorkerRecord, found: facts.SampleLoss | None) -> str:
    """Describe why worker `w`, which reports this loss, cannot train with the others; "" if it can.

    The first loss that is reported becomes that of the job.
    """
    if found is None:
        return ""
    of_the_job = job.reference.loss_beside(found)
    loss, of_job = found.loss, of_the_job.loss
    tolerance = max(found.tolerance, of_the_job.tolerance)
    if abs(loss - of_job) > tolerance * max(abs(loss), abs(of_job)):
        others = sorted(other.id for other in job.pool if other.sample_loss is not None)
        what = "an output norm of" if job.config.mode == "predict" else "a loss of"
        return (
            f"worker {w.id} computes {what} {loss:.6g} for the first records with fixed weights, "
            f"{_compute(others)} {of_job:.6g}: their models or data differ. Compare the versions of "
            "libraries and of your own modules, the environment variables that the model's file reads, "
            "constants that are drawn without a seed, and the data files"
        )
    w.sample_loss = found
    return ""


def _compute(workers: list[WorkerId]) -> str:
    """The workers as the subject of a clause, with its verb "to compute"."""
    if not workers:
        return "the workers before it computed"
    return f"{numbered('worker', workers, MAX_NAMED)} compute{'s' if len(workers) == 1 else ''}"
