# SPDX-License-Identifier: Apache-2.0
"""The start of a worker's process: what is ready before the user's code is imported, and limits its time.

`build` makes a worker of it, `script` runs a script.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

from edl import config as config_module
from edl import scratch
from edl.config import Config
from edl.contract import artifacts
from edl.contract.exit_codes import WorkerExit
from edl.contract.heartbeats import Activity
from edl.contract.proto import edl_pb2 as pb
from edl.trainer.ring.gloo import GlooRing
from edl.trainer.runtime import output_lock
from edl.trainer.runtime.gpu_memory import set_gpu_memory, set_threads
from edl.trainer.runtime.log import log
from edl.trainer.runtime.termination import end_children, leave
from edl.trainer.runtime.watchdog import STARTUP_TIMEOUT, Compute, Doing, Limit, Watchdog
from edl.trainer.session.client import MasterStream
from edl.trainer.session.results import PLACE, SentResults
from edl.trainer.session.state import Session

if TYPE_CHECKING:
    from edl.trainer.model.user_model import UserModel
    from edl.trainer.ring.horovod import HorovodRing

RingOfJob = TypeVar("RingOfJob", bound=GlooRing)
OWN_TIME = 0.95  # of the startup timeout: the worker reports what hangs before the master gives it up


@dataclass
class Begun:
    """A worker's process before the user's code is imported.

    Args:
        config: the values of the job; the mode may be decided later (mode=auto).
        doing: names the present stage of the start.
        output: the job's output directory; None if it has none.
        results: the directory of this run's results: `output`, or a directory in it.
    """

    config: Config
    stream: MasterStream
    watchdog: Watchdog
    doing: Doing
    output: Path | None
    results: Path | None

    @property
    def session(self) -> Session:
        """The worker's session with its master."""
        return self.stream.session

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Limit the time of the start, from the master's welcome to the end of the block."""
        startup = Limit(OWN_TIME * self.config.elastic.startup_timeout_seconds, STARTUP_TIMEOUT)
        with self.watchdog.watch(self.doing.words, startup) as start:
            start.began = self.stream.opened_at
            yield

    def compute(self, waits: Callable[[], bool]) -> Compute:
        """Limit the time of the user's code in steps, except while `waits` is true."""
        elastic = self.config.elastic
        limits = elastic.step_timeout_seconds, elastic.startup_timeout_seconds
        return Compute(self.watchdog, *limits, waits=waits, warn=self.session.warn)


def begin(stream: MasterStream) -> Begun:
    """Read the job's values, and prepare this process for the user's code."""
    config = config_module.parse(json.loads(stream.config_json))
    if not config.model.script:
        set_gpu_memory(config.worker.gpu_memory)
        set_threads(config.local.threads, config.training.deterministic)
    output = results = Path(stream.output) if stream.output else None
    if output is not None:
        output_lock.hold(output, stream.run_id)
        if config.trains and os.environ.get(output_lock.PER_RUN):
            results = output_lock.results_of(output, stream.run_id)
        scratch.remove_abandoned(results, artifacts.SAVING)
        if config.trains and (place := os.environ.get(PLACE)):
            sent = SentResults(output, f"{place}run-{stream.run_id}", stream.session)
            stream.session.send_results = sent.send
    watchdog = Watchdog(config.elastic.step_timeout_seconds, partial(_hung, stream))
    stream.session.activity = partial(_activity, stream.session, watchdog)
    return Begun(config, stream, watchdog, Doing(), output, results)


@dataclass
class Context(Begun):
    """A process whose user code is imported, and its end of the ring.

    Args:
        name: the name of the user's module, for messages.
        module: the user's module.
    """

    module: UserModel
    name: str
    ring: HorovodRing

    def warn(self, text: str) -> None:
        """Show a warning: on one worker for all, the others only log it."""
        if self.stream.runs_preflight:
            self.session.warn(text)
        else:
            log.warning(text)

    def waits_for_server(self) -> bool:
        """Whether a call to a parameter server is unanswered: then the user's code is not to blame."""
        return self.session.waits() is not None


def ring_of(stream: MasterStream, engine: type[RingOfJob]) -> RingOfJob:
    """Return this worker's end of its rings. The session can cut them."""
    session = stream.session
    interface, port = os.environ.get("EDL_RING_INTERFACE", "lo"), int(stream.address.rpartition(":")[2])
    ring = engine(stream.store_port, interface, f"worker-{session.worker}", port, stream.store_secret)
    session.cuts(ring.cut)
    return ring


def _activity(session: Session, watchdog: Watchdog) -> Activity | None:
    """Describe what this worker does that its ring may wait for: its longest wait, or call of user code."""
    if (wait := session.waiting.longest()) is None:
        call = watchdog.longest()
        return replace(call, what=f"is busy with {call.what.rstrip(',')}") if call is not None else None
    read = watchdog.longest(reading=True)
    return replace(wait, what=f"{wait.what}: {read.what}") if read is not None else wait


def _hung(stream: MasterStream, why: str, stack: str) -> None:
    """Report that a call of the user's code does not return, and end the process.

    Nothing but the end of the process can end such a call.
    """
    print(f"edl worker {stream.session.worker}: {why}", file=sys.stderr, flush=True)
    stream.session.say(failed=pb.Failed(why=why, traceback=stack))
    abandon(stream)


def abandon(stream: MasterStream) -> NoReturn:
    """End this process, whose main thread is blocked."""
    stream.close()
    end_children()
    leave(WorkerExit.FAILED)
