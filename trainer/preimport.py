# SPDX-License-Identifier: Apache-2.0
"""Import what a worker needs, in a process that forks workers and runs nothing else."""

from __future__ import annotations

import gc
import importlib

from edl.config import Config
from edl.config.types import prepare
from edl.trainer.input.fork_server import IMPORTED
from edl.trainer.runtime.keras_import import import_keras


def import_all() -> None:
    """Import the modules of a worker, and exclude their objects from garbage collection.

    These objects live as long as the process. Collections that visit them took a fifth of the time in which a
    worker traces its model, and copied the memory that forked workers share.
    """
    import_keras()  # first: Horovod imports Keras too
    for module in ("aiohttp.web", "grpc.aio", "horovod.tensorflow", "edl.trainer.build", IMPORTED):
        importlib.import_module(module)
    prepare(Config)
    gc.freeze()
