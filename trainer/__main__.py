# SPDX-License-Identifier: Apache-2.0
"""`edl worker`: one worker process, from its first word to its last.

Exit codes: 0 the master has ended it; 1 failed, and said why; 3 the master cannot be reached, or has
given this worker up; 4 the master does not know its token any more; 75 could not get out of a ring that its
peers broke.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from edl import full_disk, integrations
from edl.contract import vital
from edl.contract.exit_codes import WorkerExit
from edl.contract.gpus import use_gpu
from edl.contract.proto import edl_pb2 as pb
from edl.contract.tokens import token_of_environment
from edl.contract.workers import ASKED_BACKEND, WORKER_ENVIRONMENT, remove_leftovers, respect_backend
from edl.exit_announcements import announce_as_told
from edl.trainer.records import fork_server
from edl.trainer.runtime.error_report import format_traceback
from edl.trainer.runtime.keras_import import import_keras
from edl.trainer.runtime.termination import (
    become_subreaper,
    call_handler_of_user,
    end_children,
    leave,
    when_asked_to_end,
)
from edl.trainer.session.client import MasterStream, NoMaster

if TYPE_CHECKING:
    from edl.trainer.session.state import Session
    from edl.trainer.worker import Worker

LOOK_SECONDS = 0.5  # between two looks of a worker that has been asked to end


def main(argv: list[str] | None = None) -> int:
    """Run one worker until its job ends or it is asked to leave. Return the process' exit code."""
    parser = argparse.ArgumentParser(prog="edl worker", description=__doc__)
    # A pod's environment has the worker's id: one template serves all workers, only the id differs.
    address, worker = os.environ.get("EDL_MASTER", ""), os.environ.get("EDL_WORKER_ID", "-1")
    parser.add_argument("--master", required=not address, default=address, metavar="HOST:PORT")
    parser.add_argument("--worker", type=int, default=worker, metavar="ID", help="default: any vacant one")
    parser.add_argument("--run-id", default=os.environ.get("EDL_RUN_ID", ""))
    parser.add_argument("--predecessor", type=_predecessor, help=argparse.SUPPRESS)  # of trainer.supervisor
    # A place on a GPU, as the master has dealt it out (local.gpusPerWorker).
    parser.add_argument("--gpu", default="", help=argparse.SUPPRESS)
    parser.add_argument("--nccl-host", default="", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    use_gpu(os.environ, args.gpu, args.nccl_host)  # TensorFlow may be imported; it looks for GPUs later
    announce_as_told()
    become_subreaper()
    fork_server.prepare()  # before any thread
    full_disk.outlive()
    asked = os.environ.setdefault(ASKED_BACKEND, os.environ.get("KERAS_BACKEND", ""))
    leftovers = remove_leftovers(os.environ)
    os.environ.update(WORKER_ENVIRONMENT)  # for Keras, which is not imported yet; hashes are seeded earlier
    token, worker_id = token_of_environment(), -1 if args.predecessor else args.worker
    stream = MasterStream(args.master, token, worker_id, args.run_id, predecessor=args.predecessor)
    start = Start(stream)

    def end(error: BaseException) -> None:
        _fail(stream, error)
        _exit(WorkerExit.FAILED)

    vital.end_with_threads(end)
    when_asked_to_end(start.asked_to_end)
    try:
        code = work(stream, start, asked, leftovers)
    except NoMaster as error:
        print(f"edl worker {args.worker}: {error}", file=sys.stderr)
        code = _lost(str(error))
    except BaseException as error:  # SystemExit too: every error of the user's code ends the worker
        _fail(stream, error)
        _exit(WorkerExit.FAILED)
    stream.close()
    _exit(code)


def _fail(stream: MasterStream, error: BaseException) -> None:
    """Report the exception that ends this worker to its log and to the master."""
    stream.session.fail(error)
    stream.close()
    print(format_traceback(error), file=sys.stderr)  # last: a master that was not told reads it there


def _predecessor(text: str) -> pb.Predecessor:
    return pb.Predecessor(**json.loads(text))


def work(
    stream: MasterStream,
    start: Start,
    backend: str = "",
    leftovers: Sequence[str] = (),
) -> int:
    """Connect to the master, build, warm up, report ready, and train until the end; returns the exit code.

    Args:
        backend: the Keras backend that the environment has requested.
        leftovers: lines about variables of other launchers that were removed.
    """
    stream.open()
    start.begin()
    for line in leftovers if stream.runs_preflight else ():
        stream.session.warn(line)

    def ready(worker: Worker) -> None:
        elastic = config.parse(json.loads(stream.config_json)).elastic
        start.over(elastic.grace_period_seconds)
        stream.start_heartbeats(elastic.heartbeat_timeout_seconds)
        stream.session.say(ready=worker.ready())

    def ended(worker: Worker) -> None:
        code = _train(stream.session, worker)
        stream.close()
        _exit(code)

    from edl import config

    values = json.loads(stream.config_json)
    program = integrations.WORKERS.get(values["mode"])
    if program or values["model"].get("script") or not values["data"]["workers"]:
        fork_server.drop_prepared()
    if not program and values["model"].get("script"):
        respect_backend(os.environ)
        from edl.trainer.script import work as run_script

        run_script(stream, ready, ended)
    if stream.runs_preflight and backend not in ("", WORKER_ENVIRONMENT["KERAS_BACKEND"]):
        stream.session.warn(
            f"KERAS_BACKEND is {backend}, and edl trains with Keras' TensorFlow backend: it is not used"
        )
    # The imports take seconds, in which the master already knows of this worker.
    import_keras()
    if program:
        run_program = integrations.load(program, f"mode={values['mode']}")
        return int(run_program(stream, start.over, _lost))
    from edl.trainer.start.build import build

    worker = build(stream)
    ready(worker)
    return _train(stream.session, worker)


def _train(session: Session, worker: Worker) -> int:
    """Follow the master's orders until the end; returns the exit code."""
    end = worker.train()
    print(f"edl worker {session.worker}: {end.why}", file=sys.stderr)
    return _lost(end.why) if end.lost else WorkerExit.STOPPED


class Start:
    """A worker's time before it is ready, in which a request to end it ends the process at once.

    There is nothing to lose then, and Python can interrupt neither the import of TensorFlow nor the tracing
    of a large model.
    """

    def __init__(self, stream: MasterStream):
        self._stream = stream
        # Held while one thread ends this process; for ever, once the worker is ready.
        self._mine = threading.Lock()
        self._grace_seconds = 0.0  # for leaving, once the worker is ready

    def begin(self) -> None:
        """The master knows of this worker, and may end it."""
        session = self._stream.session
        session.when_ended(self._on_end)
        if session.stopped or session.ended:  # before it was listened to
            self._on_end()

    def over(self, grace_seconds: float) -> None:
        """The start is over: from now on the worker's loop acts on requests to end.

        Args:
            grace_seconds: how long a worker that is asked to end may take for a step.
        """
        self._grace_seconds = grace_seconds
        self._mine.acquire()

    def asked_to_end(self, signal: str) -> None:
        """Handle SIGTERM: leave at a step boundary, or exit if the worker is not built yet."""
        print(f"{signal}: leaving at the next step boundary", file=sys.stderr, flush=True)
        self._stream.session.say(leaving=pb.Leaving(why=signal))
        if self._mine.acquire(blocking=False):
            self._stream.close(1.0)
            _exit(WorkerExit.STOPPED)
        self._leave()

    def _leave(self) -> None:
        """Break the ring if no step boundary comes soon; the others then repeat the step in flight.

        Records and servers are not waited for: a server may need the room that this worker is to leave.
        """
        session = self._stream.session
        generation, deadline = session.state.generation, time.monotonic() + self._grace_seconds
        while time.monotonic() < deadline:
            if what := session.held_up(LOOK_SECONDS):
                print(f"leaving now: {what}", file=sys.stderr)
                session.break_ring()
                return
            time.sleep(LOOK_SECONDS)  # no event says that a call is waiting; this process may end meanwhile
        if session.state.is_inside(generation):
            print(f"leaving now: the step takes more than {self._grace_seconds:g} s", file=sys.stderr)
            session.break_ring()

    def _on_end(self) -> None:
        if self._mine.acquire(blocking=False):
            session = self._stream.session
            print(f"edl worker {session.worker}: ended while it started", file=sys.stderr)
            _exit(WorkerExit.STOPPED if session.stopped else _lost(session.ended))


def _lost(why: str) -> WorkerExit:
    """The exit code of a worker without a master: a token that was changed meanwhile is no failure."""
    return WorkerExit.UNAUTHENTICATED if why.startswith("UNAUTHENTICATED") else WorkerExit.LOST


def _exit(code: int) -> NoReturn:
    call_handler_of_user()
    end_children()
    sys.stdout.flush()
    sys.stderr.flush()
    leave(code)


if __name__ == "__main__":
    sys.exit(main())
