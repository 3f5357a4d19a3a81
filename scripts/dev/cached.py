#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What is made once and kept: all that lies in a cache is made here.

An entry, a file or a folder, is whole or not there. It is made aside, in a fresh folder beside it, and
renamed into its place; other processes that want it wait at its lock. A builder that fails or is killed
leaves nothing but its log: what it had begun is removed by the next builder in that cache.

    whole ──────────────────────────────────────────▶ its path
      └─no─▶ lock ──▶ make aside ──▶ rename ──▶ unlock ─┘

A folder is never replaced, so what it is made from belongs in its name. A file may stand for something
that lies elsewhere, as an image does in its builder's storage, and is made anew when `whole` says that
this has gone.

Bash scripts call `cached` of scripts/dev/lib.sh; `scripts/dev/cached.py --help` is what that calls. Only the
standard library, and no path but those that are given: it runs before anything is set up.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

ASIDE = ".making."
SIGN_OF_LIFE_SECONDS = 30


class NotMade(Exception):
    """A builder has failed; the text has the end of its log and says where the whole is."""


def cached(
    entry: Path,
    make: Callable[[Path], None],
    whole: Callable[[], bool] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Path:
    """The entry, made by `make` unless it is there.

    `make` is given the path to make, in a folder of its own where it may leave what it likes.

    Raises:
        NotMade: `make` has made nothing. What it raises itself is passed on.
    """
    whole = whole or entry.exists
    if whole():
        return entry
    with locked(entry, say):
        if whole():
            return entry
        _remove_leftovers(entry)
        aside = Path(tempfile.mkdtemp(prefix=entry.name + ASIDE, dir=entry.parent))
        try:
            made = aside / "made"
            make(made)
            if not made.exists():
                raise NotMade(f"{entry.name} was not made, though its builder reported no error")
            made.rename(entry)
        finally:
            _remove(aside)
    return entry


def builder(
    words: Sequence[str | Path],
    log: Path,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Callable[[Path], None]:
    """A builder that is a command. It finds the path to make in $made, the folder around it in $work."""

    def make(made: Path) -> None:
        where = {"made": str(made), "work": str(made.parent)}
        began = time.monotonic()
        with open(log, "wb") as output:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | (env or {}) | where,
                cwd=cwd,
                start_new_session=True,  # so that all of it can be ended
            )
            try:
                while True:
                    try:
                        code = process.wait(SIGN_OF_LIFE_SECONDS)
                        break
                    except subprocess.TimeoutExpired:
                        say(f"still at it after {time.monotonic() - began:.0f} s")
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                raise
        if code:
            end = log.read_text(encoding="utf-8", errors="replace")[-2000:].rstrip()
            raise NotMade(f"{end}\nthe builder exited with {code}; its whole log: {log}")

    return make


@contextmanager
def locked(entry: Path, say: Callable[[str], None] = lambda text: None) -> Iterator[None]:
    """The only one to have this entry's lock, whether or not there is such an entry.

    It is not inherited: processes that outlive a killed builder block no other builder.
    """
    entry.parent.mkdir(parents=True, exist_ok=True)
    with open(_lock_of(entry), "w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that makes {entry.name}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _lock_of(entry: Path) -> Path:
    return entry.with_name(entry.name + ".lock")


def _remove_leftovers(entry: Path) -> None:
    """Remove what dead builders have left beside the entry, also of unused entries.

    An entry whose lock can be acquired has no live builder; our own lock is held.
    """
    for left in entry.parent.glob(f"*{ASIDE}*"):
        other = left.with_name(left.name.rpartition(ASIDE)[0])
        with open(_lock_of(other), "w", encoding="utf-8") as file:
            try:
                if other != entry:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            _remove(left)


def _remove(folder: Path) -> None:
    """Not what is mounted in it, as a builder of images that was killed may have left it."""
    subprocess.run(["rm", "-rf", "--one-file-system", folder], stderr=subprocess.DEVNULL, check=False)


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description="Make ENTRY with BUILDER unless it is there, and print its path.",
        epilog="BUILDER makes what $made names; what it prints goes to ENTRY.log.",
    )
    parser.add_argument("--say", default="", metavar="TEXT", help="a message: SCRIPT: what is being made")
    parser.add_argument("--whole", metavar="COMMAND", help="exits 0 when ENTRY need not be made anew")
    parser.add_argument("--group", type=Path, metavar="NAME", help="of what one alone may be made at a time")
    parser.add_argument("entry", type=Path, metavar="ENTRY")
    parser.add_argument("builder", nargs="+", metavar="BUILDER")
    args = parser.parse_args(words)
    entry = args.entry.absolute()
    log = entry.with_name(entry.name + ".log")
    script = args.say.partition(":")[0] or entry.name

    def say(text: str) -> None:
        print(f"{script}: {text}", file=sys.stderr, flush=True)

    def whole() -> bool:
        return entry.exists() and (
            not args.whole
            or subprocess.run(["bash", "-c", args.whole], env=os.environ | {"entry": str(entry)}).returncode
            == 0
        )

    def make(made: Path) -> None:
        if args.say:
            print(f"{args.say}; log: {log}", file=sys.stderr, flush=True)
        builder(args.builder, log, say=say)(made)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # and the builder ends, too
    try:
        with locked(args.group, say) if args.group else nullcontext():
            print(cached(entry, make, whole, say))
    except NotMade as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
