"""The `edl` command. It talks to a master and starts the sides as processes; it decides nothing.

app      what there is: one module a group of commands
"""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

INTERRUPTED = 128 + signal.SIGINT


def main() -> None:
    """The console script. Our own errors are one text; any other is a bug and keeps its traceback."""
    if sys.getfilesystemencoding() != "utf-8":  # LC_ALL=C PYTHONUTF8=0: see edl/contract/own_modules.py
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    for name in ("stdin", "stdout", "stderr"):  # of these, a closed one (`>&-`) is None, in this order
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))
    try:
        # What somebody else wrote may hold what no encoding has: halves of surrogate pairs.
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        _run()
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    finally:
        _flush()


def _run() -> None:
    from edl.cli.app import app  # takes a moment, in which an interrupt is to be one, and no traceback
    from edl.errors import ConfigError, EdlError, ModelError

    try:
        app(prog_name="edl")
    except (ConfigError, ModelError) as error:
        _fail(str(error).replace("\n", "\nedl: "), 2)
    except EdlError as error:
        _fail(str(error), 1)


def _fail(text: str, code: int) -> NoReturn:
    from edl.text import plain

    print(f"edl: {plain(text)}", file=sys.stderr)
    raise SystemExit(code)


def _flush() -> None:
    """Have what was printed read, if anybody still reads it: `edl status | head -1` is no error."""
    try:
        sys.stdout.flush()
    except OSError:  # Python would try again when it exits, and complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
