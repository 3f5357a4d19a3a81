# SPDX-License-Identifier: Apache-2.0
"""The worker's session with its master: the orders received, the messages sent, and what is left to do.

`Session` lies between the main thread, which trains, and the stream, which receives and sends at any time
(trainer/session/client.py). It has no thread, socket or clock of its own: the main thread waits for a `Bell`,
and messages go out through `send`. So the simulator runs the same session in virtual time. (`say_saved` and
`waiting` alone wait for themselves, for what takes real time anyhow.)

`SessionState` is the part that outlives a master: the worker sends it to the next one.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Protocol

import edl
from edl.contract.converted import converted
from edl.contract.heartbeats import Activity, ServerWait, Staleness, Usage
from edl.contract.proto import edl_pb2 as pb
from edl.errors import EdlError, UserCodeError
from edl.trainer.runtime import error_report
from edl.trainer.session.orders import End, Export, FormRing, Order, WriteCheckpoint
from edl.trainer.session.waits import Waits

NO_GENERATION = -1
# The messages that a new master receives again, because the former one may have died with them. Those about
# a ring are repeated until the next ring. Not repeated are `ready`, `joined_ring` and `left_ring`, which
# `resume` has; heartbeats, and `finished` of Horovod's scripts, which come again anyhow; answers to orders
# that a new master repeats (but `saved` is, since a file is of use without its worker); and the rendezvous
# and checkpoint attempts of a former master, which a new one begins anew.
REPEATED = frozenset({"built", "leaving", "warned", "warm_started", "saved", "failed"})
REPEATED_IN_RING = frozenset({"stepped", "epoch_ended", "evaluated", "bad_records"})
NOTED_SECONDS = 5.0
HELD_UP_SECONDS = 0.1  # of a wait that holds up the ring: a step may wait for records for a moment
SHOWN_SECONDS = 1.0  # of an activity, before heartbeats report it


class SessionState:
    """What a master must know of this worker: its last ring, how it went, and what was reported since.

    A new master knows nothing of what a worker has reported to a former one. So each report is repeated to
    it, whether or not the former one had received it, and the core ignores what it knows already.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._members: tuple[int, ...] = ()
        self._ready: pb.Ready | None = None
        self._up, self._left = False, False
        self._out: pb.LeftRing | None = None
        self._leaving = ""
        self._reports: dict[tuple[str, str], pb.FromWorker] = {}  # by kind and subject, oldest first

    @property
    def ready(self) -> bool:
        """Whether this worker has reported ready; before, a new master needs to know nothing."""
        return self._ready is not None

    def form(self, generation: int, members: tuple[int, ...], untrusted_up_to: int = 0) -> None:
        """Record that this worker was ordered into a ring.

        Args:
            untrusted_up_to: states of this ring and of earlier ones are not to be used.
        """
        if untrusted_up_to and self.generation <= untrusted_up_to:
            self._out = None
        self.generation, self._members, self._up, self._left = generation, members, False, False
        self._reports = {key: told for key, told in self._reports.items() if key[0] in REPEATED}

    def is_inside(self, generation: int) -> bool:
        """Whether this is the last ring this worker was ordered into, and it has not left it."""
        return generation == self.generation > 0 and not self._left

    def note(self, message: pb.FromWorker) -> None:
        """Record a message of this worker, whether or not a master has received it."""
        match message.WhichOneof("body"):
            case "ready":
                self._ready = message.ready
                self._reports.pop(("built", ""), None)  # `resume` has the number of tables
            case "joined_ring" if message.generation == self.generation:
                self._up = True
            case "left_ring":
                self._out, self._left = message.left_ring, message.generation == self.generation
            case "leaving":
                self._leaving = message.leaving.why
            case "records_read" if self._out is not None:
                self._out.reads = False
        kind = message.WhichOneof("body") or ""
        of_this_ring = kind in REPEATED_IN_RING and message.generation == self.generation
        if kind in REPEATED or of_this_ring:
            key = kind, _subject(message)
            self._reports.pop(key, None)
            self._reports[key] = message

    def reports(self) -> list[pb.FromWorker]:
        """The reports for a new master, oldest first; they follow `resume`."""
        return list(self._reports.values())

    def resume(self) -> pb.Resume:
        """The message for a new master."""
        assert self._ready is not None
        ready = self._ready
        return pb.Resume(
            layout=ready.layout,
            model=ready.model,
            held_out=ready.held_out,
            forced=ready.forced,
            tables=ready.tables,
            sample_loss=ready.sample_loss if ready.HasField("sample_loss") else None,
            digests=ready.digests,
            members=self._members,
            joined=self._up,
            left=self._left,
            left_ring=self._out,
            leaving=self._leaving,
        )


def _subject(message: pb.FromWorker) -> str:
    """What a report is about; a later report about the same replaces it."""
    match message.WhichOneof("body"):
        case "warned":
            return message.warned.text
        case "bad_records":
            records = message.bad_records
            return f"{records.epoch}: {sorted(records.records)}"
        case "evaluated":
            return message.evaluated.split
        case "saved":
            return "variables" if message.saved.variables else "model"
    return ""


