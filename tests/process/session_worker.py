"""A worker without a model: a real session with its masters, and a ring in which nothing is summed.

Each message that it obeys is a line of JSON: when, of which master (term), what, and in which generation.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from dataclasses import asdict
from typing import NoReturn

from edl.contract.layout import Layout
from edl.contract.proto import edl_pb2 as pb
from trainer.session.client import MasterStream
from trainer.session.orders import End, FormRing
from trainer.session.state import Progress

STEP_SECONDS = 0.05
LAYOUT = Layout(1_000_000)


class Telling(MasterStream):
    """Tells of what it obeys."""

    def _hear(self, message: pb.ToWorker) -> None:
        told = {
            "at": time.monotonic(), "worker": self.session.worker, "term": message.term,
            "what": message.WhichOneof("body"), "generation": message.generation,
        }  # fmt: skip
        if message.WhichOneof("body") == "form":
            told["members"] = list(message.form.members)
        print(json.dumps(told), flush=True)
        super()._hear(message)


def main(address: str, worker: int) -> NoReturn:
    stream = Telling(address, os.environ["EDL_TOKEN"], worker, "")
    stream.open()
    session = stream.session
    stream.start_heartbeats(0.5)
    session.say(ready=pb.Ready(layout=pb.Layout(**asdict(LAYOUT)), model="none"))
    step, broken = 0, threading.Event()
    session.cuts(broken.set)
    while True:
        order = session.next_order()
        match order:
            case FormRing():
                broken.clear()
                session.say(order.generation, joined_ring=pb.JoinedRing(step=step))
                session.say(order.generation, stepped=pb.Stepped(step=step))
                while not (session.must_leave(order.generation) or session.was_cut(order.generation)):
                    step += 1
                    session.progress = Progress(order.generation, step, step, 1.0)
                    broken.wait(STEP_SECONDS)
                why = "cut" if session.was_cut(order.generation) else ""
                session.say(order.generation, left_ring=pb.LeftRing(step=step, has_state=True, broken=why))
            case End():
                stream.close()
                os._exit(0 if session.stopped else 3)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
