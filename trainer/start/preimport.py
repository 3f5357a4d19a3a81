# SPDX-License-Identifier: Apache-2.0
"""Import what a worker needs, in a process that forks workers and runs nothing else."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys

from edl.config import Config
from edl.config.types import prepare
from edl.contract import script_imports
from edl.contract.workers import respect_backend
from edl.trainer.records.fork_server import IMPORTED
from edl.trainer.runtime.keras_import import import_keras, import_leading

NOTHING = "-"  # in place of the names: what the script imports must not be forked


def import_all() -> None:
    """Import the modules of a worker, and exclude their objects from garbage collection.

    A script's worker needs no framework: for it, what the script itself imports first is imported.

    These objects live as long as the process. Collections that visit them took a fifth of the time in which a
    worker traces its model, and copied the memory that forked workers share.
    """
    names = os.environ.get(script_imports.VARIABLE)
    if names is None:
        import_keras()  # first: Horovod imports Keras too
        modules = ["grpc.aio", "horovod.tensorflow", "edl.trainer.start.build", IMPORTED]
    else:
        modules = ["grpc.aio", "edl.trainer.script"]
    for module in modules:
        importlib.import_module(module)
    if names not in (None, NOTHING):
        _import_for_script(names.split(","))
    prepare(Config)
    gc.freeze()


def _import_for_script(names: list[str]) -> None:
    """Import what a script imports first, unless that must not be forked.

    A thread or a GPU's context does not survive a fork. A process in which an import has made one starts
    anew without these imports, so each worker makes them itself.
    """
    threads, backend = _threads(), dict(os.environ)
    respect_backend(os.environ)
    import_leading(names)
    if _threads() > threads or _uses_gpu():
        environment = backend | {script_imports.VARIABLE: NOTHING}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
    os.environ.update(backend)


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _uses_gpu() -> bool:
    """Whether this process has opened a device of NVIDIA's driver."""
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(f"/proc/self/fd/{fd}").startswith("/dev/nvidia"):
                return True
    return False
