# SPDX-License-Identifier: Apache-2.0
"""The checkpoint or file that `initFrom.path` names: on this machine or elsewhere."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from edl import integrations, scratch
from edl.checkpoints import CheckpointError, Manifest, Store, one_of
from edl.checkpoints.foreign import foreign_files
from edl.checkpoints.keras_files import is_keras_file
from edl.contract.artifacts import CLASSES, METADATA
from edl.errors import ConfigError, EdlError
from edl.trainer.checkpoint.interfaces import ForeignWeights
from edl.trainer.embedding.saved_rows import counted, counted_in_file
from edl.trainer.runtime.error_report import format_error


@contextmanager
def local_file(where: str) -> Iterator[Path]:
    """Download what is at this address, and return it as a local file.

    Raises:
        ConfigError: the file does not exist.
        CheckpointError: the file cannot be read.
        EdlError: raised inside the context, it passes unchanged.
    """
    try:
        if "://" not in where:
            if not Path(where).is_file():
                raise ConfigError(f"initFrom.path: {where}: no such file on this worker")
            yield Path(where)
            return
        above, _, name = where.rpartition("/")
        with scratch.directory() as directory:
            path = directory / name
            with Store.open(above).place.open("", name) as source, open(path, "wb") as file:
                shutil.copyfileobj(source, file)
            yield path
    except EdlError:
        raise
    except Exception as error:  # clients of stores raise errors of their own types
        raise CheckpointError(f"initFrom.path: {where}: {format_error(error)}") from error


def foreign(where: str) -> ForeignWeights | None:
    """Return the weights that a different system has saved at `initFrom.path`, or None.

    Raises:
        CheckpointError: the place cannot be read.
    """
    if (found := foreign_files(where)) is None:
        return None
    system, files = found
    weights: ForeignWeights = integrations.load(integrations.WEIGHTS[system], where)(files)
    return weights


def saved_counts(where: str) -> dict[str, int]:
    """Return the rows in `initFrom.path` of each layer whose rows were on parameter servers.

    The model is built with these numbers.

    Raises:
        ConfigError: the file or checkpoint does not exist.
        CheckpointError: it cannot be read.
    """
    if not where:
        return {}
    if not is_keras_file(where):
        return {} if foreign_files(where) else counted(one_of(where))
    with local_file(where) as path:
        try:
            return counted_in_file(path)
        except CheckpointError as error:
            raise CheckpointError(f"initFrom.path: {error}") from error


def saved_classes(where: str) -> tuple[str, ...] | None:
    """The names of the labels' classes by number, as `initFrom.path` has them; None if it has none.

    Raises:
        ConfigError: the file or checkpoint does not exist.
        CheckpointError: it cannot be read.
    """
    found: list[str] | None = None
    if where.endswith(".keras"):
        with local_file(where) as path, zipfile.ZipFile(path) as archive:
            found = json.loads(archive.read(METADATA)).get(CLASSES)
    elif where and not is_keras_file(where) and not foreign_files(where):
        found = one_of(where).manifest.state.get(CLASSES)
    return None if found is None else tuple(found)


def place_of(manifest: Manifest, where: str) -> str:
    """The checkpoint and where it is, for messages."""
    return f"initFrom.path: the checkpoint of step {manifest.step:,} in {where}"


def rows_variable(layer: Any) -> str:
    """The name that the variable with a layer's rows would have."""
    return f"{layer.path}/embeddings"
