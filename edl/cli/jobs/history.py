# SPDX-License-Identifier: Apache-2.0
"""`edl audit` and `edl replay`: verification of a job by its journal."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Annotated

import typer

from edl.cli.jobs.target import DirArgument, about_a_job
from edl.cli.local import latest
from edl.cli.shared import display, output
from edl.cli.shared.jobs import JobHandle
from edl.contract.own_modules import module_command

SameAsOption = Annotated[
    Path | None,
    typer.Option(
        "--same-as",
        metavar="DIR",
        help="Compare the job with that of this output directory, bit by bit: its state and its metrics "
        "after each epoch. Both need training.deterministic.",
    ),
]


@about_a_job
def audit(job: JobHandle, same_as: SameAsOption = None, form: output.FormOption = output.Form.table) -> None:
    """Prove from a job's journal that each record counted once.

    In every epoch, and exactly once. The digests of the exported model and of the checkpoints, and all that
    summary.json says, are compared too. With --release, the journal is copied from the master's pod, and a
    pod with the exported model computes its digests; checkpoints are not verified.

    Exit code: 1 if a record did not count once, if the job cannot be audited, or if two jobs differ.
    """
    if not form.is_document:
        display.line(_verdict(job, same_as))
        return
    from edl.journal.format import JournalDamaged  # imported late: with NumPy
    from edl.journal.proof import AuditFailed

    try:
        output.write("Audit", {"exact": True, "audit": _verdict(job, same_as)}, form)
    except (AuditFailed, JournalDamaged) as error:
        output.write("Audit", {"exact": False, "audit": str(error)}, form)
        raise typer.Exit(1) from error


def _verdict(job: JobHandle, same_as: Path | None) -> str:
    verdict = job.audit()
    if same_as is None:
        return verdict
    from edl.journal.audit import same  # imported late: with NumPy

    with job.journal() as journal:
        return f"{verdict}; {same(journal.directory, same_as)}"


def replay(directory: DirArgument = None) -> None:
    """Replay a job's journal through the master's core.

    Its decisions and its end are compared.
    """
    found = latest.find(directory)
    raise typer.Exit(subprocess.call([*module_command("edl.master.journal.replay"), str(found)]))
