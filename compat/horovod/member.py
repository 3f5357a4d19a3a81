# SPDX-License-Identifier: Apache-2.0
"""This process as a member of rings, while it runs a script that was written for Horovod.

`current()` is the `Worker` that this process is.

An elastic worker is in a ring of one outside of the function that `hvd.elastic.run` decorates. So imports,
building, a first `fit` and the reset callbacks cannot wait for other workers. It is ready when it enters that
function. The master then forms a ring, and running workers do not wait for a worker that starts.

A worker of a plain script is ready in `hvd.init()`, which returns in the ring of all workers. There is no
second ring in a process: when it breaks, the process ends, and all workers start again from the top.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

import numpy as np
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt

from edl.config import Config
from edl.contract.exit_codes import WorkerExit
from edl.contract.layout import Layout
from edl.contract.proto import edl_pb2 as pb
from edl.trainer.model import snapshot
from edl.trainer.ring.base import RingBroken, broadcast_parts
from edl.trainer.ring.horovod import HorovodRing
from edl.trainer.runtime.termination import end_children, leave
from edl.trainer.session.client import MasterStream
from edl.trainer.session.orders import End, FormRing
from edl.trainer.session.state import Progress

COMMITS = Layout(records=1 << 50)  # more than any script makes: the master counts each commit as one step
CUT_SECONDS = 1.0  # within which the master cuts a ring that has lost a member
AGAIN_SECONDS = 2.0
VOTE_SECONDS, MAX_COMMITS = 0.25, 10  # between two votes whether the ring changes


class Shared(Protocol):
    """The methods of a state that `run` calls."""

    def on_reset(self) -> None: ...

    def sync(self) -> None: ...

    def restore(self) -> None: ...


class Stopped(BaseException):
    """The master has ended this worker."""

    def __init__(self, end: End):
        super().__init__(end.why)
        self.end = end


class Worker:
    """A worker of a job.

    Args:
        ready: called when the worker is ready; takes the seconds that it may need to leave a ring.
    """

    def __init__(self, stream: MasterStream, config: Config, ready: Callable[[float], None]):
        self._stream, self._session, self._config, self._when_ready = stream, stream.session, config, ready
        self.elastic = config.horovod.elastic
        interface, port = os.environ.get("EDL_RING_INTERFACE", "lo"), int(stream.address.rpartition(":")[2])
        self._ring = HorovodRing(
            stream.store_port,
            interface,
            f"worker-{self._session.worker}",
            port,
            stream.store_secret,
            graphs=False,
        )
        # Until the master places this worker: a newcomer is never rank 0, which writes files.
        self.size = max(config.workers, 1)
        self.rank = min(self._session.worker, self.size - 1)
        self._generation = 0  # of the ring that this worker is in; 0: its own
        self._began = self._is_ready = self._has_state = False
        self._commits = 0
        self._committed_at: float | None = None
        # Commits from one vote to the next, and until the next; the same on all members of a ring.
        self._each = self._until_vote = 1
        self._voted_at = 0.0
        self._stall: float | None = None  # a ring was formed, and has not committed yet
        self._session.cuts(self._ring.cut if self.elastic else self._end_process)

    # --- hvd.init and hvd.elastic

    def init(self) -> None:
        """Join a ring: `hvd.init()`. An elastic script joins one in `run` only."""
        if self._began:
            return
        self._began = True
        if self.elastic:
            self._form_alone()
            return
        self._ready()
        form = self._next_ring()
        self._place(form)
        try:
            self._form(self.rank, self.size)
        except RingBroken as error:
            print(f"the ring broke while it was formed: {error}", file=sys.stderr)
            self._end_process()
        self._joined(form)

    def run(self, state: Shared, call: Callable[[], Any]) -> Any:
        """Call the training function in ring after ring, until it returns: `hvd.elastic.run`."""
        self.init()
        if not self.elastic:
            state.sync()
            return call()
        self._ready()
        while True:
            form = self._next_ring()
            self._place(form)
            if self._committed_at is not None or self._has_state:
                state.on_reset()
            broken = ""
            try:
                self._enter(form, state)
                return call()
            except HostsUpdatedInterrupt:
                pass
            except Exception as error:
                if not self._breaks(form.generation, error):
                    raise
                broken = (str(error).splitlines() or [type(error).__name__])[0][:200]
                self._ring.cut()  # so that all other ranks notice at once
            self._generation = 0
            self._ring.close()
            if broken:
                state.restore()
            self._form_alone()
            left = pb.LeftRing(step=self._commits, has_state=self._has_state, broken=broken)
            self._session.say(form.generation, left_ring=left)

    def committed(self) -> None:
        """Count a commit of the script, and leave the ring if all members must.

        Raises:
            HostsUpdatedInterrupt: the ring changes.
        """
        if not self._generation:
            return
        self._commits += 1
        leave = self._all_leave()
        self._report()
        if leave:
            raise HostsUpdatedInterrupt(False)

    def check(self, save: Callable[[], None]) -> None:
        """Leave the ring if all members must, after `save`.

        Raises:
            HostsUpdatedInterrupt: the ring changes.
        """
        if self._generation and self._all_leave():
            # All members leave here, and a member that the ring broke for has one commit less.
            save()
            self._commits += 1
            raise HostsUpdatedInterrupt(False)

    @property
    def must_leave(self) -> bool:
        """Whether the master wants the members of this worker's ring to leave it."""
        return bool(self._generation) and self._session.must_leave(self._generation)

    def broadcast(self, variables: Sequence[Any], root: int = 0) -> None:
        """Give the variables the values that they have on rank `root`."""
        parts = broadcast_parts(self._ring, snapshot.parts(variables), root, self.rank)
        snapshot.take_over(variables, snapshot.prepared(variables, parts))

    def place(self, name: str) -> int:
        """This worker's planned or present place: its rank, size, cross_rank or cross_size.

        All workers of a machine count as one host: each has a machine or container of its own elsewhere.
        """
        mine = (self.rank, self.size)
        one_host = os.environ.get("EDL_RING_INTERFACE", "lo") == "lo"
        local, across = (mine, (0, 1)) if one_host else ((0, 1), mine)
        of, _, which = name.rpartition("_")
        rank, size = {"": mine, "local": local, "cross": across}[of]
        return rank if which == "rank" else size

    def finished(self) -> None:
        """Report that the script has ended by itself, until the master has ended this worker."""
        ended = threading.Event()
        self._session.cuts(lambda: None)
        self._session.when_ended(ended.set)
        while not (self._session.stopped or self._session.ended):
            self._session.say(self._generation, finished=pb.Finished())
            ended.wait(AGAIN_SECONDS)  # a master that died has not recorded it

    # --- rings

    def _ready(self) -> None:
        """Report this worker ready, once."""
        if self._is_ready:
            return
        self._is_ready = True
        elastic = self._config.elastic
        self._when_ready(elastic.grace_period_seconds if self.elastic else 0.0)
        self._stream.start_heartbeats(elastic.heartbeat_timeout_seconds)
        layout = pb.Layout(records=COMMITS.records, block=COMMITS.block, shards=COMMITS.shards)
        self._session.say(ready=pb.Ready(layout=layout))

    def _next_ring(self) -> FormRing:
        while True:
            match self._session.next_order():
                case FormRing() as form:
                    return form
                case End() as end:
                    raise Stopped(end)

    def _place(self, form: FormRing) -> None:
        self.rank, self.size = form.members.index(self._session.worker), len(form.members)

    def _form(self, rank: int, size: int) -> None:
        """Form a ring.

        Horovod's graphs ask for the size if HOROVOD_ELASTIC is set. Its engine would ask a driver. Scripts
        read their place in the environment, as horovodrun sets it.
        """
        os.environ["HOROVOD_ELASTIC"] = "0"
        self._ring.form(rank, size)
        here = {"HOROVOD_RANK": str(self.rank), "HOROVOD_SIZE": str(self.size)}
        os.environ.update(here, HOROVOD_ELASTIC=str(int(self.elastic)))

    def _form_alone(self) -> None:
        """Form a ring of this worker alone."""
        while True:
            try:
                return self._form(0, 1)
            except RingBroken:  # a late cut of the ring that it has left
                self._ring.close()

    def _enter(self, form: FormRing, state: Shared) -> None:
        """Meet the other members, and receive the state of rank 0.

        Raises:
            RingBroken: a member died meanwhile, or the master called the ring off.
        """
        self._ring.close()  # its own
        if self._session.was_cut(form.generation):
            raise RingBroken("the ring was cut before it was formed")
        self._form(self.rank, self.size)
        state.sync()
        self._commits = int(self._ring.broadcast(np.array([self._commits], np.int64), 0)[0])
        self._joined(form)

    def _joined(self, form: FormRing) -> None:
        self._generation, self._has_state = form.generation, True
        self._each = self._until_vote = 1
        now = self._voted_at = time.monotonic()
        self._stall = 0.0 if self._committed_at is None else now - self._committed_at
        self._session.progress = Progress(form.generation, self._commits)
        self._session.say(form.generation, joined_ring=pb.JoinedRing(step=self._commits))

    def _all_leave(self) -> bool:
        """Whether the master wants a member to leave; all members agree on it.

        They vote by an all-reduce, which takes milliseconds. So commits that follow each other quickly share
        a vote. How many do is agreed upon in the vote before.
        """
        self._until_vote -= 1
        if self._until_vote > 0:
            return False
        seconds = time.monotonic() - self._voted_at
        votes = self._ring.reduce(tf.constant([float(self.must_leave), seconds / self._each]))
        leave, of_one_commit = np.asarray(votes)
        commits = int(VOTE_SECONDS * self.size / max(float(of_one_commit), VOTE_SECONDS / MAX_COMMITS))
        self._each = self._until_vote = min(max(commits, 1), MAX_COMMITS)
        self._voted_at = time.monotonic()
        return bool(leave > 0)

    def _report(self) -> None:
        now, self._committed_at = time.monotonic(), time.monotonic()
        if self._stall is not None:
            stepped = pb.Stepped(step=self._commits, stall_seconds=self._stall)
            self._session.say(self._generation, stepped=stepped)
            self._stall = None
        done = self._session.progress
        self._session.progress = Progress(self._generation, self._commits, done.records + 1, now)

    def _breaks(self, generation: int, error: Exception) -> bool:
        """Whether an error of the script means that the ring is broken, and is not the script's own."""
        if isinstance(error, (RingBroken, HorovodInternalError)):
            return True
        if not isinstance(error, tf.errors.OpError):
            return False
        if isinstance(error, tf.errors.FailedPreconditionError) and "shut down" not in error.message:
            return False  # ranks called different operations
        deadline = time.monotonic() + CUT_SECONDS
        while "Horovod" not in error.message:  # an operation with a name of its own
            if self._session.was_cut(generation):
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)  # no event says that the master has cut the ring
        return True

    def _end_process(self) -> NoReturn:
        """End this process with all others of a plain script; called from any thread."""
        code = WorkerExit.PEER_BROKEN
        if self._session.stopped:
            code = WorkerExit.STOPPED
        elif self._session.ended:
            code = WorkerExit.LOST
        self._exit(code)

    @staticmethod
    def _exit(code: WorkerExit) -> NoReturn:
        sys.stdout.flush()
        sys.stderr.flush()
        end_children()
        leave(code)


_worker: list[Worker] = []


def current() -> Worker:
    """The worker that this process is."""
    return _worker[0]


def become(worker: Worker) -> None:
    """Set the worker that this process is."""
    _worker[:] = [worker]
