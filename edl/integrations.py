# SPDX-License-Identifier: Apache-2.0
"""What comes from elsewhere: scripts of Horovod, models, files and commands of ElasticDL, MPI, notebooks.

Everything of it is registered here, and imported by name when it is first used. No other module imports it,
so a package without these modules still trains models of Keras.

A target is "module:name".
"""

from __future__ import annotations

import importlib
from typing import Any

from edl.contract.modes import HOROVOD
from edl.errors import EdlError

# Commands of `edl`, in the order of its help.
COMMANDS = {
    "horovod": "edl.compat.horovod.command:horovod",
    "elasticdl": "edl.compat.elasticdl.command:elasticdl",
    "mpi": "edl.compat.mpi.command:mpi",
}
FOREIGN_FLAGS = ("horovod", "elasticdl")  # commands that parse the flags of a different program
# Functions of the package edl.
FUNCTIONS = {"fit": "edl.compat.notebook.fit:fit", "recordio": "edl.compat.elasticdl.recordio:recordio"}
# By the system that wrote them: finds the files of a checkpoint, and reads their weights for a warm start
# (`edl.checkpoints.foreign`, `edl.trainer.checkpoint.interfaces.ForeignWeights`).
CHECKPOINTS = {"elasticdl": "edl.compat.elasticdl.checkpoint_files:files_in"}
WEIGHTS = {"elasticdl": "edl.compat.elasticdl.weights:Weights"}
# Formats of files by name (`edl.data.formats.opening.Format`).
FORMATS = {"recordio": "edl.compat.elasticdl.recordio:FORMAT"}
# By mode: what the workers do, for the master (`edl.master.core.work.Work`).
WORK = {HOROVOD: "edl.compat.horovod.work:SCRIPT"}
# By mode: what a worker's process runs in place of edl's loop, given its stream.
WORKERS = {HOROVOD: "edl.compat.horovod.start:work"}
# By contract of a model file (`edl.config.model_check`): imports the module, and finds its functions.
MODELS = {"elasticdl": "edl.compat.elasticdl.contract:load"}


def load(target: str, user: str) -> Any:
    """Import a target.

    Args:
        user: what needs it, for the error.

    Raises:
        EdlError: this installation lacks the module.
        ModuleNotFoundError: it lacks a library that the module imports.
    """
    module, _, name = target.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # a library is missing
        raise EdlError(f"{user} needs {error.name}, which this installation of edl lacks") from error


def installed(targets: dict[str, str]) -> dict[str, Any]:
    """Import the targets whose modules are installed, by name."""
    found = {}
    for name, target in targets.items():
        try:
            found[name] = load(target, name)
        except EdlError:
            continue
    return found
