"""`edl worker`: one worker process, from its first word to its last.

Exit codes: 0 the master has ended it; 1 failed, and said why; 3 the master cannot be reached, or has
given this worker up; 75 could not get out of a ring that its peers broke.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import traceback

from edl.contract.exit_codes import WorkerExit
from edl.contract.proto import edl_pb2 as pb
from trainer.session.client import MasterStream, NoMaster

HEARTBEATS = 6  # in the time after which the master takes a worker for dead


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="edl worker", description=__doc__)
    # A pod says in its environment who it is: one template serves all workers, only the id differs.
    address, worker = os.environ.get("EDL_MASTER", ""), os.environ.get("EDL_WORKER_ID", "-1")
    parser.add_argument("--master", required=not address, default=address, metavar="HOST:PORT")
    parser.add_argument("--worker", type=int, default=worker, metavar="ID", help="default: any vacant one")
    parser.add_argument("--run-id", default=os.environ.get("EDL_RUN_ID", ""))
    args = parser.parse_args(argv)
    # SIGTERM is waited for on a thread: the main thread may be in a collective or in the
    # user's code. Blocked before any other thread exists, so that none of them gets it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    stream = MasterStream(args.master, os.environ.get("EDL_TOKEN", ""), args.worker, args.run_id)
    threading.Thread(target=_leave_on_sigterm, args=(stream,), name="sigterm", daemon=True).start()
    try:
        code = work(stream)
    except NoMaster as error:
        print(f"edl worker {args.worker}: {error}", file=sys.stderr)
        code = WorkerExit.LOST
    except Exception as error:
        traceback.print_exception(error)
        stream.session.fail(error)
        code = WorkerExit.FAILED
    stream.close()
    # Not sys.exit: TensorFlow's and the user's threads have nothing left to say, and a
    # broken ring's engine must not be torn down by static destructors.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def work(stream: MasterStream) -> int:
    """Greet the master, build, warm up, say ready, and train until told to stop; returns the exit code."""
    stream.open()
    from trainer.build import build  # takes seconds, in which the master already knows of this worker

    worker = build(stream)
    stream.start_heartbeats(worker.config.elastic.heartbeat_timeout_seconds / HEARTBEATS)
    stream.session.say(ready=pb.Ready(records=worker.batches.epoch_size, model=worker.learner.fingerprint()))
    end = worker.train()
    print(f"edl worker {stream.session.worker}: {end.why}", file=sys.stderr)
    return WorkerExit.LOST if end.lost else WorkerExit.STOPPED


def _leave_on_sigterm(stream: MasterStream) -> None:
    while True:
        signal.sigwait({signal.SIGTERM})
        print("SIGTERM: leaving at the next step boundary", file=sys.stderr, flush=True)
        stream.session.say(leaving=pb.Leaving(why="SIGTERM"))


if __name__ == "__main__":
    sys.exit(main())
