# SPDX-License-Identifier: Apache-2.0
"""Runs a script that was written for Horovod in a worker, from its first line to its end."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

from edl import config as config_module
from edl.compat.horovod import keras3, member, modules, optimizer
from edl.config import Config
from edl.contract.exit_codes import WorkerExit
from edl.errors import UserCodeError
from edl.trainer.runtime.error_report import format_error
from edl.trainer.runtime.gpu_memory import set_gpu_memory
from edl.trainer.script import run
from edl.trainer.session.client import MasterStream


def work(stream: MasterStream, ready: Callable[[float], None], lost: Callable[[str], int]) -> int:
    """Run the job's script as `python SCRIPT ARGS` would; returns the exit code of the worker.

    Args:
        ready: called when the worker is ready, with the seconds that it may need to leave a ring.
        lost: returns the exit code of a worker that has lost its master, by the reason.

    Raises:
        UserCodeError: the script has called sys.exit with a failure, or uses what only Keras 2 has.
        BaseException: raised by the script.
    """
    config: Config = config_module.parse(json.loads(stream.config_json))
    set_gpu_memory(config.worker.gpu_memory)
    worker = member.Worker(stream, config, ready)
    member.become(worker)
    modules.install()
    try:
        run(config.model.script, config.model.arguments)
    except member.Stopped as stopped:
        print(f"edl worker {stream.session.worker}: {stopped}", file=sys.stderr)
        return lost(stopped.end.why) if stopped.end.lost else WorkerExit.STOPPED
    except Exception as error:
        if optimizer.is_keras2() or not (advice := keras3.keras2_advice(error)):
            raise
        raise UserCodeError(f"{format_error(error)}; {advice}") from error
    worker.finished()
    return WorkerExit.STOPPED
