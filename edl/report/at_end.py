# SPDX-License-Identifier: Apache-2.0
"""The report of a job that has just ended: written by a process of its own, it never disturbs the job."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from edl.contract import artifacts
from edl.contract.own_modules import module_command
from edl.formatting import one_line

SECONDS = 60.0
SWITCH = "EDL_REPORT"  # environment variable; 0: no report at the end of a job


def write_report(output: Path) -> str:
    """Write the report of an ended job in a process of its own. Return what to print about it.

    The job has ended and is whole without the report, so nothing is raised: a full disk, a missing package or
    a crash gives a line that begins with "warning". An empty text: no report was wanted.
    """
    if os.environ.get(SWITCH) == "0":
        return ""
    command = [*module_command("edl.report.write"), str(output)]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            timeout=SECONDS,
            stdin=subprocess.DEVNULL,
            errors="replace",
            text=True,
        )
    except subprocess.TimeoutExpired:
        return f"warning   no report after {SECONDS:g} s; to write it: edl report {output}"
    except OSError as error:
        return f"warning   no report: {error.strerror}"
    if done.returncode:
        last = one_line((done.stderr.strip().splitlines() or ["no message"])[-1])
        return f"warning   no report: {last.removeprefix('edl: ')}"
    return f"report    {output / artifacts.REPORT}"
