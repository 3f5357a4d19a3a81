"""`edl worker`: one worker process, from its first word to its last.

Exit codes: 0 told to stop; 1 failed, and said why; 3 the master is gone or gave us up;
75 could not get out of a ring that its peers broke.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import traceback
from pathlib import Path

from edl.contract.exit_codes import WorkerExit
from edl.contract.proto import edl_pb2 as pb
from edl.errors import EdlError
from trainer.session.client import NoMaster, Session


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="edl worker", description=__doc__)
    # A pod says in its environment who it is: one template serves all workers, only the id differs.
    address, worker = os.environ.get("EDL_MASTER", ""), os.environ.get("EDL_WORKER_ID", "-1")
    parser.add_argument("--master", required=not address, default=address, metavar="HOST:PORT")
    parser.add_argument(
        "--worker", type=int, default=worker, metavar="ID", help="default: any that is wanted"
    )
    parser.add_argument("--run-id", default=os.environ.get("EDL_RUN_ID", ""))
    args = parser.parse_args(argv)
    # SIGTERM is waited for on a thread: the main thread may be in a collective or in the
    # user's code. Blocked before any other thread exists, so that none of them gets it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    link = Session(args.master, os.environ.get("EDL_TOKEN", ""), args.worker, args.run_id)
    threading.Thread(target=_leave_on_sigterm, args=(link,), name="sigterm", daemon=True).start()
    try:
        link.open()
        code = _work(link)
    except NoMaster as error:
        print(f"edl worker {args.worker}: {error}", file=sys.stderr)
        code = WorkerExit.LOST
    except Exception as error:
        _last_words(link, error)
        code = WorkerExit.FAILED
    link.close()
    # Not sys.exit: TensorFlow's and the user's threads have nothing left to say, and a
    # broken ring's engine must not be torn down by static destructors.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _leave_on_sigterm(link: Session) -> None:
    while True:
        signal.sigwait({signal.SIGTERM})
        print("SIGTERM: leaving at the next step boundary", file=sys.stderr, flush=True)
        link.say(leaving=pb.Leaving(why="SIGTERM"))


def _last_words(link: Session, error: Exception) -> None:
    """Tell the master, once, why this worker cannot go on."""
    text = "".join(traceback.format_exception(error))
    print(text, file=sys.stderr)
    ours = isinstance(error, EdlError)
    fatal = ours or type(error).__name__ == "NonFinite"
    why = str(error) if fatal else f"{type(error).__name__}: {error}".splitlines()[0]
    link.say(failed=pb.Failed(why=why, traceback="" if ours else text, fatal=fatal))


def _work(link: Session) -> int:
    """Build, warm up, say ready, and train until told to stop."""
    import keras
    import numpy as np
    import tensorflow as tf

    from edl import config as config_module
    from edl.contract.shuffle import Order
    from trainer import control, user_model
    from trainer.data import Source
    from trainer.export import evaluate, save
    from trainer.learner import Learner
    from trainer.ring.horovod import HorovodRing
    from trainer.worker import Worker

    config = config_module.parse(json.loads(link.config_json))
    if config.local.threads:
        tf.config.threading.set_intra_op_parallelism_threads(config.local.threads)
        tf.config.threading.set_inter_op_parallelism_threads(1)
    keras.utils.set_random_seed(config.training.seed)

    module = user_model.load(config.model.module, config.model.source)
    model, reader = module.model(), module.reader("train")
    assert reader is not None
    size = len(reader)
    order = Order(size, config.training.seed, config.data.block_records, config.data.shuffle)
    source = Source(reader, order, module.feed, module.name)
    sample = source.plain(0, min(size, 2)) if size else None
    learner = Learner(model, sample)

    interface, port = os.environ.get("EDL_RING_INTERFACE", "lo"), int(link.address.rpartition(":")[2])
    ring = HorovodRing(link.store_port, interface, f"worker-{link.worker}", port)
    link.cut = ring.cut
    # One step in a ring of one: everything is built, traced and touched before others wait for us.
    ring.form(0, 1)
    if sample is not None:
        before = learner.state()
        total = ring.reduce(learner.gradients(sample, control.write(0, 1, sample.positions, False), 0, 0))
        learner.agreed(total)
        learner.update(total)
        ring.reduce(learner.nothing(control.write(0, 1, None, False)))
        learner.load(before)
    ring.broadcast(np.zeros(1, np.uint8), 0)
    ring.broadcast(np.zeros(1, np.int64), 0)
    ring.close()

    def export() -> tuple[dict[str, float], str]:
        metrics = evaluate(model, module, module.reader("test"))
        return metrics, save(model, Path(link.output), link.worker) if link.output else ""

    link.start_heartbeats(config.elastic.heartbeat_timeout_seconds / 6)
    link.say(ready=pb.Ready(records=size))
    end = Worker(config, link, ring, learner, source, size, export).train()
    print(f"edl worker {link.worker}: {end.why}", file=sys.stderr)
    return WorkerExit.LOST if end.lost else WorkerExit.STOPPED


if __name__ == "__main__":
    sys.exit(main())
