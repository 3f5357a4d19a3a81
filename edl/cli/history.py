"""`edl audit` and `edl replay`: what a job's journal proves."""

from __future__ import annotations

import subprocess

import typer

from edl.cli import latest
from edl.cli.target import DirArgument
from edl.contract.own_modules import module_command


def audit(directory: DirArgument = None) -> None:
    """Prove from a job's journal that each record counted once.

    In every epoch, and exactly once.
    """
    from edl import audit as audit_module  # needs NumPy, which the master's image does not have

    print(audit_module.audit(latest.find(directory)))


def replay(directory: DirArgument = None) -> None:
    """Replay a job's journal through the master's core.

    Its decisions and its end are compared.
    """
    output = latest.find(directory)
    raise typer.Exit(subprocess.call([*module_command("master.replay"), str(output)]))
