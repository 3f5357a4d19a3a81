# SPDX-License-Identifier: Apache-2.0
"""Import TensorFlow and Keras without two packages that Keras imports and a worker does not need."""

from __future__ import annotations

import gc
import importlib
import sys

# Keras tries to import both for extras that fail with a clear error without them: its scikit-learn wrappers
# and two functions that draw galleries. Where they are installed they are a third of the import: 2 of 6.6 s.
UNNEEDED = ("matplotlib", "sklearn")


def import_keras() -> None:
    """Import `tensorflow` and `keras` so that Keras finds neither matplotlib nor scikit-learn.

    Code that imports these packages itself, before or afterwards, finds them. The imported objects live as
    long as the process, so they are excluded from garbage collection.
    """
    # Collections during the import free next to nothing, and take a sixth of its time.
    collects = gc.isenabled()
    gc.disable()
    hidden = [name for name in UNNEEDED if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # `import` raises ModuleNotFoundError
    try:
        importlib.import_module("tensorflow")
        importlib.import_module("keras")
    finally:
        for name in hidden:
            del sys.modules[name]
        gc.freeze()
        if collects:
            gc.enable()
