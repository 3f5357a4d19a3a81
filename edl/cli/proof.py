"""The verdict on a job, from a directory with its journal and its summary."""

from __future__ import annotations

import subprocess
from pathlib import Path

from edl.contract import artifacts
from edl.contract.own_modules import module_command
from edl.journal.audit import AuditFailed, Elsewhere, audit


def prove(output: Path, elsewhere: Elsewhere | None = None) -> str:
    """Audit a job, and compare its summary with what the master's core makes of the journal.

    Args:
        output: the job's output directory, or a copy of its journal, summary and exports.json.
        elsewhere: where the exported files lie if `output` is such a copy.

    Raises:
        EdlError: something is wrong, or cannot be read; the text names the first such thing.
    """
    verdict = audit(output, elsewhere)
    # The proof needs few of the numbers in summary.json: the master's core computes all of them again.
    replayed = subprocess.run(
        [*module_command("edl.master.journal.replay"), str(output)],
        capture_output=True,
        text=True,
        errors="replace",
    )
    if replayed.returncode:
        raise AuditFailed(replayed.stderr.strip().removeprefix("edl replay: "))
    return f"{verdict}; {artifacts.SUMMARY} is what the journal gives"
