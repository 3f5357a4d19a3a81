"""`edl audit` and `edl replay`: what a job's journal proves."""

from __future__ import annotations

import subprocess

import typer

from edl.cli import latest
from edl.cli.target import DirArgument
from edl.contract import artifacts
from edl.contract.own_modules import module_command


def audit(directory: DirArgument = None) -> None:
    """Prove from a job's journal that each record counted once.

    In every epoch, and exactly once. The digests of the exported model and of the checkpoints, and all that
    summary.json says, are compared too.
    """
    from edl import audit as audit_module  # needs NumPy, which the master's image does not have

    output = latest.find(directory)
    verdict = audit_module.audit(output)
    # The proof needs few of the numbers in summary.json: the master's core computes all of them again.
    replayed = subprocess.run(
        [*module_command("master.replay"), str(output)], capture_output=True, text=True, errors="replace"
    )
    if replayed.returncode:
        raise audit_module.AuditFailed(replayed.stderr.strip().removeprefix("edl replay: "))
    print(f"{verdict}; {artifacts.SUMMARY} is what the journal gives")


def replay(directory: DirArgument = None) -> None:
    """Replay a job's journal through the master's core.

    Its decisions and its end are compared.
    """
    output = latest.find(directory)
    raise typer.Exit(subprocess.call([*module_command("master.replay"), str(output)]))
