# SPDX-License-Identifier: Apache-2.0
"""Starting Python processes that run modules of the product."""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from edl.errors import ConfigError

_PACKAGE = Path(__file__).parents[1]


def module_command(module: str) -> list[str]:
    """Return the command that runs a module of the product in a process of its own.

    Python is started with -P: `python -m` alone would look in the current folder before all else, and an
    edl.py or logging.py of the user that lies there would run instead. The variable PYTHONSAFEPATH would do
    the same, but programs that user code starts would inherit it and would not find the modules beside them.

    Paths and text are UTF-8 in all processes that edl starts on one machine, in every locale
    (-X utf8): with the ASCII of LC_ALL=C and PYTHONUTF8=0, the path of a folder could not be sent to another
    process.

    Raises:
        ConfigError: a folder in PYTHONPATH holds another module `edl`.
    """
    _refuse_hidden()
    return [sys.executable, "-P", "-X", "utf8", "-m", module]


def _refuse_hidden() -> None:
    if not (variable := os.environ.get("PYTHONPATH")):
        return
    # Python takes an empty entry, as in PYTHONPATH=:/lib, for the current folder.
    folders = [os.path.abspath(folder) for folder in variable.split(os.pathsep)]
    found = PathFinder.find_spec("edl", folders)
    if found is None or found.origin is None:
        return
    if Path(found.origin).resolve() != (_PACKAGE / "__init__.py").resolve():
        raise ConfigError(
            f"PYTHONPATH: {found.origin} hides edl itself; rename it, or remove its folder from PYTHONPATH "
            "(an empty entry means the current folder)"
        )
