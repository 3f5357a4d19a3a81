# SPDX-License-Identifier: Apache-2.0
"""The counting model, which does as files bid it: it idles until one says go, it eats all memory for another.

So a test has all the time it needs to do something to the job, and none is lost afterwards. Where there is a
folder for it, each worker also writes down which master it obeys, as lines of JSON (`session_worker`).
"""

import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from edl.contract.proto import edl_pb2 as pb
from edl.trainer.session.client import MasterStream
from edl.zoo.counting import data, model
from edl.zoo.counting import feed as plain_feed

__all__ = ["data", "feed", "model"]

GO = Path("/var/lib/edl/go")  # in the output directory: for all workers at once
OBEYED = Path("/var/lib/edl/obeyed")  # there, too: a folder, to write down in
EAT = Path("/tmp/eat")  # in one worker's container
IDLE_SECONDS = 0.5  # in each step


def feed(records: tuple[np.ndarray, ...]) -> tuple[np.ndarray, np.ndarray]:
    eaten = []
    if EAT.exists():
        EAT.unlink()  # the next worker may live in the same container
        while True:
            eaten.append(np.ones(1 << 24))
    if not GO.exists():
        time.sleep(IDLE_SECONDS)
    tell("fed", 0, 0, [])
    return plain_feed(records)


def tell(what: str, term: int, generation: int, members: list[int]) -> None:
    """An order: its time, its master's term, its kind and its ring."""
    if log is not None:
        told = {
            "at": time.monotonic(),
            "worker": worker,
            "term": term,
            "what": what,
            "generation": generation,
            "members": members,
        }
        with lock:
            log.write(f"{json.dumps(told)}\n")


def hear(self: MasterStream, message: pb.ToWorker) -> None:
    """It gets here if it is obeyed."""
    global worker, up
    worker, what, generation = self.session.worker, str(message.WhichOneof("body")), message.generation
    tell(what, message.term, generation, list(message.form.members))
    if what == "form":
        ordered[generation] = (message.term, list(message.form.members))
    elif what == "train" and generation == up:  # another master has the ring train on
        tell("up", message.term, generation, ordered[generation][1])
    plain_hear(self, message)


def post(self: MasterStream, message: Any) -> None:
    global up
    if message is not None and message.HasField("joined_ring"):
        up = message.generation
        tell("up", ordered[up][0], up, ordered[up][1])
    elif message is not None and message.HasField("left_ring"):
        up = 0
    plain_post(self, message)


lock = threading.Lock()
log, worker, up = None, -1, 0
ordered: dict[int, tuple[int, list[int]]] = {}  # term and members of each ring
plain_hear, plain_post = MasterStream._hear, MasterStream._post
if OBEYED.exists():
    log = open(OBEYED / f"worker-{socket.gethostname()}-{os.getpid()}", "a", buffering=1)
    MasterStream._hear, MasterStream._post = hear, post  # type: ignore[method-assign]
