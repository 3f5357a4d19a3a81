"""How the product starts Python processes that run its own modules."""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from edl.errors import ConfigError

PACKAGES = ("edl", "master", "ps", "trainer")  # at the top level, of the product
_ROOT = Path(__file__).parents[2]


def module_command(module: str) -> list[str]:
    """Return the command that runs a module of the product in a process of its own.

    Python is started with -P: `python -m` alone would look in the current folder before all else, and a
    trainer.py or logging.py of the user that lies there would run instead of the product's. The variable
    PYTHONSAFEPATH would do the same, but programs that user code starts would inherit it and would no longer
    find the modules beside them.

    Paths and text are UTF-8 in all processes that edl starts on one machine, whatever the locale is
    (-X utf8): with the ASCII of LC_ALL=C and PYTHONUTF8=0, the path of a folder could not be sent to another
    process.

    Raises:
        ConfigError: a folder in PYTHONPATH holds a module that has the name of one of our packages.
    """
    _refuse_hidden()
    return [sys.executable, "-P", "-X", "utf8", "-m", module]


def _refuse_hidden() -> None:
    if not (variable := os.environ.get("PYTHONPATH")):
        return
    # Python takes an empty entry, as in PYTHONPATH=:/lib, for the current folder.
    folders = [os.path.abspath(folder) for folder in variable.split(os.pathsep)]
    for package in PACKAGES:
        found = PathFinder.find_spec(package, folders)
        if found is None or found.origin is None:
            continue
        if Path(found.origin).resolve() != (_ROOT / package / "__init__.py").resolve():
            raise ConfigError(
                f"PYTHONPATH: {found.origin} hides edl's own package {package!r}; rename it, or remove its "
                "folder from PYTHONPATH (an empty entry means the current folder)"
            )