@dataclass(frozen=True, slots=True)
class EpochLoss:
    """The loss of the ring's steps in one epoch, as far as this worker was in the ring."""

    epoch: int  # from 0
    records: int = 0
    mean: float = 0.0  # over these records
    last: float = 0.0  # of the last step

    def after(self, loss: float, records: int) -> EpochLoss:
        """Add one more step."""
        total = self.records + records
        return EpochLoss(self.epoch, total, self.mean + (loss - self.mean) * records / total, loss)

    def message(self) -> pb.EpochLoss:
        """The loss as a message to the master."""
        return pb.EpochLoss(epoch=self.epoch, records=self.records, mean=self.mean)


@dataclass(frozen=True, slots=True)
class Progress:
    """What heartbeats report. One value, replaced whole, so that a heartbeat never mixes two steps."""

    generation: int = 0
    step: int = 0
    records: int = 0  # trained by this worker in this ring, to compute its rate
    seconds: float = 0.0  # that they took to compute, without waiting
    loss: EpochLoss | None = None
    round: int = 0  # the evaluation batch after that step
    staleness: Staleness | None = None


class Bell(Protocol):
    """Wakes the main thread; `threading.Event` is one."""

    def set(self) -> None:
        """Wake the main thread, now or at its next `wait`."""
        ...

    def clear(self) -> None:
        """Forget earlier calls of `set`."""
        ...

    def wait(self, timeout: float | None = None) -> object:
        """Wait for `set`, at most `timeout` seconds."""
        ...


