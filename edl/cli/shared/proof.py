# SPDX-License-Identifier: Apache-2.0
"""The verdict on a job, from a directory with its journal and its summary."""

from __future__ import annotations

import subprocess
from pathlib import Path

from edl.contract import artifacts
from edl.contract.own_modules import module_command
from edl.journal.audit import AuditFailed, Elsewhere, audit


def prove(output: Path, elsewhere: Elsewhere | None = None) -> str:
    """Audit a job, and compare its summary with a replay of the journal through the master's core.

    A job that has not ended has no summary: only the steps so far are audited.

    Args:
        output: the job's output directory, or a copy of its journal, summary and exports.json.
        elsewhere: access to the exported files if `output` is a copy.

    Raises:
        AuditFailed: a check failed; the message describes the first problem.
        EdlError: a file cannot be read.
    """
    verdict = audit(output, elsewhere)
    if not artifacts.has_ended(output):
        return verdict
    # The proof uses few of the numbers in summary.json; the master's core computes all of them again.
    replayed = subprocess.run(
        [*module_command("edl.master.journal.replay"), str(output)],
        capture_output=True,
        text=True,
        errors="replace",
    )
    if replayed.returncode:
        raise AuditFailed(replayed.stderr.strip().removeprefix("edl replay: "))
    return f"{verdict}; {artifacts.SUMMARY} is what the journal gives"
