# SPDX-License-Identifier: Apache-2.0
"""`edl horovod`: run a script that was written for Horovod on this machine."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import typer

from edl.cli import display, horovod_check, horovod_flags, local_job
from edl.config import parse, values
from edl.contract.gpus import too_few_gpus
from edl.errors import ConfigError


def horovod(context: typer.Context) -> None:
    """Run a script that was written for Horovod: `edl horovod -np 2 train.py`, with horovodrun's flags."""
    call = horovod_flags.parse(context.args)
    if call.says:
        display.line(call.says)
        return
    for note in call.notes:
        print(note, file=sys.stderr)
    script = Path(call.script).resolve()
    horovod_check.check(script)
    merged = values.load([*call.files], [*call.sets], [], [])
    merged = values.merge(merged, {"model": {"script": str(script), "arguments": [*call.arguments]}})
    typed = parse(merged)
    if why := too_few_gpus(typed.local.gpus_per_worker, typed.workers, os.environ | call.environment):
        raise ConfigError(why)
    if horovod_flags.LEGACY_KERAS in call.environment and find_spec("tf_keras") is None:
        raise ConfigError(
            "edl horovod --legacy-keras: tf-keras is not installed; install the version of your TensorFlow: "
            "pip install --no-deps tf-keras==VERSION"
        )
    os.environ.update(call.environment)
    output = call.output or local_job.new_output(script.stem)
    raise typer.Exit(local_job.run_job(output, merged, command="edl horovod", all_output=call.all_output))
