# SPDX-License-Identifier: Apache-2.0
"""`helm test`: a release's master answers, refuses callers without the token, and its job makes progress.

    python -m edl.net.probe --seconds 240      reads the address and the token from EDL_MASTER and EDL_TOKEN,
                                           and from EDL_TLS_CA the CA certificate for TLS

Promise: exit code 0 only if records were trained on while the probe watched, or if there was nothing to
train (the job has Succeeded or is suspended). Any other finding is printed as one
line, with exit code 1.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

from edl.contract import artifacts
from edl.contract.modes import HOROVOD
from edl.contract.phases import ENDED, Phase
from edl.contract.tokens import token_of_environment
from edl.errors import EdlError, MasterUnavailable, Unauthenticated
from edl.net import tls
from edl.net.master_client import Client

POLL_SECONDS = 1.0
ANSWER_SECONDS = 30.0  # a master that Kubernetes moves to a different node answers within this time
UNDER_WAY = frozenset(Phase) - ENDED - {Phase.Suspended}


def main(argv: list[str] | None = None) -> int:
    """Run the probe. Return the exit code: 0 if the job makes progress."""
    parser = argparse.ArgumentParser(prog="edl.net.probe", description=__doc__)
    parser.add_argument(
        "--seconds", type=float, default=240.0, help="how long to wait for the job to make progress"
    )
    args = parser.parse_args(argv)
    address, token = os.environ.get("EDL_MASTER", ""), token_of_environment()
    try:
        print(probe(address, token, args.seconds))
    except EdlError as error:
        print(f"edl.net.probe: {error}", file=sys.stderr)
        return 1
    return 0


def probe(address: str, token: str, seconds: float) -> str:
    """Describe why the job is healthy.

    Raises:
        EdlError: the master does not answer, accepts a wrong token, or its job makes no progress in time.
    """
    until = time.monotonic() + seconds
    first = _status(address, token, until)
    _check_wrong_tokens(address, token)
    status = first
    while not (healthy := _healthy(first, status)):
        if status["phase"] not in UNDER_WAY:
            raise EdlError(f"the job has ended: {status['phase']}: {status['reason']}")
        if time.monotonic() > until:
            ring = sum(w["rank"] is not None for w in status["workers"])
            raise EdlError(
                f"the job made no progress in {seconds:g} s: it is {status['phase']} with {ring} of "
                f"{status['target']} workers in the ring; {status['reason']}"
            )
        time.sleep(POLL_SECONDS)
        status = _status(address, token, until)
    return healthy


def _healthy(first: dict[str, Any], status: dict[str, Any]) -> str:
    """Why the job is healthy; empty if that is unknown."""
    if status["phase"] in (Phase.Succeeded, Phase.Suspended):
        return f"the master answers; the job is {status['phase']}"
    if status["phase"] in ENDED:
        return ""
    before, now = first["records"]["applied"], status["records"]["applied"]
    what = "commits were made" if status["task"]["kind"] == HOROVOD else "records were trained on"
    return f"the master answers; {now - before} {what} meanwhile" if now > before else ""


def _status(address: str, token: str, until: float) -> dict[str, Any]:
    """Get the job's status, with retries while the master does not answer yet.

    Raises:
        MasterUnavailable: the master has not answered in time.
    """
    client = Client(artifacts.Contact(address, token, 0, tls.authority()))
    until = min(until, time.monotonic() + ANSWER_SECONDS)
    while True:
        try:
            return client.status()
        except MasterUnavailable:
            if time.monotonic() > until:
                raise
        time.sleep(POLL_SECONDS)


def _check_wrong_tokens(address: str, token: str) -> None:
    """Check that the master refuses a call without a token, and a call with a wrong token.

    Raises:
        EdlError: the master accepts one of these calls.
    """
    for wrong in ("", f"{token[::-1]}x"):
        try:
            Client(artifacts.Contact(address, wrong, 0, tls.authority())).status()
        except Unauthenticated:
            continue
        raise EdlError("the master answers callers that do not have the job's token")


if __name__ == "__main__":
    sys.exit(main())
