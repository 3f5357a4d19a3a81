# SPDX-License-Identifier: Apache-2.0
"""A worker without a model: a real session with its masters, and a ring in which nothing is summed, but that
is up only when all of its members have found each other, through the master as in Horovod's rendezvous.

It starts in a second, because it imports no TensorFlow, and it never finishes a job. Tests whose claims are
not about training use it, as a process or in a pod. In a pod, the environment names its master and worker id.

Each message that it obeys is a line of JSON: its time, its master's term, its kind, and its generation; and
so is each ring that is up (`up`), also when another master has it train on.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from edl import config
from edl.contract.layout import Layout
from edl.contract.proto import edl_pb2 as pb
from edl.contract.tokens import token_of_environment
from edl.trainer.runtime.termination import when_asked_to_end
from edl.trainer.session.client import MasterStream
from edl.trainer.session.orders import End, FormRing
from edl.trainer.session.state import Progress

STEP_SECONDS = 0.05
LAYOUT = Layout(1_000_000)


Told = dict[str, Any]


def told_in(folder: Path) -> list[Told]:
    """What all workers have told, each in a file of its own there, in the order of time."""
    lines = [line for file in folder.glob("worker-*") for line in file.read_text().splitlines(True)]
    return sorted(
        (json.loads(line) for line in lines if line[0] == "{" and line[-1] == "\n"), key=lambda t: t["at"]
    )


def check_terms(told: list[Told]) -> None:
    """Nothing of an older master came after the same of a newer one."""
    newest: Told = {"term": 0}
    for t in told:
        assert t["term"] >= newest["term"], (t, newest)
        newest = t


class Telling(MasterStream):
    """Tells of what it obeys."""

    def __init__(self, address: str, token: str, worker: int):
        super().__init__(address, token, worker, "")
        # The steps of the other members that were found, by generation and worker.
        self.found: defaultdict[int, dict[str, int]] = defaultdict(dict)
        self.terms: dict[int, int] = {}
        self.up: dict[int, list[int]] = {}  # the members of the ring that is up, by generation

    def tell(self, term: int, what: str, generation: int, members: list[int]) -> None:
        told = {
            "at": time.monotonic(),
            "worker": self.session.worker,
            "term": term,
            "what": what,
            "generation": generation,
            "members": members,
        }
        sys.stdout.write(json.dumps(told) + "\n")  # at once: two threads write
        sys.stdout.flush()

    def _hear(self, message: pb.ToWorker) -> None:
        what, generation = str(message.WhichOneof("body")), message.generation
        self.tell(message.term, what, generation, list(message.form.members))
        if what == "form":
            self.terms[generation] = message.term
        elif what == "train" and generation in self.up:
            self.tell(message.term, "up", generation, self.up[generation])
        elif what == "key_value":
            self.found[generation][message.key_value.key] = int(message.key_value.value)
        super()._hear(message)


def main(address: str, worker: int) -> NoReturn:
    stream = Telling(address, token_of_environment(), worker)
    stream.open()
    session = stream.session
    stream.start_heartbeats(config.parse(json.loads(stream.config_json)).elastic.heartbeat_timeout_seconds)
    when_asked_to_end(lambda signal: session.say(leaving=pb.Leaving(why=signal)))
    session.say(ready=pb.Ready(layout=pb.Layout(**asdict(LAYOUT)), model="none"))
    step, has_state, broken = 0, False, threading.Event()
    session.cuts(broken.set)
    while True:
        order = session.next_order()
        match order:
            case FormRing():
                generation = order.generation
                broken.clear()
                session.say(generation, key_value=pb.KeyValue(key=str(session.worker), value=b"%d" % step))
                up = False
                while not (session.must_leave(generation) or session.was_cut(generation)):
                    if not up and len(stream.found[generation]) == len(order.members) - 1:
                        up = has_state = True
                        step = max(step, *stream.found[generation].values(), order.step)
                        stream.up = {generation: list(order.members)}
                        stream.tell(stream.terms[generation], "up", generation, list(order.members))
                        session.say(generation, joined_ring=pb.JoinedRing(step=step))
                        session.say(generation, stepped=pb.Stepped(step=step))
                    if up:
                        step += 1
                        session.progress = Progress(generation, step, step, 1.0)
                    broken.wait(STEP_SECONDS)
                stream.up = {}
                why = "cut" if session.was_cut(generation) else ""
                session.say(generation, left_ring=pb.LeftRing(step=step, has_state=has_state, broken=why))
            case End():
                stream.close()
                os._exit(0 if session.stopped else 3)


if __name__ == "__main__":
    address, number = sys.argv[1:] or (os.environ["EDL_MASTER"], os.environ["EDL_WORKER_ID"])
    main(address, int(number))
