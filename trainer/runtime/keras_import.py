# SPDX-License-Identifier: Apache-2.0
"""Import TensorFlow and Keras without two packages that Keras imports and a worker does not need.

`import_leading` imports what a script imports first, of any kind.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path

# Keras tries to import both for extras that fail with a clear error without them: its scikit-learn wrappers
# and two functions that draw galleries. Where they are installed they are a third of the import: 2 of 6.6 s.
UNNEEDED = ("matplotlib", "sklearn")
INSTALLED = {"site-packages", "dist-packages"}  # folders of installed packages


def import_leading(names: Iterable[str]) -> None:
    """Import modules that a script imports first. What cannot be imported is left to the script.

    The list ends with a module that is not installed: a file beside the script, which may do anything.
    """
    for name in names:
        try:
            root = name.partition(".")[0]
            found = importlib.util.find_spec(root)
            origin = found.origin if found is not None else None
            if origin is None or not INSTALLED.intersection(Path(origin).parts):
                return
            if root in ("keras", "tensorflow"):
                _import((root,))
            importlib.import_module(name)
        except Exception:  # raised again by the script, which may handle it
            return


def import_keras() -> None:
    """Import `tensorflow` and `keras` so that Keras finds neither matplotlib nor scikit-learn.

    Code that imports these packages itself, before or afterwards, finds them. The imported objects live as
    long as the process, so they are excluded from garbage collection.
    """
    _import(("tensorflow", "keras"))


def _import(names: Iterable[str]) -> None:
    # Collections during the import free next to nothing, and take a sixth of its time.
    collects = gc.isenabled()
    gc.disable()
    hidden = [name for name in UNNEEDED if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # `import` raises ModuleNotFoundError
    try:
        for name in names:
            importlib.import_module(name)
    finally:
        for name in hidden:
            del sys.modules[name]
        gc.freeze()
        if collects:
            gc.enable()
