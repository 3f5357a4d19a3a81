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
from dataclasses import asdict
from typing import NoReturn

from edl import full_disk
from edl.contract.exit_codes import WorkerExit
from edl.contract.proto import edl_pb2 as pb
from edl.contract.workers import ASKED_BACKEND, WORKER_ENVIRONMENT
from edl.exit_announcements import announce_as_told
from trainer.last_words import traced
from trainer.memory_copy import MemoryCopy
from trainer.session.client import MasterStream, NoMaster
from trainer.termination import become_subreaper, end_children, leave, when_asked_to_end

HEARTBEATS = 6  # in the time after which the master takes a worker for dead


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="edl worker", description=__doc__)
    # A pod says in its environment who it is: one template serves all workers, only the id differs.
    address, worker = os.environ.get("EDL_MASTER", ""), os.environ.get("EDL_WORKER_ID", "-1")
    parser.add_argument("--master", required=not address, default=address, metavar="HOST:PORT")
    parser.add_argument("--worker", type=int, default=worker, metavar="ID", help="default: any vacant one")
    parser.add_argument("--run-id", default=os.environ.get("EDL_RUN_ID", ""))
    parser.add_argument("--succeeds", type=_succession, help=argparse.SUPPRESS)  # of trainer.supervisor
    parser.add_argument("--memory", type=MemoryCopy, help=argparse.SUPPRESS)  # of who keeps it: a path
    args = parser.parse_args(argv)
    announce_as_told()
    become_subreaper()
    full_disk.outlive()
    asked = os.environ.pop(ASKED_BACKEND, os.environ.get("KERAS_BACKEND", ""))
    os.environ.update(WORKER_ENVIRONMENT)  # for Keras, which is not imported yet; hashes are seeded earlier
    token, worker_id = os.environ.get("EDL_TOKEN", ""), -1 if args.succeeds else args.worker
    brings_state = args.memory is not None and args.memory.is_there
    stream = MasterStream(
        args.master, token, worker_id, args.run_id, succeeds=args.succeeds, brings_state=brings_state
    )
    start = Start(stream)
    when_asked_to_end(start.asked_to_end)
    try:
        code = work(stream, start, args.memory, asked)
    except NoMaster as error:
        print(f"edl worker {args.worker}: {error}", file=sys.stderr)
        code = _lost(str(error))
    except BaseException as error:  # SystemExit too: whatever the user's code raises is its last word
        print(traced(error), file=sys.stderr)
        stream.session.fail(error, starting=start.starts)
        code = WorkerExit.FAILED
    stream.close()
    _exit(code)


def _succession(text: str) -> pb.Succession:
    return pb.Succession(**json.loads(text))


def work(stream: MasterStream, start: Start, memory: MemoryCopy | None = None, backend: str = "") -> int:
    """Greet the master, build, warm up, say ready, and train until told to stop; returns the exit code.

    Args:
        backend: of Keras, that the environment has asked for.
    """
    stream.open()
    start.begin()
    if stream.rehearses and backend not in ("", WORKER_ENVIRONMENT["KERAS_BACKEND"]):
        stream.session.warn(
            f"KERAS_BACKEND is {backend}, and edl trains with Keras' TensorFlow backend: it is not used"
        )
    from trainer.build import build  # takes seconds, in which the master already knows of this worker

    worker = build(stream, memory)
    start.over()
    stream.start_heartbeats(worker.config.elastic.heartbeat_timeout_seconds / HEARTBEATS)
    begins_from, found = worker.checkpoints.newest(worker.batches.layout) if worker.checkpoints else (0, None)
    layout = pb.Layout(**asdict(found or worker.batches.layout))
    model = worker.learner.fingerprint()
    held = worker.begin_from_memory()
    held_out = worker.rounds.sizes
    forced = worker.checkpoints.forced if worker.checkpoints else ()
    ready = pb.Ready(
        layout=layout, model=model, checkpoint=begins_from, held_out=held_out, forced=forced, held=held,
        tables=len(worker.learner.tables),
    )  # fmt: skip
    stream.session.say(ready=ready)
    end = worker.train()
    print(f"edl worker {stream.session.worker}: {end.why}", file=sys.stderr)
    return _lost(end.why) if end.lost else WorkerExit.STOPPED


class Start:
    """A worker's time before it is ready. There is nothing to lose then, and the import of TensorFlow, or the
    tracing of a large model, does not listen to anybody: who is asked to end ends at once."""

    def __init__(self, stream: MasterStream):
        self._stream = stream
        self.starts = True  # and is not ready yet
        self._mine = threading.Lock()  # held by who ends this process now; or for ever, once it is ready

    def begin(self) -> None:
        """The master knows of this worker, and may end it."""
        session = self._stream.session
        session.when_ended(self._on_end)
        if session.stopped or session.ended:  # before it was listened to
            self._on_end()

    def over(self) -> None:
        """From now on the worker's loop acts on what it is told."""
        self.starts = False
        self._mine.acquire()

    def asked_to_end(self, signal: str) -> None:
        print(f"{signal}: leaving at the next step boundary", file=sys.stderr, flush=True)
        self._stream.session.say(leaving=pb.Leaving(why=signal))
        if self._mine.acquire(blocking=False):
            self._stream.close(1.0)
            _exit(WorkerExit.STOPPED)

    def _on_end(self) -> None:
        if self._mine.acquire(blocking=False):
            session = self._stream.session
            print(f"edl worker {session.worker}: ended while it started", file=sys.stderr)
            _exit(WorkerExit.STOPPED if session.stopped else _lost(session.ended))


def _lost(why: str) -> WorkerExit:
    """How it ends without a master: nobody is to blame for a token that was changed meanwhile."""
    return WorkerExit.UNAUTHENTICATED if why.startswith("UNAUTHENTICATED") else WorkerExit.LOST


def _exit(code: int) -> NoReturn:
    end_children()
    sys.stdout.flush()
    sys.stderr.flush()
    leave(code)


if __name__ == "__main__":
    sys.exit(main())
