# SPDX-License-Identifier: Apache-2.0
"""The names of files that Keras writes, which `initFrom.path` may name instead of checkpoints."""

from __future__ import annotations

from pathlib import Path

from edl.errors import ConfigError

KERAS_2 = (".h5", ".hdf5")  # the format of Keras 2, which Keras 3 still writes under these names
NAMES = (".keras", ".weights.h5", *KERAS_2)


def is_keras_file(where: str) -> bool:
    """Whether a path or an address names a file that Keras has saved, and no checkpoint.

    Raises:
        ConfigError: it is a file of any other name.
    """
    if where.endswith(NAMES):
        return True
    if "://" not in where and Path(where).is_file():
        raise ConfigError(
            f"{where} is a file, and the names of Keras' files end with {', '.join(NAMES)}; checkpoints are "
            "directories"
        )
    return False


def is_of_keras_2(where: str) -> bool:
    """Whether Keras takes a file of this name for one of Keras 2."""
    return where.endswith(KERAS_2) and not where.endswith(".weights.h5")
