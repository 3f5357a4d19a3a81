# SPDX-License-Identifier: Apache-2.0
"""`edl horovod`: run a script that was written for Horovod on this machine."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import typer

from edl.cli.shared import display, models
from edl.cli.start import local_job
from edl.compat.horovod import check as horovod_check
from edl.compat.horovod import flags as horovod_flags
from edl.config import parse, values
from edl.contract.gpus import too_few_gpus
from edl.errors import ConfigError

# As `python -m` does: the current folder is first on the path, in place of the script's.
RUN_MODULE = """import os, runpy, sys
sys.path[0] = os.getcwd()
runpy.run_module({module!r}, run_name="__main__", alter_sys=True)
"""


def horovod(context: typer.Context) -> None:
    """Run a script of Horovod: `edl horovod -np 2 train.py`.

    The flags are horovodrun's.
    """
    call = horovod_flags.parse(context.args)
    if call.says:
        display.line(call.says)
        return
    for note in call.notes:
        print(note, file=sys.stderr)
    file = _file_of(call.script) if call.is_module else Path(call.script).resolve()
    horovod_check.check(file, legacy=horovod_flags.LEGACY_KERAS in call.environment)
    script = RUN_MODULE.format(module=call.script) if call.is_module else str(file)
    merged = values.load([*call.files], [*call.sets], [], [])
    merged = values.merge(merged, {"model": {"script": script, "arguments": [*call.arguments]}})
    typed = parse(merged)
    if why := too_few_gpus(typed.local.gpus_per_worker, typed.workers, os.environ | call.environment):
        raise ConfigError(why)
    if horovod_flags.LEGACY_KERAS in call.environment and find_spec("tf_keras") is None:
        raise ConfigError(
            "edl horovod --legacy-keras: tf-keras is not installed; install the version of your TensorFlow: "
            "pip install --no-deps tf-keras==VERSION"
        )
    os.environ.update(call.environment)
    output = call.output or local_job.new_output(call.script if call.is_module else file.stem)
    raise typer.Exit(local_job.run_job(output, merged, command="edl horovod", all_output=call.all_output))


def _file_of(module: str) -> Path:
    """The file that `python -m MODULE` runs.

    Raises:
        ConfigError: there is no such module, or it is a package without a `__main__`.
    """
    found = models.find(module)
    if found is not None and found.submodule_search_locations is not None:
        found = models.find(f"{module}.__main__")
    if found is None or found.origin is None:
        raise ConfigError(
            f"edl horovod: python -m {module}: no such module, or a package without __main__.py; modules of "
            f"{Path.cwd()} and installed ones are found"
        )
    return Path(found.origin)
