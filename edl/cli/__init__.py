# SPDX-License-Identifier: Apache-2.0
"""The `edl` command. It calls a master, and starts the processes of a job; it makes no decisions.

app      all commands: one module per group of commands
"""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

INTERRUPTED = 128 + signal.SIGINT


def main() -> None:
    """Run the console script. Errors of edl are printed as text; others are bugs and keep their traceback.

    Raises:
        SystemExit: the command was interrupted with Ctrl-C.
    """
    if sys.getfilesystemencoding() != "utf-8":  # LC_ALL=C PYTHONUTF8=0: see edl/contract/own_modules.py
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    for name in ("stdin", "stdout", "stderr"):  # a closed one (`>&-`) is None; open them in this order
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))
    try:
        # Foreign text may hold halves of surrogate pairs, which no encoding has.
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        _run()
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    finally:
        _flush()


def _run() -> None:
    from edl.cli import completion
    from edl.cli.app import app  # imported late, so that Ctrl-C during the import prints no traceback
    from edl.errors import ConfigError, EdlError, ModelError

    if completion.VARIABLE in os.environ:
        completion.prepare()
    try:
        app(prog_name="edl")
    except (ConfigError, ModelError) as error:
        _fail(str(error).replace("\n", "\nedl: "), 2)
    except EdlError as error:
        _fail(str(error), 1)
    except OSError as error:
        if error.filename is None:
            raise
        _fail(f"{error.filename}: {error.strerror}", 1)  # a file that the user has named, or that is below it


def _fail(text: str, code: int) -> NoReturn:
    from edl.formatting import plain

    print(f"edl: {plain(text)}", file=sys.stderr)
    raise SystemExit(code)


def _flush() -> None:
    """Flush the output. A closed pipe is not an error: `edl status | head -1`."""
    try:
        sys.stdout.flush()
    except OSError:  # Python would try again on exit, and print an error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