class Session:
    """What the main thread and the stream of one worker share.

    Args:
        worker: this worker's id; the master's welcome may change it.
        send: sends a message; called from any thread, it keeps the order.
        bell: wakes the main thread.
    """

    def __init__(
        self,
        worker: int,
        send: Callable[[pb.FromWorker], None],
        bell: Bell,
    ):
        self.worker = worker
        self.state = SessionState()
        self.progress = Progress()
        self.stopped = False  # the master has ordered this worker to end
        # The server that a call waits for; from any thread.
        self.waits: Callable[[], ServerWait | None] = lambda: None
        self.waiting = Waits(self.was_cut)  # for records, which its ring can end
        # What this worker does that its ring may wait for; from any thread.
        self.activity: Callable[[], Activity | None] = self.waiting.longest
        self.ended = ""  # why the stream has ended for good; empty before
        self._send, self._bell = send, bell
        self._orders: deque[Order] = deque()
        self.epochs = 0  # to train, by the master's newest order
        self._leave_generation = self._cut_generation = self._checkpoint_generation = NO_GENERATION
        self._commit: Callable[[pb.CommitCheckpoint], None] = lambda order: None
        self._cut: Callable[[], None] = lambda: None
        self._when_ended: Callable[[], None] = lambda: None
        self._noted = threading.Event()
        self.send_results: Callable[[], None] = lambda: None  # to where they outlive this worker
        self._rate, self._usage = 0.0, Usage()  # as reported last
        self._reported_staleness: Staleness | None = None  # as reported last on this stream

    # --- the main thread's side

    def next_order(self) -> Order:
        """Wait for the next order of the master, and return it."""
        while not self._orders:
            self._bell.wait()
            self._bell.clear()
        return self._orders.popleft()

    def must_leave(self, generation: int) -> bool:
        """Whether the master wants the members of `generation` to leave at a step boundary."""
        return self._leave_generation == generation

    def checkpoint_is_due(self, generation: int) -> bool:
        """Whether the master wants rank 0 of `generation` to have a checkpoint begun."""
        return self._checkpoint_generation == generation

    def checkpoint_begins(self) -> None:
        """Record that the checkpoint that the master wanted has begun."""
        self._checkpoint_generation = NO_GENERATION

    def say_saved(self, saved: pb.Saved, seconds: float = NOTED_SECONDS) -> None:
        """Report where the model is saved, and wait until the master has recorded it.

        If this worker dies afterwards, the model is not trained again. A master that does not answer is
        waited for only `seconds`.
        """
        self.send_results()
        self._noted.clear()
        self.say(saved=saved)
        self._noted.wait(seconds)

    def say_finished(self, finished: pb.Finished) -> None:
        """Report that all results of the job are there."""
        self.send_results()
        self.say(finished=finished)

    def was_cut(self, generation: int) -> bool:
        """Whether the master has called this generation off, or this worker is to end."""
        return self._cut_generation == generation or self.stopped or bool(self.ended)

    # --- from any thread

    def say(self, generation: int = 0, **what: object) -> None:
        """Send one message, e.g. `say(g, joined_ring=pb.JoinedRing(step=3))`."""
        self._send(pb.FromWorker(generation=generation, **what))  # type: ignore[arg-type]

    def fail(self, error: BaseException) -> None:
        """Report why this worker cannot continue."""
        ours = isinstance(error, EdlError)  # then a different worker would fail, too
        plain = ours and not isinstance(error, UserCodeError)  # the message needs no traceback
        text = "" if plain else error_report.format_traceback(error)
        why = error_report.format_error(error)
        if not plain and (where := error_report.error_location(error)):
            why = f"{why} ({where})"
        mistake = not ours and error_report.is_reproducible(error)
        if lack := error_report.lack_of_gpu_memory(error):
            failed = pb.Failed(why=lack, traceback=error_report.format_traceback(error), no_gpu_memory=True)
        else:
            failed = pb.Failed(why=why, traceback=text, fatal=ours, mistake=mistake)
        self.say(failed=failed)

    def began_with(self, text: str) -> None:
        """Show the user what the training begins with."""
        self.say(warm_started=pb.WarmStarted(text=text))

    def warn(self, text: str) -> None:
        """Show the user a warning, which does not stop this worker."""
        self.say(warned=pb.Warned(text=text))

    def break_ring(self) -> None:
        """Break the ring that this worker is in, and its calls to servers."""
        self._cut_generation = self.state.generation
        self._end_waits()

    def held_up(self, seconds: float = HELD_UP_SECONDS) -> str:
        """Describe what this worker has waited for, beside its ring; empty if it does not wait.

        All members wait for this worker then, before they can leave at the end of the step.

        Args:
            seconds: the least duration of a wait for records.
        """
        if (server := self.waits()) is not None:
            return f"parameter server {server.server} does not answer"
        wait = self.waiting.longest()
        return f"it {wait.what}" if wait is not None and wait.seconds >= seconds else ""

    def _end_waits(self) -> None:
        self._cut()
        self.waiting.wake()

    def cuts(self, cut: Callable[[], None]) -> None:
        """Set the function that cuts the ring. It may be called from any thread."""
        self._cut = cut

    def commits(self, commit: Callable[[pb.CommitCheckpoint], None]) -> None:
        """Set the function that completes checkpoints. It may be called from any thread."""
        self._commit = commit

    def when_ended(self, act: Callable[[], None]) -> None:
        """Set a function to be called, on any thread, when this worker is to end or has lost its master."""
        self._when_ended = act

    # --- the stream's side

    def greeting(self) -> list[pb.FromWorker]:
        """The first messages of a stream: what this worker has reported to former masters comes again."""
        self._reported_staleness = None
        hello = pb.Hello(
            worker=self.worker, version=edl.__version__, resumes=self.state.ready, pid=os.getpid()
        )
        messages = [pb.FromWorker(hello=hello)]
        if self.state.ready:
            messages.append(pb.FromWorker(generation=self.state.generation, resume=self.state.resume()))
        return messages + self.state.reports()

    def heartbeat(self, rate: float, usage: Usage) -> None:
        """Report the training's progress.

        Args:
            rate: records per second of this worker.
        """
        self._rate, self._usage = rate, usage
        self.beat()

    def beat(self) -> None:
        """Report the training's progress now, without waiting for the next heartbeat."""
        progress = self.progress
        speed = progress.records / progress.seconds if progress.seconds else 0.0
        usage = asdict(self._usage)
        beat = pb.Heartbeat(step=progress.step, round=progress.round, rate=self._rate, speed=speed, **usage)
        if (loss := progress.loss) is not None:
            beat.loss = loss.last
            beat.epoch_loss.CopyFrom(loss.message())
        staleness = progress.staleness
        if staleness is not None and staleness != self._reported_staleness:
            self._reported_staleness = staleness
            beat.staleness.CopyFrom(pb.Staleness(**asdict(staleness)))
        if (waits := self.waits()) is not None:
            beat.waits.CopyFrom(pb.ServerWait(**asdict(waits)))
        if (activity := self.activity()) is not None and activity.seconds >= SHOWN_SECONDS:
            beat.activity.CopyFrom(pb.Activity(**asdict(activity)))
        self.say(progress.generation, heartbeat=beat)

    def hear(self, message: pb.ToWorker) -> None:
        """Receive a message of the master."""
        generation = message.generation
        match message.WhichOneof("body"):
            case "form":
                form = message.form
                self.state.form(generation, tuple(form.members), form.untrusted_up_to)
                self.epochs = form.epochs
                self._orders.append(converted(FormRing, form, generation=generation))
            case "train" if generation == self.state.generation:
                self.epochs = message.train.epochs
            case "leave":
                self._leave_generation = generation
            case "cut":
                self._cut_generation = generation
                self._end_waits()
            case "checkpoint":
                self._checkpoint_generation = generation
            case "commit_checkpoint":
                self._commit(message.commit_checkpoint)
            case "write_checkpoint":
                self._orders.append(WriteCheckpoint())
            case "ack":
                self._noted.set()
            case "export":
                self._orders.append(Export())
            case "stop":
                self.stopped = True
                self._orders.clear()  # a new master may have repeated orders that are done
                self._orders.append(End(message.stop.why))
                self._leave_generation = self.progress.generation
                self._end_waits()
                self._when_ended()
        self._bell.set()

    def end(self, why: str) -> None:
        """The stream has ended for good: this worker is out of the job."""
        self.ended = why
        self._orders.append(End(why, lost=True))
        self._end_waits()
        self._when_ended()
        self._bell.set()
