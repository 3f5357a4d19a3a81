# SPDX-License-Identifier: Apache-2.0
"""`edl audit` and `edl replay`: verification of a job by its journal."""

from __future__ import annotations

import subprocess

import typer

from edl.cli.jobs.target import DirArgument, about_a_job
from edl.cli.local import latest
from edl.cli.shared import display, output
from edl.cli.shared.jobs import JobHandle
from edl.contract.own_modules import module_command


@about_a_job
def audit(job: JobHandle, form: output.FormOption = output.Form.table) -> None:
    """Prove from a job's journal that each record counted once.

    In every epoch, and exactly once. The digests of the exported model and of the checkpoints, and all that
    summary.json says, are compared too. With --release, the journal is copied from the master's pod, and a
    pod with the exported model computes its digests; checkpoints are not verified.

    Exit code: 1 if a record did not count once, or if the job cannot be audited.
    """
    if not form.is_document:
        display.line(job.audit())
        return
    from edl.journal.format import JournalDamaged  # imported late: with NumPy
    from edl.journal.proof import AuditFailed

    try:
        output.write("Audit", {"exact": True, "audit": job.audit()}, form)
    except (AuditFailed, JournalDamaged) as error:
        output.write("Audit", {"exact": False, "audit": str(error)}, form)
        raise typer.Exit(1) from error


def replay(directory: DirArgument = None) -> None:
    """Replay a job's journal through the master's core.

    Its decisions and its end are compared.
    """
    found = latest.find(directory)
    raise typer.Exit(subprocess.call([*module_command("edl.master.journal.replay"), str(found)]))
