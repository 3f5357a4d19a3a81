"""`helm test`: does a release's master answer who knows the token, refuse others, and does its job move?

    python -m edl.probe --seconds 240      address and token are in EDL_MASTER and EDL_TOKEN

Promise: exit code 0 only if records were trained on while it looked, or there was nothing to train (the
job has Succeeded, is suspended, or should have no workers). Whatever else is said in one line, with code 1.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

from edl.cli.client import Client
from edl.contract import artifacts
from edl.errors import EdlError

LOOK_AGAIN_SECONDS = 1.0
ANSWER_SECONDS = 30.0  # a master that is elsewhere by now answers within this
UNDER_WAY = ("Starting", "Training", "Waiting", "Finishing", "Ending")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="edl.probe", description=__doc__)
    parser.add_argument("--seconds", type=float, default=240.0, help="how long the job may take to move")
    args = parser.parse_args(argv)
    address, token = os.environ.get("EDL_MASTER", ""), os.environ.get("EDL_TOKEN", "")
    try:
        print(probe(address, token, args.seconds))
    except EdlError as error:
        print(f"edl.probe: {error}", file=sys.stderr)
        return 1
    return 0


def probe(address: str, token: str, seconds: float) -> str:
    """What was seen, if all is well.

    Raises:
        EdlError: the master does not answer, lets a stranger in, or its job does not move in time.
    """
    until = time.monotonic() + seconds
    first = _ask(address, token, until)
    _stranger_is_refused(address, token)
    status = first
    while not (well := _well(first, status)):
        if status["phase"] not in UNDER_WAY:
            raise EdlError(f"the job has ended: {status['phase']}: {status['reason']}")
        if time.monotonic() > until:
            ring = sum(w["rank"] is not None for w in status["workers"])
            raise EdlError(
                f"nothing was trained on for {seconds:g} s: the job is {status['phase']}, with {ring} of "
                f"{status['target']} workers in the ring; {status['reason']}"
            )
        time.sleep(LOOK_AGAIN_SECONDS)
        status = _ask(address, token, until)
    return well


def _well(first: dict[str, Any], status: dict[str, Any]) -> str:
    """Why all is well, or nothing."""
    before, now = first["records"]["applied"], status["records"]["applied"]
    if status["phase"] in ("Succeeded", "Suspended"):
        return f"the master answers, the job is {status['phase']}"
    if status["target"] == 0:
        return "the master answers; the job should have no workers"
    return f"the master answers, and {now - before} records were trained on meanwhile" if now > before else ""


def _ask(address: str, token: str, until: float) -> dict[str, Any]:
    """The job's status; a master that is just starting is asked again."""
    client = Client(artifacts.Contact(address, token, 0))
    until = min(until, time.monotonic() + ANSWER_SECONDS)
    while True:
        try:
            return client.status()
        except EdlError as error:
            if time.monotonic() > until or "no master answers" not in str(error):
                raise
        time.sleep(LOOK_AGAIN_SECONDS)


def _stranger_is_refused(address: str, token: str) -> None:
    for stranger in ("", f"{token[::-1]}x"):
        try:
            Client(artifacts.Contact(address, stranger, 0)).status()
        except EdlError as error:
            if "token" in str(error):
                continue
            raise
        raise EdlError("the master answers also who does not know the token")


if __name__ == "__main__":
    sys.exit(main())
